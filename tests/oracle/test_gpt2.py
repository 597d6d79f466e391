"""GPT-1 and GPT-2 against `transformers`: the same weights give the same logits and the same text."""

# B batch, T tokens, V vocabulary

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, OpenAIGPTConfig, OpenAIGPTLMHeadModel

from tests.oracle.copying import (
    copy,
    enliven,
    ids,
    left_padded,
    logits,
    near,
    near_gradients,
    near_states,
    same_text,
    states,
)
from trivium.models.presets import PRESETS, gpt
from trivium.models.transformer import Transformer, build

WIDTH, LAYERS, HEADS, CONTEXT, VOCAB = 32, 3, 4, 48, 97
SIZES = {"vocab_size": VOCAB, "n_positions": CONTEXT, "n_embd": WIDTH, "n_layer": LAYERS, "n_head": HEADS}


def pair(*, first: bool, seed: int = 0, spread: float = 0.15) -> tuple[Any, Transformer]:
    theirs = OpenAIGPTLMHeadModel(OpenAIGPTConfig(**SIZES)) if first else GPT2LMHeadModel(GPT2Config(**SIZES))
    enliven(theirs.eval(), seed=seed, spread=spread)
    shape = gpt.Shape(LAYERS, WIDTH, HEADS)
    ours = build(replace(gpt.gpt(shape) if first else gpt.gpt2(shape), context=CONTEXT, vocab=VOCAB)).eval()
    copy(theirs, ours, "openai-gpt" if first else "gpt2")
    return theirs, ours


@pytest.mark.parametrize("first", [False, True], ids=["gpt2", "gpt"])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_logits_equal_those_of_transformers(first: bool, seed: int) -> None:
    theirs, ours = pair(first=first, seed=seed)
    tokens_BT = ids(3, 4 * (seed + 1), seed, VOCAB)
    with torch.no_grad():
        other = theirs(tokens_BT).logits
    near(logits(ours, tokens_BT), other)


def test_the_full_context_equals_too() -> None:
    theirs, ours = pair(first=False)
    tokens_BT = ids(1, CONTEXT, 5, VOCAB)
    with torch.no_grad():
        other = theirs(tokens_BT).logits
    near(logits(ours, tokens_BT), other)


def test_left_padded_logits_equal_those_of_transformers() -> None:
    theirs, ours = pair(first=False)
    tokens_BT, real_BT, positions_BT = left_padded(VOCAB)
    mine = logits(ours, tokens_BT, padding=real_BT, positions=positions_BT)
    with torch.no_grad():
        other = theirs(tokens_BT, attention_mask=real_BT.long(), position_ids=positions_BT).logits
    near(mine[real_BT], other[real_BT])


def test_gradients_equal_those_of_transformers() -> None:
    theirs, ours = pair(first=False)
    tokens_BT = ids(3, 9, 4, VOCAB)
    theirs(tokens_BT, labels=tokens_BT).loss.backward()
    losses = ours.head.nll(ours(tokens_BT[:, :-1]).hidden.flatten(0, 1), tokens_BT[:, 1:].flatten())
    losses.mean().backward()  # type: ignore[no-untyped-call]
    near_gradients(theirs, ours, "gpt2")


@pytest.mark.parametrize("first", [False, True], ids=["gpt2", "gpt"])
def test_every_layer_equals_that_of_transformers(first: bool) -> None:
    theirs, ours = pair(first=first, seed=6)
    tokens_BT = ids(2, 11, 6, VOCAB)
    with torch.no_grad():
        other = theirs(tokens_BT, output_hidden_states=True).hidden_states
    near_states(states(ours.decoder, lambda: ours(tokens_BT)), other)


@pytest.mark.parametrize("prompt", [3, 9])
def test_a_greedy_continuation_equals_that_of_transformers(prompt: int) -> None:
    theirs, ours = pair(first=False, spread=0.6)
    found = same_text(theirs, ours, ids(1, prompt, prompt, VOCAB))
    assert len(set(found)) > 4  # it says something


def test_a_missed_transpose_of_the_square_matrix_shows() -> None:
    theirs, ours = pair(first=False)
    tokens_BT = ids(2, 8, 0, VOCAB)
    with torch.no_grad():
        for layer in ours.modules():
            if getattr(layer, "role", "") == "attention-out":
                layer.weight.copy_(layer.weight.T.clone())  # type: ignore[operator]
        gap = (ours.head.logits(ours(tokens_BT).hidden) - theirs(tokens_BT).logits).abs().max()
    assert gap > 1e-2


@pytest.mark.full
@pytest.mark.parametrize("first", [False, True], ids=["gpt2", "gpt"])
def test_full_size_logits_equal_those_of_transformers(first: bool) -> None:
    theirs = OpenAIGPTLMHeadModel(OpenAIGPTConfig()) if first else GPT2LMHeadModel(GPT2Config())
    ours = build(PRESETS["gpt" if first else "gpt2"]()).eval()
    copy(theirs.eval(), ours, "openai-gpt" if first else "gpt2")
    tokens_BT = ids(1, 256, 0, ours.config.vocab)
    with torch.no_grad():
        other = theirs(tokens_BT).logits
    near(logits(ours, tokens_BT), other)
