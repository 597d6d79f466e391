"""Matrices in bfloat16 beside those that learn: the same products and gradients, and nobody else meets them."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import pytest
import torch
from torch import Tensor

from tests.kernels.launch import DEVICE, needs_triton
from trivium.fast.bf16_copies import Bf16Copies
from trivium.fast.choose import FastOptions, for_training
from trivium.fast.linear import FastLinear
from trivium.models.config import ModelConfig, Stack
from trivium.models.options import Block
from trivium.models.transformer import Transformer, build, load_weights, weights
from trivium.parts.options.attention import MultiHeadOptions
from trivium.parts.options.feedforward import FeedForward, GluOptions, MlpOptions

FEEDS: dict[str, FeedForward] = {
    "mlp": MlpOptions(),
    "relu": MlpOptions(activation="relu", bias=False),
    "glu": GluOptions(hidden=48),
}


def made(feed: FeedForward, groups: int = 0, bias: bool = True, device: str = "cpu") -> Transformer:
    seen = MultiHeadOptions(heads=4, groups=groups, bias="all" if bias else "none")
    block = Block(attention=seen, feedforward=feed)
    both = Block(attention=seen, feedforward=feed, cross=MultiHeadOptions(heads=4))
    side, other = Stack(layers=2, block=block), Stack(layers=2, block=both)
    model = build(ModelConfig(width=32, context=16, vocab=50, encoder=side, decoder=other), seed=1, device=device)
    for_training(model, FastOptions())
    return model


def backward(model: Transformer, twins: Bf16Copies | None) -> Tensor:
    ids = torch.randint(50, (2, 16), generator=torch.Generator().manual_seed(0)).to(model.device)
    how: AbstractContextManager[None] = nullcontext() if twins is None else twins.used()
    with torch.autocast(model.device.type, torch.bfloat16), how:
        loss: Tensor = model(ids, source=ids.flip(1)).hidden.square().mean()
        loss.backward()  # type: ignore[no-untyped-call]
    return loss.detach()


@pytest.mark.parametrize("device", ["cpu", pytest.param("launched", marks=needs_triton)])
@pytest.mark.parametrize("groups", [0, 2])
@pytest.mark.parametrize("feed", FEEDS)
def test_gradients_are_those_of_the_weights_to_the_bit(feed: str, groups: int, device: str) -> None:
    where = DEVICE if device == "launched" else device  # there one product makes queries, keys and values
    plain, model = (made(FEEDS[feed], groups, bias=feed == "mlp", device=where) for _ in range(2))
    twins = Bf16Copies(model)
    assert torch.equal(backward(plain, None), backward(model, twins))
    moved = {id(pair.weight): pair.gradient for pair in twins.pairs()}
    assert len(moved) >= 2 * 6  # at least the matrices that have a product of their own in all cases
    for theirs, ours in zip(plain.parameters(), model.parameters(), strict=True):
        if id(ours) in moved:
            assert ours.grad is None
            assert theirs.grad is not None
            assert torch.equal(moved[id(ours)].float(), theirs.grad)
        else:
            assert ours.grad is not None
            assert theirs.grad is not None
            assert torch.equal(ours.grad, theirs.grad)
    assert sum(gradient.numel() for gradient in twins.gradients()) == sum(one.numel() for one in moved.values())
    twins.clear()
    assert not list(twins.pairs())
    assert not twins.gradients()


@needs_triton
def test_where_one_product_makes_several_layers_so_does_their_twin() -> None:
    model = made(GluOptions(hidden=48), bias=False, device=DEVICE)
    twins = Bf16Copies(model)
    backward(model, twins)
    own = {id(layer.weight) for layer in model.modules() if isinstance(layer, FastLinear) and layer.role != "head"}
    apart = {id(parameter) for parameter in model.parameters() if parameter.grad is not None}
    assert not own & apart
    assert own - apart


def test_outside_of_a_training_step_nobody_meets_them() -> None:
    model = made(MlpOptions())
    twins = Bf16Copies(model)
    backward(model, None)
    assert not list(twins.pairs())
    assert all(one.grad is not None for one in model.parameters())
    model.zero_grad()
    ids = torch.zeros(1, 4, dtype=torch.long)
    with twins.used():
        with torch.no_grad():
            quiet = model(ids, source=ids).hidden
        full = model(ids, source=ids).hidden  # no autocast: float32
        full.sum().backward()
    assert torch.equal(quiet, full)
    assert quiet.dtype == torch.float32
    assert not list(twins.pairs())
    with pytest.raises(RuntimeError, match="stop"), twins.used():
        raise RuntimeError("stop")
    assert all(layer.bf16_copy is None for layer in model.modules() if isinstance(layer, FastLinear))
    assert "copy" not in " ".join(model.state_dict())


def test_what_is_written_into_the_weights_is_taken_over() -> None:
    model, other = made(MlpOptions()), made(MlpOptions())
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(1.5)
    twins, expected = Bf16Copies(model), Bf16Copies(other)
    load_weights(model, weights(other))
    stale = backward(model, twins)
    twins.clear()
    model.zero_grad()
    twins.refresh()
    fresh = backward(model, twins)
    assert torch.equal(fresh, backward(other, expected))
    assert not torch.equal(fresh, stale)
    for one, two in zip(twins.pairs(), expected.pairs(), strict=True):
        assert torch.equal(one.copy, one.weight.bfloat16())
        assert torch.equal(one.gradient, two.gradient)


def test_after_others_have_moved_the_weights_nothing_is_taken_for_granted() -> None:
    """A recorded step moves them again and again, and torch does not count what a fused optimizer writes."""
    model = made(MlpOptions())
    twins = Bf16Copies(model)
    backward(model, None)
    twins.mark_stale()
    for _ in range(3):
        for parameter in model.parameters():
            parameter.data.mul_(1.5)  # which is not counted either
        twins.refresh()
        for twin, layers in twins._copies:
            assert torch.equal(twin.detach(), torch.cat([layer.weight.detach() for layer in layers]).bfloat16())


def test_what_is_frozen_or_dropped_has_none() -> None:
    model = made(MlpOptions())
    for layer in model.modules():
        if isinstance(layer, FastLinear) and layer.role == "down":
            layer.weight.requires_grad_(False)
    twins = Bf16Copies(model)
    backward(model, twins)
    assert all(pair.weight.requires_grad for pair in twins.pairs())
    twins.drop()
    model.zero_grad()
    backward(model, twins)
    assert not list(twins.pairs())
    assert all(one.grad is not None for one in model.parameters() if one.requires_grad)
