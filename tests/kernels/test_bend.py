"""The Triton kernels of activations in training against their formulas; on a GPU, or in Triton's interpreter."""

# N rows, H columns of the hidden layer

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.kernels.launch import DEVICE, needs_triton
from tests.parts.drawing import FORMULAS, random

triton = pytest.importorskip("triton", reason="needs Triton")
bend: Any = pytest.importorskip("trivium.kernels.bend", reason="needs Triton")
tl = triton.language

pytestmark = needs_triton


@pytest.fixture(autouse=True)
def few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that one walks over several tiles of a small matrix."""
    monkeypatch.setattr(bend, "BACKWARD", bend.BACKWARD._replace(programs=6))


def draw(*shape: int, seed: int = 0) -> Tensor:
    return random(*shape, seed=seed).to(DEVICE)


def formula(pre: Tensor, activation: str, gated: bool) -> Tensor:
    if not gated:
        return FORMULAS[activation](pre)
    gate, up = pre.chunk(2, -1)
    return FORMULAS[activation](gate) * up


def drawn_for(rows: tuple[int, ...], columns: int, gated: bool) -> tuple[Tensor, Tensor, Tensor]:
    """What comes out of a product, its bias, and the gradient of the hidden layer."""
    wide = 2 * columns if gated else columns
    pre, bias = 2 * draw(*rows, wide, seed=1), draw(wide, seed=2)
    return pre.requires_grad_(), bias.requires_grad_(), draw(*rows, columns, seed=3)


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("activation", FORMULAS)
@pytest.mark.parametrize(("rows", "columns"), [((16,), 256), ((37,), 300), ((3, 5), 41), ((1,), 1), ((70,), 33)])
def test_values_and_gradients_are_those_of_the_formula(
    rows: tuple[int, ...], columns: int, activation: str, gated: bool
) -> None:
    pre, bias, grad = drawn_for(rows, columns, gated)
    found = bend.bent(pre, bias, activation, gated=gated)
    grad_pre, grad_bias = torch.autograd.grad(found, (pre, bias), grad)
    exact = pre.detach().double().requires_grad_()
    expected = formula(exact, activation, gated)
    (slope,) = torch.autograd.grad(expected, exact, grad.double())
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=3e-6)
    torch.testing.assert_close(grad_pre.double(), slope, rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(grad_bias.double(), slope.flatten(0, -2).sum(0), rtol=1e-5, atol=3e-4)


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("activation", FORMULAS)
def test_in_bfloat16_only_results_are_rounded(activation: str, gated: bool) -> None:
    pre, bias, grad = (x.detach().bfloat16() for x in drawn_for((37,), 300, gated))
    pre.requires_grad_()
    wide = bias.float().requires_grad_()
    found = bend.bent(pre, wide, activation, gated=gated)
    grad_pre, grad_bias = torch.autograd.grad(found, (pre, wide), grad)
    assert found.dtype == grad_pre.dtype == torch.bfloat16
    assert grad_bias.dtype == torch.float32
    exact = pre.detach().double().requires_grad_()
    expected = formula(exact, activation, gated)
    (slope,) = torch.autograd.grad(expected, exact, grad.double())
    room = torch.finfo(torch.bfloat16).eps  # a whole step and not half: the interpreter does not round to the nearest
    torch.testing.assert_close(found.double(), expected, rtol=room, atol=1e-6)
    torch.testing.assert_close(grad_pre.double(), slope, rtol=room, atol=1e-4)
    torch.testing.assert_close(grad_bias.double(), slope.sum(0), rtol=1e-5, atol=3e-4)  # before rounding


@triton.jit  # type: ignore[untyped-decorator]
def _normal(x, share, count, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def, name-defined]
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    below, _density = bend.normal(tl.load(x + at, mask=at < count))
    tl.store(share + at, below, mask=at < count)


def test_the_normal_distribution_has_torchs_erf() -> None:
    x = torch.linspace(-6, 6, 200_001, device=DEVICE)
    scaled, share = x * 2**0.5, torch.empty_like(x)
    _normal[(triton.cdiv(len(x), 8192),)](scaled, share, len(x), BLOCK=8192)
    # the lower half as it is: 1 - share would not be exact there
    erf = torch.where(x < 0, 2 * share.double() - 1, 1 - 2 * (1 - share.double()))
    assert (erf - torch.erf(scaled.double() / 2**0.5)).abs().max().item() < 3e-7
    below = torch.special.ndtr(scaled.double())
    tail = (x < 0) & (x > -3.5)  # where float32's erf has nothing left, these digits still count in bfloat16
    assert (share / below - 1)[tail].abs().max().item() < 1e-3


@pytest.mark.parametrize("activation", FORMULAS)
def test_large_numbers_have_a_value_and_a_slope_of_their_own(activation: str) -> None:
    pre = torch.tensor([[-1e9, -200.0, 200.0, 1e9]], device=DEVICE, requires_grad=True)
    found = bend.bent(pre, None, activation)
    (grad,) = torch.autograd.grad(found, pre, torch.ones_like(found))
    squared = activation == "relu2"
    assert found.tolist() == [[0, 0, 40_000, pytest.approx(1e18)] if squared else [0, 0, 200, 1e9]]
    assert grad.tolist() == [[0, 0, 400, 2e9] if squared else [0, 0, 1, 1]]


@pytest.mark.parametrize("activation", FORMULAS)
def test_what_is_not_a_number_is_seen(activation: str) -> None:
    pre = torch.zeros(3, 8, device=DEVICE)
    pre[1, 2] = float("nan")
    pre.requires_grad_()
    bias = torch.zeros(8, device=DEVICE, requires_grad=True)
    found = bend.bent(pre, bias, activation)
    assert found.isnan().nonzero().tolist() == [[1, 2]]
    grad_pre, grad_bias = torch.autograd.grad(found, (pre, bias), torch.ones_like(found))
    assert grad_pre.isnan().nonzero().tolist() == [[1, 2]]
    assert grad_bias.isnan().nonzero().tolist() == [[2]]


def test_no_rows_have_no_gradient() -> None:
    pre, bias, grad = drawn_for((0,), 40, True)
    found = bend.bent(pre, bias, "silu", gated=True)
    grad_pre, grad_bias = torch.autograd.grad(found, (pre, bias), grad)
    assert found.shape == (0, 40)
    assert grad_pre.shape == (0, 80)
    assert not grad_bias.any()


def test_tensors_may_lie_in_any_way() -> None:
    pre, bias, _ = drawn_for((40,), 40, False)
    turned, spread = pre.detach().t().requires_grad_(), torch.ones((), device=DEVICE).expand(40, 40)
    found = bend.bent(turned, bias, "gelu")
    same = bend.bent(turned.detach().contiguous().requires_grad_(), bias, "gelu")
    assert torch.equal(found, same)
    one, other = (torch.autograd.grad(x, bias, g)[0] for x, g in ((found, spread), (same, spread.contiguous())))
    assert torch.equal(one, other)


@pytest.mark.parametrize("gated", [False, True])
def test_bits_repeat(gated: bool) -> None:
    pre, bias, grad = drawn_for((500,), 300, gated)
    sums = [torch.autograd.grad(bend.bent(pre, bias, "silu", gated=gated), bias, grad)[0] for _ in range(2)]
    assert torch.equal(*sums)


@pytest.mark.parametrize("parts", [1, 4, 30])  # of five tiles; now there would be three parts
def test_a_step_compiled_for_another_number_of_parts_stays_right(parts: int) -> None:
    pre, _bias, grad = drawn_for((37,), 300, True)
    found, sums = bend.backward(grad, pre.detach(), "silu", parts)
    assert sums.shape == (parts, 600)
    (slope,) = torch.autograd.grad(formula(pre, "silu", True), pre, grad)
    torch.testing.assert_close(found, slope, rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(sums.sum(0), slope.sum(0), rtol=1e-5, atol=3e-4)


@pytest.mark.parametrize("bias", [None, torch.float32, torch.bfloat16])
def test_operators_are_what_they_say_of_themselves(bias: torch.dtype | None) -> None:
    pre, biases, grad = drawn_for((5,), 40, True)
    given = None if bias is None else biases.detach().to(bias).requires_grad_()
    tests = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    torch.library.opcheck(bend.forward, (pre, given, "silu", True), test_utils=tests)
    torch.library.opcheck(bend.backward, (grad, pre.detach(), "silu", 0 if bias is None else 3), test_utils=tests)
