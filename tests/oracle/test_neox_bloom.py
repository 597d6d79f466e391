"""GPT-NeoX (parallel block, part of each head turned) and BLOOM (ALiBi, normed embeddings) against `transformers`."""

# B batch, T tokens, V vocabulary

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import BloomConfig, BloomForCausalLM, GPTNeoXConfig, GPTNeoXForCausalLM

from tests.oracle.copying import copy, enliven, ids, left_padded, logits, near, near_states, states
from trivium.models.config import ModelConfig, Stack
from trivium.models.options import Block, Parallel
from trivium.models.transformer import Transformer, build
from trivium.parts.options.attention import MultiHeadOptions
from trivium.parts.options.embeddings import TokenEmbeddingOptions
from trivium.parts.options.feedforward import MlpOptions
from trivium.parts.options.norms import LayerNormOptions
from trivium.parts.options.positions import AlibiOptions, RotaryOptions

VOCAB, CONTEXT = 71, 64


def neox_pair(seed: int, share: float) -> tuple[Any, Transformer]:
    theirs = GPTNeoXForCausalLM(
        GPTNeoXConfig(
            vocab_size=VOCAB,
            hidden_size=48,
            num_hidden_layers=3,
            num_attention_heads=3,
            intermediate_size=88,
            max_position_embeddings=CONTEXT,
            rope_parameters={"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": share},
        )
    ).eval()
    enliven(theirs, seed=seed)
    block = Parallel(
        attention=MultiHeadOptions(heads=3, bias="all"),
        feedforward=MlpOptions(hidden=88, activation="gelu"),
        norms="two",
        position=RotaryOptions(share=share),
    )
    ours = build(
        ModelConfig(
            width=48,
            context=CONTEXT,
            vocab=VOCAB,
            embedding=TokenEmbeddingOptions(tie="none"),
            decoder=Stack(layers=3, block=block),
        )
    ).eval()
    copy(theirs, ours, "gpt_neox")
    return theirs, ours


def bloom_pair(seed: int, heads: int) -> tuple[Any, Transformer]:
    theirs = BloomForCausalLM(BloomConfig(vocab_size=VOCAB, hidden_size=48, n_layer=3, n_head=heads)).eval()
    enliven(theirs, seed=seed)
    block = Block(
        attention=MultiHeadOptions(heads=heads, bias="all"),
        feedforward=MlpOptions(activation="gelu-tanh"),
        position=AlibiOptions(),
    )
    ours = build(
        ModelConfig(
            width=48,
            context=CONTEXT,
            vocab=VOCAB,
            embedding=TokenEmbeddingOptions(norm=LayerNormOptions()),
            decoder=Stack(layers=3, block=block),
        )
    ).eval()
    copy(theirs, ours, "bloom")
    return theirs, ours


@pytest.mark.parametrize(("seed", "share"), [(0, 0.25), (1, 0.5), (2, 1.0)])
def test_logits_of_neox_equal_those_of_transformers(seed: int, share: float) -> None:
    theirs, ours = neox_pair(seed, share)
    tokens_BT = ids(3, 17, seed, VOCAB)
    with torch.no_grad():
        other = theirs(tokens_BT, output_hidden_states=True)
    near(logits(ours, tokens_BT), other.logits)
    near_states(states(ours.decoder, lambda: ours(tokens_BT)), other.hidden_states)


@pytest.mark.parametrize(("seed", "heads"), [(0, 4), (1, 6), (2, 3)])  # ALiBi has two rules for its slopes
def test_logits_of_bloom_equal_those_of_transformers(seed: int, heads: int) -> None:
    theirs, ours = bloom_pair(seed, heads)
    tokens_BT = ids(3, 17, seed, VOCAB)
    with torch.no_grad():
        other = theirs(tokens_BT, output_hidden_states=True)
    near(logits(ours, tokens_BT), other.logits)
    near_states(states(ours.decoder, lambda: ours(tokens_BT)), other.hidden_states)


@pytest.mark.parametrize("pair", [lambda: neox_pair(3, 0.25), lambda: bloom_pair(3, 6)], ids=["neox", "bloom"])
def test_left_padded_logits_equal_those_of_transformers(pair: Any) -> None:
    theirs, ours = pair()
    tokens_BT, real_BT, positions_BT = left_padded(VOCAB)
    with torch.no_grad():
        other = theirs(tokens_BT, attention_mask=real_BT.long()).logits
    mine = logits(ours, tokens_BT, padding=real_BT, positions=positions_BT)
    near(mine[real_BT], other[real_BT])
