"""T5 v1.0 and v1.1 against `transformers`: logits, every layer, padded sources, and as a text."""

# B batch, S source tokens, T target tokens, V vocabulary

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn
from transformers import T5Config, T5ForConditionalGeneration

from tests.oracle.copying import copy, enliven, ids, logits, near, near_gradients, near_sides
from trivium.models.presets import PRESETS, t5
from trivium.models.transformer import Transformer, build
from trivium.parts.attention import MultiHeadAttention

VOCAB = 83
# heads times head is not the width, in both directions
SHAPES = [t5.Shape(3, 30, 52, heads=4, head=6), t5.Shape(2, 24, 40, heads=5, head=8)]
Version = Literal["v1.0", "v1.1"]


def published(version: Version, shape: t5.Shape, vocab: int) -> Any:
    """A fresh T5 of theirs."""
    old = version == "v1.0"
    config = T5Config(
        vocab_size=vocab,
        d_model=shape.width,
        d_ff=shape.hidden,
        d_kv=shape.head,
        num_heads=shape.heads,
        num_layers=shape.layers,
        num_decoder_layers=shape.layers,
        feed_forward_proj="relu" if old else "gated-gelu",
        tie_word_embeddings=old,
        decoder_start_token_id=0,
    )
    theirs = T5ForConditionalGeneration(config).eval()
    if not old:  # transformers 5 ties a fresh v1.1 all the same: its False only means "do not scale"
        theirs.lm_head.weight = nn.Parameter(torch.randn(vocab, shape.width) * shape.width**-0.5)
    assert theirs.config.scale_decoder_outputs is old
    return theirs


def pair(version: Version, shape: t5.Shape, *, seed: int = 0, spread: float = 0.15) -> tuple[Any, Transformer]:
    old = version == "v1.0"
    theirs = published(version, shape, VOCAB)
    enliven(theirs, seed=seed, spread=spread)
    ours = build(replace(t5.v1_0(shape) if old else t5.v1_1(shape), vocab=VOCAB)).eval()
    copy(theirs, ours, "t5")
    return theirs, ours


