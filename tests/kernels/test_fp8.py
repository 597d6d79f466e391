"""Products in float8, their numbers multiplied in float32 here, against the plain ones."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kernels.launch import needs_fp8
from tests.parts.drawing import random
from trivium.kernels import fp8


@given(powers=st.lists(st.integers(-60, 60), min_size=4, max_size=4), seed=st.integers(0, 2**31))
@settings(max_examples=50, deadline=None)
def test_every_number_is_kept_to_half_a_step_of_the_format_whatever_the_size_of_its_row(
    powers: list[int], seed: int
) -> None:
    x = random(4, 64, seed=seed) * 2.0 ** torch.tensor(powers)[:, None]
    scaled = fp8.quantized(x)
    limits = torch.finfo(fp8.FORMAT)
    # half a unit in the last place of a normal number, and half the smallest step below those
    room = x.abs() * limits.eps / 2 + scaled.scale * limits.tiny * limits.eps / 2
    assert ((scaled.dense() - x).abs() <= 1.0001 * room).all()
    assert (scaled.values.float().abs().amax(-1) == limits.max).all()


def test_zeros_stay_zeros() -> None:
    scaled = fp8.quantized(torch.zeros(3, 4))
    assert torch.equal(scaled.dense(), torch.zeros(3, 4))


def test_numbers_stored_column_by_column_are_stored_by_rows_afterwards() -> None:
    """The library's kernels take the left factor in no other way."""
    assert fp8.quantized(random(48, 32).t()).values.is_contiguous()


def test_numbers_that_the_format_has_are_multiplied_exactly() -> None:
    x, weight = torch.tensor([[448.0, 1.5, -2.0, 0.0]] * 16), torch.tensor([[1.0, -448.0, 0.25, 3.0]] * 16)
    found = fp8.product8(x, weight, None, torch.float32)
    assert torch.equal(found, F.linear(x, weight))


def test_outputs_and_gradients_are_within_the_noise_of_the_formats() -> None:
    x, weight, bias = (
        random(2, 64, 128).requires_grad_(),
        random(96, 128, seed=1).requires_grad_(),
        random(96, seed=2).requires_grad_(),
    )
    upstream = random(2, 64, 96, seed=3)
    plain, narrow = F.linear(x, weight, bias), fp8.product8(x, weight, bias, torch.float32)
    # rounding to three bits is off by 2.6 % (rms, uniform in a step); two factors add in squares
    assert 0.01 < (narrow - plain).norm() / plain.norm() < 0.045
    expected = torch.autograd.grad(plain, (x, weight, bias), upstream)
    found = torch.autograd.grad(narrow, (x, weight, bias), upstream)
    assert found[0].shape == x.shape
    assert 0.01 < (found[0] - expected[0]).norm() / expected[0].norm() < 0.045
    torch.testing.assert_close(found[1:], expected[1:])  # no product in float8


def test_a_row_of_large_numbers_costs_the_others_nothing() -> None:
    x, weight = random(16, 64), random(32, 64, seed=1)
    alone = fp8.product8(x, weight, None, torch.float32)
    x[3] *= 1e6
    weight[5] *= 1e6
    beside = fp8.product8(x, weight, None, torch.float32)
    rows, outputs = torch.arange(16) != 3, torch.arange(32) != 5
    assert torch.equal(beside[rows][:, outputs], alone[rows][:, outputs])


@pytest.mark.parametrize("frozen", ["x", "weight"])
def test_what_is_frozen_costs_no_gradient(frozen: str) -> None:
    x, weight = random(16, 32), random(48, 32, seed=1)
    moving = (weight if frozen == "x" else x).requires_grad_()
    (found,) = torch.autograd.grad(fp8.product8(x, weight, None, torch.float32).sum(), moving)
    assert found.shape == moving.shape
    assert found.any()


def test_a_compiler_sees_a_product_as_one_graph() -> None:
    x, weight = random(32, 16).requires_grad_(), random(48, 16, seed=1).requires_grad_()
    compiled = torch.compile(fp8.product8, backend="aot_eager", fullgraph=True)
    pairs = []
    for function in (fp8.product8, compiled):
        result = function(x, weight, None, torch.float32)
        pairs.append((result, *torch.autograd.grad(result.square().sum(), (x, weight))))
    for one, other in zip(*pairs, strict=True):
        torch.testing.assert_close(one, other)
    torch._dynamo.reset()


@needs_fp8
@pytest.mark.parametrize("compiled", [False, True])
def test_a_gpu_multiplies_the_same_numbers(compiled: bool) -> None:
    function = torch.compile(fp8.product8, backend="aot_eager", fullgraph=True) if compiled else fp8.product8
    upstream = random(2, 64, 96, seed=2).bfloat16()
    found = []
    for device, way in (("cpu", fp8.product8), ("cuda", function)):
        x, weight = (random(*shape, seed=1).to(device).requires_grad_() for shape in ((2, 64, 128), (96, 128)))
        result = way(x, weight, None, torch.bfloat16)
        found.append((result, *torch.autograd.grad(result, (x, weight), upstream.to(device))))
    for one, other in zip(*found, strict=True):
        # another order of the same sums, the forward ones in fewer bits, and the rounding to bfloat16
        assert (one - other.cpu()).norm() < 5e-3 * one.norm()
    torch._dynamo.reset()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_product_and_its_gradients_are_the_formulas_of_its_rounded_rows(dtype: torch.dtype) -> None:
    x, weight, bias = (
        random(*shape, seed=seed).requires_grad_() for seed, shape in enumerate(((32, 64), (48, 64), (48,)))
    )
    upstream = random(32, 48, seed=3).to(dtype)
    result = fp8.product8(x, weight, bias, dtype)
    found = torch.autograd.grad(result, (x, weight, bias), upstream)
    rounded = fp8.quantized(x.detach().to(dtype))
    again = fp8.product8(x, weight, bias, dtype, rounded)
    with torch.no_grad():
        plain = rounded.dense() @ fp8.quantized(weight).dense().t() + bias.to(dtype)  # rounded once, at the end
        back = fp8.quantized(upstream).dense() @ fp8.quantized(weight.t()).dense().t()
        assert torch.equal(result, plain.to(dtype))
        assert torch.equal(again, result)
        assert torch.equal(found[0], back.to(dtype).float())
        assert torch.equal(found[1], (upstream.t() @ x.to(dtype)).float())
        torch.testing.assert_close(found[2], upstream.double().sum(0).float())


@needs_fp8
def test_a_gpu_adds_the_bias_before_it_rounds() -> None:
    x, weight, bias = (random(*shape, seed=1).cuda().bfloat16() for shape in ((64, 128), (96, 128), (96,)))
    left, right = fp8.quantized(x), fp8.quantized(weight)
    exact = left.dense().double() @ right.dense().double().t() + bias.double()
    found = fp8.scaled_product(left, right, torch.bfloat16, bias, exact=True)
    # half a unit of bfloat16 for the only rounding, and the 13 bits in which a GPU adds up 128 products
    terms = left.dense().abs() @ right.dense().abs().t()
    assert ((found.double() - exact).abs() <= 2**-8 * exact.abs() + 2**-12 * terms).all()
    apart = fp8.scaled_product(left, right, torch.bfloat16, exact=True) + bias
    assert (found.double() - exact).norm() < (apart.double() - exact).norm()
