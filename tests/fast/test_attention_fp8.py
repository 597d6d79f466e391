"""Attention with products in float8: layer by layer on a CPU, one product that is cut for its heads on a GPU."""

# B batch, T queries, D width

from __future__ import annotations

import copy
from typing import cast

import pytest
import torch
from torch import Tensor

from tests.fast.compare import as_near, context, fast_copy, outcome
from tests.fast.test_attention import made
from tests.kernels.launch import DEVICE, needs_fp8, needs_triton
from tests.parts.drawing import random
from trivium.fast.attention import FastAttention
from trivium.fast.linear import use_fp8
from trivium.fast.masks import FastScoreMask
from trivium.kernels import fp8
from trivium.kernels.hardware import INTERPRETED
from trivium.parts.attention import MultiHeadAttention, split_heads
from trivium.parts.masks import Mask
from trivium.parts.options.attention import MultiHeadOptions
from trivium.parts.options.positions import RotaryOptions
from trivium.parts.positions import Positions
from trivium.parts.site import Site

SITE = Site(width=32, context=16, heads=2, head=16, value=16)
CAUSAL = Mask(causal=True)
CASES = ["bare", "no bias", "turned", "normed", "odd", "frozen"]


def narrow(case: str, device: str = "cpu") -> tuple[FastAttention, Positions, Tensor]:
    """A layer in training with products in float8, its positions and its input."""
    options = MultiHeadOptions(
        heads=2, bias="none" if case == "no bias" else "all", norm="rms" if case == "normed" else "none"
    )
    part = fast_copy(made(options, SITE).to(device)).train()
    assert isinstance(part, FastAttention)
    use_fp8(part, True)
    if case == "frozen":
        for layer in (part.query, part.key, part.value):
            layer.requires_grad_(False)
    position = RotaryOptions().build(SITE).to(device) if case == "turned" else Positions()
    return part, position, random(2, 5 if case == "odd" else 8, 32, seed=7).to(device)


def by_products(part: MultiHeadAttention, x_BTD: Tensor, position: Positions) -> Tensor:
    """The layer by products in float8 of its four matrices, one after another, and torch's attention."""
    ctx, dtype = context(x_BTD, CAUSAL, position, FastScoreMask), torch.bfloat16
    kind = torch.float32 if x_BTD.device.type == "cpu" else dtype  # as it is faster there
    query, key, value = (
        split_heads(fp8.product8(x_BTD, layer.weight, layer.bias, dtype), 16).to(kind)
        for layer in (part.query, part.key, part.value)
    )
    if part.query_norm is not None and part.key_norm is not None:
        query, key = part.query_norm(query), part.key_norm(key)
    query, key = (position.rotate(one, ctx.prepared) for one in (query, key))
    with torch.autocast(x_BTD.device.type, enabled=False):
        mixed = torch.nn.functional.scaled_dot_product_attention(
            query, key.to(query.dtype), value.to(query.dtype), is_causal=True, scale=part.scale
        )
    mixed = mixed.transpose(1, 2).flatten(2).to(dtype)
    return fp8.product8(mixed, part.out.weight, part.out.bias, dtype)


@pytest.mark.parametrize("case", [case for case in CASES if case not in ("odd", "normed")])
def test_on_a_cpu_each_layer_is_a_product_in_float8(case: str) -> None:
    part, position, x_BTD = narrow(case)
    found = outcome(
        lambda x: cast(Tensor, part(x, context(x, CAUSAL, position, FastScoreMask))),
        x_BTD,
        list(part.parameters()),
        autocast=True,
    )
    expected = outcome(lambda x: by_products(part, x, position), x_BTD, list(part.parameters()), autocast=True)
    for one, other in zip(found, expected, strict=True):
        if INTERPRETED:  # one product and its kernel, which does not round to the nearest there
            assert (one.float() - other.float()).norm() <= 5e-2 * other.float().norm() + 1e-2
        else:
            assert torch.equal(one, other)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("device", ["cpu", pytest.param("launched", marks=needs_triton)])