def text(seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Sources, which of their tokens are real, and targets."""
    source_BS = ids(3, 13, seed, VOCAB)
    return source_BS, torch.arange(13)[None] < torch.tensor([[13], [9], [4]]), ids(3, 8, seed + 100, VOCAB)


@pytest.mark.parametrize("version", ["v1.0", "v1.1"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("seed", [0, 1])
def test_logits_equal_those_of_transformers(version: Version, shape: t5.Shape, seed: int) -> None:
    theirs, ours = pair(version, shape, seed=seed)
    source_BS, real_BS, target_BT = text(seed)
    with torch.no_grad():
        other = theirs(input_ids=source_BS, attention_mask=real_BS.long(), decoder_input_ids=target_BT).logits
    near(logits(ours, target_BT, source=source_BS, source_padding=real_BS), other)


@pytest.mark.parametrize("version", ["v1.0", "v1.1"])
def test_far_buckets_equal_those_of_transformers(version: Version) -> None:
    theirs, ours = pair(version, SHAPES[1], seed=2)
    source_BS, target_BT = ids(1, 200, 2, VOCAB), ids(1, 180, 3, VOCAB)
    with torch.no_grad():
        other = theirs(input_ids=source_BS, decoder_input_ids=target_BT).logits
    near(logits(ours, target_BT, source=source_BS), other)


@pytest.mark.parametrize("version", ["v1.0", "v1.1"])
def test_every_layer_equals_that_of_transformers(version: Version) -> None:
    theirs, ours = pair(version, SHAPES[0], seed=4)
    near_sides(theirs, ours, *text(4))


@pytest.mark.parametrize("version", ["v1.0", "v1.1"])
def test_gradients_equal_those_of_transformers(version: Version) -> None:
    theirs, ours = pair(version, SHAPES[0], seed=5)
    source_BS, real_BS, target_BT = text(5)
    labels_BT = ids(3, 8, 9, VOCAB)
    inputs = {"input_ids": source_BS, "attention_mask": real_BS.long(), "decoder_input_ids": target_BT}
    theirs(**inputs, labels=labels_BT).loss.backward()
    hidden = ours(target_BT, source=source_BS, source_padding=real_BS).hidden
    ours.head.nll(hidden.flatten(0, 1), labels_BT.flatten()).mean().backward()  # type: ignore[no-untyped-call]
    near_gradients(theirs, ours, "t5")


@pytest.mark.parametrize("version", ["v1.0", "v1.1"])
def test_a_greedy_text_through_the_cache_equals_that_of_transformers(version: Version) -> None:
    theirs, ours = pair(version, SHAPES[0], seed=8, spread=0.7)
    source_BS, real_BS, _ = text(6)
    with torch.no_grad():
        expected_BT = theirs.generate(
            source_BS,
            attention_mask=real_BS.long(),
            max_new_tokens=20,
            min_new_tokens=20,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
        cache = ours.cache(3, 21)
        written_BT = torch.zeros(3, 1, dtype=torch.long)  # the padding id is also the first input of the decoder
        for _ in range(20):
            hidden = ours(written_BT[:, -1:], source=source_BS, source_padding=real_BS, cache=cache).hidden
            written_BT = torch.cat((written_BT, ours.head.logits(hidden)[:, -1:].argmax(-1)), dim=1)
    assert written_BT.tolist() == expected_BT.tolist()
    assert len(set(expected_BT.flatten().tolist())) > 6  # it says something


def test_a_scaled_score_or_an_unscaled_output_would_show() -> None:
    theirs, ours = pair("v1.0", SHAPES[0], seed=7)
    source_BS, real_BS, target_BT = text(7)
    with torch.no_grad():
        other = theirs(input_ids=source_BS, attention_mask=real_BS.long(), decoder_input_ids=target_BT).logits
    for module in ours.modules():
        if isinstance(module, MultiHeadAttention):
            module.scale = 6**-0.5
    assert (logits(ours, target_BT, source=source_BS, source_padding=real_BS) - other).abs().max() > 1e-2


@pytest.mark.parametrize("version", ["v1.0", "v1.1"])
def test_logits_of_random_shapes_equal_those_of_transformers(
    version: Version, count: Callable[[int, int], int]
) -> None:
    draw = random.Random(0)
    for seed in range(count(2, 60)):
        layers, width, hidden = draw.randint(1, 3), draw.randint(9, 48), draw.randint(5, 70)
        shape = t5.Shape(layers, width, hidden, heads=draw.randint(1, 6), head=draw.randint(1, 12))
        theirs, ours = pair(version, shape, seed=seed)
        source_BS, real_BS, target_BT = text(seed)
        with torch.no_grad():
            other = theirs(input_ids=source_BS, attention_mask=real_BS.long(), decoder_input_ids=target_BT).logits
        near(logits(ours, target_BT, source=source_BS, source_padding=real_BS), other)


@pytest.mark.full
@pytest.mark.parametrize("version", ["v1.0", "v1.1"])
def test_full_size_logits_equal_those_of_transformers(version: Version) -> None:
    torch.manual_seed(0)  # their own init: with any other, scores without a scale run away at this width
    name = "t5-small" if version == "v1.0" else "t5v1.1-small"
    theirs, ours = published(version, (t5.V1_0 | t5.V1_1)[name], 32_128), build(PRESETS[name]()).eval()
    copy(theirs, ours, "t5")
    source_BS, target_BT = ids(2, 100, 8, 32_128), ids(2, 60, 9, 32_128)
    with torch.no_grad():
        other = theirs(input_ids=source_BS, decoder_input_ids=target_BT).logits
    near(logits(ours, target_BT, source=source_BS), other)
