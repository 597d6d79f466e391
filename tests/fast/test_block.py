"""Post-norm blocks with a bf16 residual stream: one kernel for the gradients of norm, residual and bias."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.fast.compare import as_near, narrow
from tests.kernels.launch import DEVICE, needs_triton
from tests.parts.drawing import random
from trivium.fast.block import FastBlock, TwoReaders
from trivium.fast.choose import FastOptions, for_training
from trivium.fast.stack import FastStack
from trivium.models.config import ModelConfig, Stack
from trivium.models.options import Block
from trivium.models.transformer import Transformer, build
from trivium.parts.options.attention import MultiHeadOptions
from trivium.parts.options.feedforward import FeedForward, GluOptions, MlpOptions
from trivium.parts.options.norms import LayerNormOptions, Norm
from trivium.parts.options.residual import PostOptions

FEEDS: dict[str, FeedForward] = {
    "mlp": MlpOptions(),
    "glu": GluOptions(hidden=48, bias=True),
    "no bias": MlpOptions(bias=False),
}


def made(feed: str, norm: Norm | None = None, rate: float = 0.0) -> Transformer:
    """Encoder and decoder of post-norm blocks on the device of the kernels, with lively weights."""
    attention = MultiHeadOptions(heads=4, bias="none" if feed == "no bias" else "all")
    block = Block(
        attention=attention,
        feedforward=FEEDS[feed],
        residual=PostOptions(),
        norm=norm or LayerNormOptions(),
        variational_dropout=rate,
    )
    crossed = Block(
        attention=attention,
        cross=attention,
        feedforward=FEEDS[feed],
        residual=PostOptions(),
        norm=norm or LayerNormOptions(),
        variational_dropout=rate,
    )
    sides = Stack(layers=2, block=block), Stack(layers=2, block=crossed)
    model = build(ModelConfig(width=32, context=16, vocab=50, encoder=sides[0], decoder=sides[1]), seed=1)
    with torch.no_grad():
        for index, parameter in enumerate(model.parameters()):
            parameter.add_(random(*parameter.shape, seed=index) * 0.1)
    return model.to(DEVICE).train()


def stepped(model: nn.Module, *, half: bool = True) -> list[Tensor]:
    """The states and all gradients of a step whose residual stream is in bfloat16."""
    ids = torch.randint(50, (2, 16), generator=torch.Generator().manual_seed(0)).to(DEVICE)
    torch.manual_seed(5)
    with torch.autocast(DEVICE, torch.bfloat16, enabled=half, cache_enabled=False):
        hidden: Tensor = model(ids, source=ids.flip(1)).hidden
    upstream = random(*hidden.shape, seed=3).to(DEVICE, hidden.dtype)
    leaves = [parameter for name, parameter in model.named_parameters() if "output" not in name]
    return [hidden.detach(), *torch.autograd.grad(hidden, leaves, upstream, allow_unused=True, materialize_grads=True)]


def compared(plain: Transformer, change: Any = None) -> None:
    """The fast model is as near to float64 as the plain one."""
    fast, wide = copy.deepcopy(plain), copy.deepcopy(plain).double()
    for_training(fast, FastOptions())
    assert any(type(module) is FastBlock for module in fast.modules())
    fast.residual_dtype = torch.bfloat16
    plain = narrow(plain)
    for model in (plain, fast, wide):
        if change is not None:
            change(model)
    as_near(stepped(fast), stepped(plain), stepped(wide, half=False), 2.0)  # of a few bf16 numbers, by chance


@needs_triton
@pytest.mark.parametrize("feed", FEEDS)
def test_a_step_is_as_near_to_float64_as_that_of_plain_blocks(feed: str) -> None:
    compared(made(feed))


@needs_triton
def test_a_norm_without_a_bias_and_recomputed_blocks_have_the_same_gradients() -> None:
    compared(made("mlp", LayerNormOptions(bias=False)))

    def recomputed(model: Transformer) -> None:
        model.recompute = True

    compared(made("mlp"), recomputed)


@needs_triton
@pytest.mark.parametrize("place", ["attention.out", "attention", "around_attention", "around_attention.norm"])
def test_a_hook_is_honoured_where_the_kernel_would_take_its_place(place: str) -> None:
    def hooked(model: Transformer) -> None:
        assert model.encoder is not None
        for block in model.encoder.blocks:
            block.get_submodule(place).register_forward_hook(lambda module, given, out: out * 1.5)

    compared(made("mlp"), hooked)


def test_two_readers_are_those_of_the_last_norm_alone() -> None:
    readers, one, other = TwoReaders(), torch.ones(2), torch.zeros(2)
    assert readers.outputs(one) == (one, one)
    assert readers.put(one, other) is one
    assert readers.outputs(one) == (one, other)
    assert readers.outputs(other) == (other, other)


def test_on_a_cpu_a_fast_stack_of_fast_blocks_gives_what_the_plain_one_gives() -> None:
    plain = made("mlp", rate=0.2).cpu()
    fast = copy.deepcopy(plain)
    for_training(fast, FastOptions())
    assert type(fast.encoder) is FastStack
    ids = torch.arange(12).view(2, 6)
    results = []
    for model in (plain, fast):
        torch.manual_seed(0)
        hidden = model(ids, source=ids).hidden
        results.append([hidden, *torch.autograd.grad(hidden.pow(3).sum(), list(model.decoder.parameters()))])  # type: ignore[union-attr]
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-3)
