"""OPT against `transformers`: logits, every layer, left padding, and as a text."""

# B batch, T tokens, V vocabulary

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import OPTConfig, OPTForCausalLM

from tests.oracle.copying import copy, enliven, ids, left_padded, logits, near, near_states, same_text, states
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
    tokens_BT, real_BT, positions_BT = left_padded(VOCAB)
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
    found = same_text(theirs, ours, ids(1, 6, 1, VOCAB), tokens=24)
    assert len(set(found)) > 4  # it says something
