"""LLaMA against `transformers`: grouped heads, tied and untied, padded, and as a text."""

# B batch, T tokens, V vocabulary

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from tests.oracle.copying import copy_llama, enliven
from trivium.generation.engine import Request, stream
from trivium.generation.sampling import Sampling
from trivium.models.config import Block, ModelConfig, Stack
from trivium.models.presets import llama
from trivium.models.transformer import Transformer, build
from trivium.parts.attention import MultiHead
from trivium.parts.embeddings import Tokens
from trivium.parts.feedforward import Glu
from trivium.parts.norms import RMSNorm
from trivium.parts.positions import Rotary

VOCAB, CONTEXT = 97, 48


def pair(
    *, tied: bool, groups: int, head: int = 8, theta: float = 10_000.0, seed: int = 0, spread: float = 0.15
) -> tuple[Any, Transformer]:
    theirs = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCAB,
            hidden_size=32,
            intermediate_size=56,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=groups,
            head_dim=head,
            max_position_embeddings=CONTEXT,
            rms_norm_eps=1e-5,
            rope_parameters={"rope_type": "default", "rope_theta": theta},
            tie_word_embeddings=tied,
            bos_token_id=None,
            eos_token_id=None,
        )
    ).eval()
    enliven(theirs, seed=seed, spread=spread)
    block = Block(
        attention=MultiHead(heads=4, groups=groups, head=head),
        feedforward=Glu(hidden=56),
        norm=RMSNorm(eps=1e-5),
        position=Rotary(theta=theta),
    )
    config = ModelConfig(
        width=32,
        context=CONTEXT,
        vocab=VOCAB,
        embedding=Tokens(tie="output" if tied else "none"),
        decoder=Stack(layers=3, block=block),
    )
    ours = build(config).eval()
    copy_llama(theirs.state_dict(), ours)
    return theirs, ours


def ids(rows: int, length: int, seed: int, vocab: int = VOCAB) -> Tensor:
    return torch.randint(0, vocab, (rows, length), generator=torch.Generator().manual_seed(seed))


def near(actual: Tensor, expected: Tensor) -> None:
    """Within 1e-5, relative where logits are large."""
    torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-5)
    assert expected.std() > 0.1  # logits that say nothing would agree too easily


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("groups", [1, 2, 4])
def test_logits_equal_those_of_transformers(tied: bool, groups: int) -> None:
    theirs, ours = pair(tied=tied, groups=groups, seed=groups)
    tokens_BT = ids(3, 12, groups)
    with torch.no_grad():
        near(ours.head.logits(ours(tokens_BT).hidden), theirs(tokens_BT).logits)


@pytest.mark.parametrize(("head", "theta"), [(16, 100_000.0), (6, 500.0)])
def test_other_head_sizes_and_bases_equal_over_the_whole_context(head: int, theta: float) -> None:
    theirs, ours = pair(tied=True, groups=2, head=head, theta=theta)
    tokens_BT = ids(2, CONTEXT, 0)
    with torch.no_grad():
        near(ours.head.logits(ours(tokens_BT).hidden), theirs(tokens_BT).logits)


def test_left_padded_logits_equal_those_of_transformers() -> None:
    theirs, ours = pair(tied=False, groups=2)
    tokens_BT, pads_B1 = ids(3, 9, 3), torch.tensor([[0], [2], [5]])
    at_1T = torch.arange(9)[None]
    real_BT, positions_BT = at_1T >= pads_B1, (at_1T - pads_B1).clamp(min=0)
    with torch.no_grad():
        mine = ours.head.logits(ours(tokens_BT, padding=real_BT, positions=positions_BT).hidden)
        other = theirs(tokens_BT, attention_mask=real_BT.long(), position_ids=positions_BT).logits
    near(mine[real_BT], other[real_BT])


def test_a_greedy_continuation_equals_that_of_transformers() -> None:
    theirs, ours = pair(tied=False, groups=2, spread=0.6)
    tokens_1T = ids(1, 6, 1)
    with torch.no_grad():
        text = theirs.generate(
            tokens_1T,
            attention_mask=torch.ones_like(tokens_1T),
            max_new_tokens=32,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )[0, 6:].tolist()
    request = Request(ids=tuple(tokens_1T[0].tolist()), tokens=32, sampling=Sampling(temperature=0), seed=0)
    assert [token.id for token in stream(ours, [request], end=None)] == text
    assert len(set(text)) > 4  # it says something


@pytest.mark.full
def test_full_size_logits_equal_those_of_transformers() -> None:
    config = llama.smollm2_135m()
    theirs = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=49_152,
            hidden_size=576,
            intermediate_size=1536,
            num_hidden_layers=30,
            num_attention_heads=9,
            num_key_value_heads=3,
            max_position_embeddings=8192,
            rms_norm_eps=1e-5,
            rope_parameters={"rope_type": "default", "rope_theta": 100_000.0},
            tie_word_embeddings=True,
        )
    ).eval()
    ours = build(config).eval()
    copy_llama(theirs.state_dict(), ours)
    tokens_BT = ids(1, 256, 0, config.vocab)
    with torch.no_grad():
        near(ours.head.logits(ours(tokens_BT).hidden), theirs(tokens_BT).logits)
