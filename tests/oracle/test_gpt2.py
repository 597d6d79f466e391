"""GPT-1 and GPT-2 against `transformers`: the same weights give the same logits and the same text."""

# B batch, T tokens, V vocabulary

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel, OpenAIGPTConfig, OpenAIGPTLMHeadModel

from tests.oracle.copying import copy_gpt, enliven
from trivium.generation.engine import Request, stream
from trivium.generation.sampling import Sampling
from trivium.models.config import ModelConfig, Stack
from trivium.models.presets import gpt
from trivium.models.transformer import Transformer, build
from trivium.parts.attention import MultiHead

WIDTH, LAYERS, HEADS, CONTEXT, VOCAB = 32, 3, 4, 48, 97
SIZES = {"vocab_size": VOCAB, "n_positions": CONTEXT, "n_embd": WIDTH, "n_layer": LAYERS, "n_head": HEADS}


def small(config: ModelConfig) -> ModelConfig:
    """The preset in the sizes of this file, and otherwise as it is."""
    assert isinstance(config.decoder, Stack)
    block = config.decoder.block
    assert isinstance(block.attention, MultiHead)
    block = replace(block, attention=replace(block.attention, heads=HEADS))
    stack = replace(config.decoder, layers=LAYERS, block=block)
    return replace(config, width=WIDTH, context=CONTEXT, vocab=VOCAB, decoder=stack)


def pair(*, first: bool, seed: int = 0, spread: float = 0.15) -> tuple[Any, Transformer]:
    theirs = OpenAIGPTLMHeadModel(OpenAIGPTConfig(**SIZES)) if first else GPT2LMHeadModel(GPT2Config(**SIZES))
    enliven(theirs.eval(), seed=seed, spread=spread)
    ours = build(small(gpt.gpt() if first else gpt.gpt2())).eval()
    copy_gpt(theirs.state_dict(), ours, first=first)
    return theirs, ours


def ids(rows: int, length: int, seed: int, vocab: int = VOCAB) -> Tensor:
    return torch.randint(0, vocab, (rows, length), generator=torch.Generator().manual_seed(seed))


def near(actual: Tensor, expected: Tensor) -> None:
    """Within 1e-5, relative where logits are large."""
    torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-5)
    assert expected.std() > 0.1  # logits that say nothing would agree too easily


@pytest.mark.parametrize("first", [False, True], ids=["gpt2", "gpt"])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_logits_equal_those_of_transformers(first: bool, seed: int) -> None:
    theirs, ours = pair(first=first, seed=seed)
    tokens_BT = ids(3, 4 * (seed + 1), seed)
    with torch.no_grad():
        near(ours.head.logits(ours(tokens_BT).hidden), theirs(tokens_BT).logits)


def test_the_full_context_equals_too() -> None:
    theirs, ours = pair(first=False)
    tokens_BT = ids(1, CONTEXT, 5)
    with torch.no_grad():
        near(ours.head.logits(ours(tokens_BT).hidden), theirs(tokens_BT).logits)


def test_left_padded_logits_equal_those_of_transformers() -> None:
    theirs, ours = pair(first=False)
    tokens_BT, pads_B1 = ids(3, 9, 3), torch.tensor([[0], [2], [5]])
    at_1T = torch.arange(9)[None]
    real_BT, positions_BT = at_1T >= pads_B1, (at_1T - pads_B1).clamp(min=0)
    with torch.no_grad():
        mine = ours.head.logits(ours(tokens_BT, padding=real_BT, positions=positions_BT).hidden)
        other = theirs(tokens_BT, attention_mask=real_BT.long(), position_ids=positions_BT).logits
    near(mine[real_BT], other[real_BT])


def test_gradients_equal_those_of_transformers() -> None:
    theirs, ours = pair(first=False)
    tokens_BT = ids(3, 9, 4)
    theirs(tokens_BT, labels=tokens_BT).loss.backward()
    losses = ours.head.nll(ours(tokens_BT[:, :-1]).hidden.flatten(0, 1), tokens_BT[:, 1:].flatten())
    losses.mean().backward()  # type: ignore[no-untyped-call]
    shell = build(ours.config)
    other = {name: p.grad for name, p in theirs.named_parameters()}
    copy_gpt(other, shell, first=False)  # the same names and transposes hold for gradients
    for (name, mine), expected in zip(ours.named_parameters(), shell.parameters(), strict=True):
        assert mine.grad is not None
        torch.testing.assert_close(mine.grad, expected.detach(), atol=1e-5, rtol=1e-4, msg=name)


@pytest.mark.parametrize("prompt", [3, 9])
def test_a_greedy_continuation_equals_that_of_transformers(prompt: int) -> None:
    theirs, ours = pair(first=False, spread=0.6)
    tokens_1T = ids(1, prompt, prompt)
    with torch.no_grad():
        text = theirs.generate(
            tokens_1T,
            attention_mask=torch.ones_like(tokens_1T),
            max_new_tokens=32,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )[0, prompt:].tolist()
    request = Request(ids=tuple(tokens_1T[0].tolist()), tokens=32, sampling=Sampling(temperature=0), seed=0)
    assert [token.id for token in stream(ours, [request], end=None)] == text
    assert len(set(text)) > 4  # it says something


def test_a_missed_transpose_of_the_square_matrix_shows() -> None:
    theirs, ours = pair(first=False)
    tokens_BT = ids(2, 8, 0)
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
    ours = build(gpt.gpt() if first else gpt.gpt2()).eval()
    copy_gpt(theirs.eval().state_dict(), ours, first=first)
    tokens_BT = ids(1, 256, 0, ours.config.vocab)
    with torch.no_grad():
        near(ours.head.logits(ours(tokens_BT).hidden), theirs(tokens_BT).logits)
