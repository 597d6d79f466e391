"""LLaMA, Mistral and Qwen3 against `transformers`: groups, windows, scaled frequencies, QK-norm, and as a text."""

# B batch, T tokens, V vocabulary

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from tests.oracle.copying import copy, enliven, ids, left_padded, logits, near, near_states, same_text, states
from trivium.models.presets import PRESETS, llama
from trivium.models.transformer import Transformer, build
from trivium.parts.options.scaling import Llama3

VOCAB, CONTEXT = 97, 48


def sizes(shape: llama.Shape) -> dict[str, Any]:
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": shape.theta}
    if isinstance(shape.scaling, Llama3):
        rope |= {
            "rope_type": "llama3",
            "factor": shape.scaling.factor,
            "low_freq_factor": shape.scaling.low,
            "high_freq_factor": shape.scaling.high,
            "original_max_position_embeddings": shape.scaling.original,
        }
    return {
        "vocab_size": shape.vocab,
        "hidden_size": shape.width,
        "intermediate_size": shape.hidden,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.groups,
        "head_dim": shape.head,
        "max_position_embeddings": shape.context,
        "rms_norm_eps": shape.eps,
        "rope_parameters": rope,
        "tie_word_embeddings": shape.tie == "all",
        "bos_token_id": None,
        "eos_token_id": None,
    }


def small(groups: int = 2, head: int = 8, **options: Any) -> llama.Shape:
    return llama.Shape(3, 32, 56, 4, groups, head, VOCAB, CONTEXT, **options)


def same(
    theirs: PreTrainedModel, shape: llama.Shape, *, seed: int = 0, spread: float = 0.15
) -> tuple[Any, Transformer]:
    enliven(theirs.eval(), seed=seed, spread=spread)
    ours = build(llama.llama(shape)).eval()
    copy(theirs, ours, theirs.config.model_type)
    return theirs, ours


def pair(shape: llama.Shape, *, seed: int = 0, spread: float = 0.15) -> tuple[Any, Transformer]:
    return same(LlamaForCausalLM(LlamaConfig(**sizes(shape))), shape, seed=seed, spread=spread)


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("groups", [1, 2, 4])
def test_logits_equal_those_of_transformers(tied: bool, groups: int) -> None:
    theirs, ours = pair(small(groups, tie="all" if tied else "none"), seed=groups)
    tokens_BT = ids(3, 12, groups, VOCAB)
    with torch.no_grad():
        other = theirs(tokens_BT).logits
    near(logits(ours, tokens_BT), other)


@pytest.mark.parametrize(("head", "theta"), [(16, 100_000.0), (6, 500.0)])
def test_other_head_sizes_and_bases_equal_over_the_whole_context(head: int, theta: float) -> None:
    theirs, ours = pair(small(head=head, theta=theta, tie="all"))
    tokens_BT = ids(2, CONTEXT, 0, VOCAB)
    with torch.no_grad():
        other = theirs(tokens_BT).logits
    near(logits(ours, tokens_BT), other)


def test_left_padded_logits_equal_those_of_transformers() -> None:
    theirs, ours = pair(small())
    tokens_BT, real_BT, positions_BT = left_padded(VOCAB)
    mine = logits(ours, tokens_BT, padding=real_BT, positions=positions_BT)
    with torch.no_grad():
        other = theirs(tokens_BT, attention_mask=real_BT.long(), position_ids=positions_BT).logits
    near(mine[real_BT], other[real_BT])


def test_a_greedy_continuation_equals_that_of_transformers() -> None:
    theirs, ours = pair(small(), spread=0.6)
    found = same_text(theirs, ours, ids(1, 6, 1, VOCAB))
    assert len(set(found)) > 4  # it says something


def test_every_layer_equals_that_of_transformers() -> None:
    theirs, ours = pair(small(), seed=4)
    tokens_BT = ids(2, 11, 4, VOCAB)
    with torch.no_grad():
        other = theirs(tokens_BT, output_hidden_states=True).hidden_states
    near_states(states(ours.decoder, lambda: ours(tokens_BT)), other)


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_scaled_frequencies_equal_those_of_transformers(factor: float) -> None:
    # trained to 16 tokens, so that the whole ramp lies within this context
    shape = small(head=16, theta=500.0, scaling=Llama3(factor=factor, original=16))
    theirs, ours = pair(shape, seed=5)
    tokens_BT = ids(2, CONTEXT, 5, VOCAB)
    with torch.no_grad():
        other = theirs(tokens_BT).logits
    near(logits(ours, tokens_BT), other)
    plain = pair(small(head=16, theta=500.0), seed=5)[1]  # the same weights
    assert (logits(plain, tokens_BT) - other).abs().max() > 1e-2


def test_the_window_of_mistral_equals_that_of_transformers() -> None:
    shape = small(window=5)
    config = MistralConfig(**sizes(shape), sliding_window=5)
    theirs, ours = same(MistralForCausalLM(config), shape, seed=6)
    tokens_BT = ids(2, 23, 6, VOCAB)
    with torch.no_grad():
        other = theirs(tokens_BT).logits
    near(logits(ours, tokens_BT), other)
    wide = same(MistralForCausalLM(config), small(window=6), seed=6)[1]  # the same weights
    assert (logits(wide, tokens_BT) - other).abs().max() > 1e-2


@pytest.mark.parametrize("tie", ["all", "none"])
def test_logits_of_qwen3_equal_those_of_transformers(tie: Any) -> None:
    shape = small(head=12, norm="rms", eps=1e-6, theta=1e6, tie=tie)
    theirs, ours = same(Qwen3ForCausalLM(Qwen3Config(**sizes(shape))), shape, seed=7)
    tokens_BT = ids(3, 19, 7, VOCAB)
    with torch.no_grad():
        other = theirs(tokens_BT, output_hidden_states=True)
    near(logits(ours, tokens_BT), other.logits)
    near_states(states(ours.decoder, lambda: ours(tokens_BT)), other.hidden_states)


def test_logits_of_random_shapes_equal_those_of_transformers(count: Callable[[int, int], int]) -> None:
    draw = random.Random(0)
    for seed in range(count(3, 60)):
        groups = draw.randint(1, 4)
        heads = groups * draw.randint(1, 4)
        width = heads * draw.randint(2, 6)  # transformers wants a multiple, though nothing there needs it
        layers, hidden, head = draw.randint(1, 3), draw.randint(5, 70), 2 * draw.randint(1, 8)
        shape = llama.Shape(layers, width, hidden, heads, groups, head, VOCAB, CONTEXT)
        theirs, ours = pair(shape, seed=seed)
        tokens_BT = ids(2, draw.randint(2, CONTEXT), seed, VOCAB)
        with torch.no_grad():
            other = theirs(tokens_BT).logits
        near(logits(ours, tokens_BT), other)


@pytest.mark.full
def test_full_size_logits_equal_those_of_transformers() -> None:
    shape = llama.SMOLLM2["smollm2-135m"]
    theirs, ours = LlamaForCausalLM(LlamaConfig(**sizes(shape))).eval(), build(PRESETS["smollm2-135m"]()).eval()
    copy(theirs, ours, "llama")
    tokens_BT = ids(1, 256, 0, 49_152)
    with torch.no_grad():
        other = theirs(tokens_BT).logits
    near(logits(ours, tokens_BT), other)