def test_in_float8_a_layer_differs_from_bfloat16_where_its_sizes_fit(case: str, device: str) -> None:
    part, position, x_BTD = narrow(case, DEVICE if device == "launched" else "cpu")

    def run(x: Tensor) -> Tensor:
        return cast(Tensor, part(x, context(x, CAUSAL, position, FastScoreMask)))

    found = outcome(run, x_BTD, list(part.parameters()), autocast=True)
    use_fp8(part, False)
    assert torch.equal(outcome(run, x_BTD, list(part.parameters()), autocast=True)[0], found[0]) == (case == "odd")


@pytest.mark.parametrize("device", ["cpu", pytest.param("launched", marks=needs_triton)])
def test_nothing_is_in_float8_without_a_gradient_or_autocast(device: str) -> None:
    part, position, x_BTD = narrow("bare", DEVICE if device == "launched" else "cpu")

    def twice() -> list[Tensor]:
        ctx = context(x_BTD, CAUSAL, position, FastScoreMask)
        with torch.autocast(x_BTD.device.type, torch.bfloat16), torch.no_grad():
            quiet = part(x_BTD, ctx)
        return [quiet, part(x_BTD, ctx).detach()]  # float32 was asked for

    found = twice()
    use_fp8(part, False)
    assert all(torch.equal(one, other) for one, other in zip(found, twice(), strict=True))


@needs_triton
@pytest.mark.parametrize("way", ["eager", "compiled"])
@pytest.mark.parametrize("case", ["bare", "no bias", "turned", "normed", "frozen"])
def test_one_product_in_float8_is_as_near_to_float64_as_one_product_after_another(
    case: str, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if INTERPRETED and way == "compiled" and case != "bare":
        pytest.skip("compiling in the interpreter takes long, and the graph is the same")
    part, position, x_BTD = narrow(case, DEVICE)
    cuts: list[torch.Size] = []
    whole = fp8.cut8

    def cut8(
        x: Tensor, weight: Tensor, bias: Tensor | None, heads: int, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor, Tensor]:
        cuts.append(x.shape)
        return whole(x, weight, bias, heads, dtype)

    monkeypatch.setattr(fp8, "cut8", cut8)

    def run(x: Tensor) -> Tensor:
        return cast(Tensor, part(x, context(x, CAUSAL, position, FastScoreMask)))

    torch._dynamo.reset()
    call = torch.compile(run, backend="aot_eager", fullgraph=True) if way == "compiled" else run
    found = outcome(call, x_BTD, list(part.parameters()), autocast=True)
    torch._dynamo.reset()
    assert bool(cuts) == (case in ("bare", "no bias", "frozen"))  # elsewhere there would be nothing to gain
    apart = outcome(lambda x: by_products(part, x, position), x_BTD, list(part.parameters()), autocast=True)
    wide, turned = copy.deepcopy(part).double(), copy.deepcopy(position)
    exact = outcome(
        lambda x: cast(Tensor, wide(x, context(x, CAUSAL, turned, FastScoreMask))),
        x_BTD.double(),
        list(wide.parameters()),
    )
    for one, other, right in zip(found, apart, exact, strict=True):
        # weights as large as these make 0.3 of a bit that falls to the other side; the gradients of keys' biases are
        # 0, all that is there is rounding
        assert (one - right).norm() < 1.5 * (other - right).norm() + 1e-2 + 0.01 * right.norm()
        assert right.norm() < 1e-6 or (one - right).norm() < 0.5 * right.norm()


@needs_fp8
@pytest.mark.parametrize("case", ["bare", "no bias"])
def test_on_a_gpu_the_layer_compiled_by_inductor_is_as_near_as_the_eager_one(case: str) -> None:
    part, position, x_BTD = narrow(case, "cuda")

    def run(x: Tensor) -> Tensor:
        return cast(Tensor, part(x, context(x, CAUSAL, position, FastScoreMask)))

    torch._dynamo.reset()
    leaves = list(part.parameters())
    eager = outcome(run, x_BTD, leaves, autocast=True)
    compiled = outcome(torch.compile(run, fullgraph=True), x_BTD, leaves, autocast=True)
    torch._dynamo.reset()
    wide = copy.deepcopy(part).double()
    exact = outcome(
        lambda x: cast(Tensor, wide(x, context(x, CAUSAL, position, FastScoreMask))),
        x_BTD.double(),
        list(wide.parameters()),
    )
    as_near(compiled, eager, exact)
