"""OPT against `transformers`: logits, every layer, left padding, and as a text."""

# B batch, T tokens, V vocabulary

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import OPTConfig, OPTForCausalLM

from tests.oracle.copying import copy, enliven, ids, logits, near, near_states, states
from trivium.generation.engine import Request, stream
from trivium.generation.sampling import Sampling
from trivium.models.presets import gpt
from trivium.models.transformer import Transformer, build

VOCAB = 89
SHAPES = [gpt.Shape(3, 36, 3), gpt.Shape(2, 40, 5)]


def pair(shape: gpt.Shape, *, seed: int, spread: float = 0.15) -> tuple[Any, Transformer]:
    theirs = OPTForCausalLM(
        OPTConfig(
            vocab_size=VOCAB,
            hidden_size=shape.width,
            word_embed_proj_dim=shape.width,
            num_hidden_layers=shape.layers,
            ffn_dim=4 * shape.width,
            num_attention_heads=shape.heads,
        )
    ).eval()
    enliven(theirs, seed=seed, spread=spread)
    ours = build(replace(gpt.opt(shape), vocab=VOCAB)).eval()
    copy(theirs, ours, "opt")
    return theirs, ours


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("seed", [0, 1])
def test_logits_equal_those_of_transformers(shape: gpt.Shape, seed: int) -> None:
    theirs, ours = pair(shape, seed=seed)
    tokens_BT = ids(3, 7 + 6 * seed, seed, VOCAB)
    with torch.no_grad():
        other = theirs(tokens_BT).logits
    near(logits(ours, tokens_BT), other)


def test_logits_equal_in_double_precision() -> None:
    theirs, ours = pair(SHAPES[0], seed=2)
    tokens_BT = ids(3, 12, 2, VOCAB)
    with torch.no_grad():
        other = theirs.double()(tokens_BT).logits
    near(logits(ours.double(), tokens_BT), other, 1e-10)


def test_left_padded_logits_equal_those_of_transformers() -> None:
    theirs, ours = pair(SHAPES[0], seed=3)
    tokens_BT, pads_B1 = ids(3, 9, 3, VOCAB), torch.tensor([[0], [2], [5]])
    at_1T = torch.arange(9)[None]
    real_BT, positions_BT = at_1T >= pads_B1, (at_1T - pads_B1).clamp(min=0)
    with torch.no_grad():
        other = theirs(tokens_BT, attention_mask=real_BT.long()).logits  # it counts its positions from the mask
    mine = logits(ours, tokens_BT, padding=real_BT, positions=positions_BT)
    near(mine[real_BT], other[real_BT])


def test_every_layer_equals_that_of_transformers() -> None:
    theirs, ours = pair(SHAPES[0], seed=4)
    tokens_BT = ids(2, 11, 4, VOCAB)
    with torch.no_grad():
        other = theirs(tokens_BT, output_hidden_states=True).hidden_states
    near_states(states(ours.decoder, lambda: ours(tokens_BT)), other)


def test_a_greedy_continuation_equals_that_of_transformers() -> None:
    theirs, ours = pair(SHAPES[0], seed=5, spread=0.6)
    tokens_1T = ids(1, 6, 1, VOCAB)
    with torch.no_grad():
        expected = theirs.generate(
            tokens_1T,
            attention_mask=torch.ones_like(tokens_1T),
            max_new_tokens=24,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=1,
        )[0, 6:].tolist()
    request = Request(ids=tuple(tokens_1T[0].tolist()), tokens=24, sampling=Sampling(temperature=0), seed=0)
    assert [token.id for token in stream(ours, [request], end=None)] == expected
    assert len(set(expected)) > 4  # it says something
