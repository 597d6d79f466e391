"""BART and Marian against `transformers`: post-norm encoder-decoders, learned and sinusoidal positions."""

# B batch, S source tokens, T target tokens, V vocabulary

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import BartConfig, BartForConditionalGeneration, MarianConfig, MarianMTModel

from tests.oracle.copying import copy, enliven, ids, logits, near, near_sides
from trivium.models.config import ModelConfig, Stack
from trivium.models.presets import PRESETS, bart
from trivium.models.transformer import Transformer, build
from trivium.parts.options.attention import MultiHeadOptions

VOCAB, WIDTH, HEADS = 79, 36, 3
Pair = Callable[[int], tuple[Any, Transformer]]


def sizes(layers: int) -> dict[str, int]:
    sides = ("encoder", "decoder")
    return {
        "vocab_size": VOCAB,
        "d_model": WIDTH,
        **{f"{side}_layers": layers for side in sides},
        **{f"{side}_attention_heads": HEADS for side in sides},
        **{f"{side}_ffn_dim": 4 * WIDTH for side in sides},
        "pad_token_id": VOCAB - 1,
    }


def bart_pair(seed: int) -> tuple[Any, Transformer]:
    theirs = BartForConditionalGeneration(BartConfig(**sizes(3))).eval()
    enliven(theirs, seed=seed)
    ours = build(replace(bart.bart(bart.Shape(3, WIDTH, HEADS)), vocab=VOCAB)).eval()
    copy(theirs, ours, "bart")
    return theirs, ours


def smaller(config: ModelConfig) -> ModelConfig:
    """Marian in the sizes of this file, and otherwise as it is."""

    def side(stack: object) -> Stack:
        assert isinstance(stack, Stack)
        attention = MultiHeadOptions(heads=HEADS, bias="all")
        cross = attention if isinstance(stack.block.cross, MultiHeadOptions) else stack.block.cross
        return replace(stack, layers=2, block=replace(stack.block, attention=attention, cross=cross))  # type: ignore[type-var]

    return replace(config, width=WIDTH, vocab=VOCAB, encoder=side(config.encoder), decoder=side(config.decoder))


def marian_pair(seed: int) -> tuple[Any, Transformer]:
    config = MarianConfig(
        **sizes(2), max_position_embeddings=512, activation_function="swish", scale_embedding=True, eos_token_id=0
    )
    theirs = MarianMTModel(config).eval()
    enliven(theirs, seed=seed)
    ours = build(smaller(PRESETS["marian"]())).eval()
    copy(theirs, ours, "marian")
    return theirs, ours


def text(seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Sources, which of their tokens are real, and targets."""
    source_BS = ids(3, 13, seed, VOCAB)
    return source_BS, torch.arange(13)[None] < torch.tensor([[13], [9], [4]]), ids(3, 8, seed + 100, VOCAB)


@pytest.mark.parametrize("pair", [bart_pair, marian_pair])
@pytest.mark.parametrize("seed", [0, 1])
def test_logits_equal_those_of_transformers(pair: Pair, seed: int) -> None:
    theirs, ours = pair(seed)
    source_BS, real_BS, target_BT = text(seed)
    with torch.no_grad():
        other = theirs(input_ids=source_BS, attention_mask=real_BS.long(), decoder_input_ids=target_BT).logits
    near(logits(ours, target_BT, source=source_BS, source_padding=real_BS), other)


@pytest.mark.parametrize("pair", [bart_pair, marian_pair])
def test_every_layer_equals_that_of_transformers(pair: Pair) -> None:
    theirs, ours = pair(2)
    near_sides(theirs, ours, *text(2))


@pytest.mark.parametrize("pair", [bart_pair, marian_pair])
def test_a_greedy_text_through_the_cache_equals_that_of_transformers(pair: Pair) -> None:
    theirs, ours = pair(3)
    source_BS, real_BS, _ = text(3)
    with torch.no_grad():
        written_BT = torch.full((3, 1), 5)
        expected_BT, cache = written_BT, ours.cache(3, 13)
        for _ in range(12):
            other = theirs(input_ids=source_BS, attention_mask=real_BS.long(), decoder_input_ids=expected_BT).logits
            expected_BT = torch.cat((expected_BT, other[:, -1:].argmax(-1)), dim=1)
            hidden = ours(written_BT[:, -1:], source=source_BS, source_padding=real_BS, cache=cache).hidden
            written_BT = torch.cat((written_BT, ours.head.logits(hidden)[:, -1:].argmax(-1)), dim=1)
    assert written_BT.tolist() == expected_BT.tolist()
