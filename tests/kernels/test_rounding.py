"""Rows rounded to 8 bits in passing against formulas and `fp8.quantized`; on a GPU, or in Triton's interpreter."""

# N rows, H columns of the hidden layer; B rows, T tokens, H heads, E head size

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.kernels.launch import DEVICE, GPU, TRITON_VERSION, needs_gpu, needs_triton
from tests.parts.drawing import FORMULAS, LAYOUTS, random
from trivium.kernels.fp8 import FORMAT, quantized

pytest.importorskip("triton", reason="needs Triton")
rounding: Any = pytest.importorskip("trivium.kernels.rounding", reason="needs Triton")

SIZES = [(16, 256), (37, 300), (3, 1500), (1, 1), (1, 768), (70, 33), (2, 4500)]  # from 1,500 on in several pieces

pytestmark = needs_triton


def draw(*shape: int, seed: int = 0, scale: float = 1.0) -> Tensor:
    return (scale * random(*shape, seed=seed)).bfloat16().to(DEVICE)


def formula(pre: Tensor, activation: str, gated: bool) -> Tensor:
    if not gated:
        return FORMULAS[activation](pre)
    gate, up = pre.chunk(2, -1)
    return FORMULAS[activation](gate) * up


def slopes(grad: Tensor, pre: Tensor, activation: str, gated: bool) -> Tensor:
    """In float64."""
    exact = pre.double().requires_grad_()
    (slope,) = torch.autograd.grad(formula(exact, activation, gated), exact, grad.double())
    return slope


def near(found: Tensor, expected: Tensor) -> None:
    room = torch.finfo(torch.bfloat16).eps  # a whole step and not half: the interpreter does not round to the nearest
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.double(), expected, rtol=room, atol=1e-4, equal_nan=True)


def alike(found: Tensor, expected: Tensor) -> None:
    """But for how the compiler may have fused a product and a sum."""
    torch.testing.assert_close(found, expected, rtol=torch.finfo(torch.bfloat16).eps, atol=1e-8)
    assert (found != expected).float().mean().item() < 1e-3


def same_bits(values: Tensor, scale: Tensor, row: Tensor) -> None:
    """`row` was rounded as `quantized` does it; one kind of not-a-number is as good as another."""
    expected = quantized(row)
    assert values.dtype == FORMAT
    assert scale.dtype == torch.float32
    assert values.is_contiguous()
    assert scale.is_contiguous()
    torch.testing.assert_close(scale, expected.scale, rtol=0, atol=0, equal_nan=True)
    bits, others = (x.view(torch.uint8).int() for x in (values, expected.values))
    none = others & 0x7F == 0x7F
    assert torch.equal(bits & 0x7F == 0x7F, none)
    assert torch.equal(bits[~none], others[~none])


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("activation", FORMULAS)
@pytest.mark.parametrize(("rows", "columns"), SIZES)
def test_a_hidden_layer_comes_with_its_rounding(rows: int, columns: int, activation: str, gated: bool) -> None:
    pre = draw(rows, (1 + gated) * columns, seed=1, scale=2)
    hidden, values, scale = rounding.bent8(pre, activation, gated)
    assert hidden.shape == values.shape == (rows, columns)
    assert scale.shape == (rows, 1)
    near(hidden, formula(pre.double(), activation, gated))
    same_bits(values, scale, hidden)


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("activation", FORMULAS)
@pytest.mark.parametrize(("rows", "columns", "parts"), [(*size, (0, 1, 7)[at % 3]) for at, size in enumerate(SIZES)])
def test_a_gradient_comes_with_its_rounding_and_its_sums(
    rows: int, columns: int, parts: int, activation: str, gated: bool
) -> None:
    pre, grad = draw(rows, (1 + gated) * columns, seed=1, scale=2), draw(rows, columns, seed=2)
    found, values, scale, sums = rounding.unbent8(grad, pre, activation, parts)
    expected = slopes(grad, pre, activation, gated)
    assert found.shape == values.shape == pre.shape
    assert scale.shape == (rows, 1)
    near(found, expected)
    same_bits(values, scale, found)
    assert sums.shape == (parts, pre.shape[1])
    assert sums.dtype == torch.float32
    if parts:  # before rounding
        torch.testing.assert_close(sums.double().sum(0), expected.sum(0), rtol=1e-5, atol=3e-4)


@pytest.mark.parametrize("odd", [None, 0.0, -0.0, float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize(("rows", "columns", "piece", "stages"), [(3, 1500, 512, 1), (5, 2048, 512, 2), (2, 33, 16, 1)])
def test_rows_read_back_have_the_bits_of_rows_held(
    rows: int, columns: int, piece: int, stages: int, gated: bool, odd: float | None
) -> None:
    pre, grad = draw(rows, (1 + gated) * columns, seed=1, scale=2), draw(rows, columns, seed=2)
    if odd is not None:
        grad[1, 7] = odd
    for activation in FORMULAS:
        found, values, scale, _ = made = rounding._unbent8_shapes(grad, pre, activation, 0)
        rounding.launch_twice(grad, pre, made, activation, rounding.TWICE._replace(columns=piece, stages=stages))
        same_bits(values, scale, found)
        if grad.isfinite().all():  # torch gives no gradient where relu is 0, whatever comes
            near(found, slopes(grad, pre, activation, gated))
        held = rounding._unbent8_shapes(grad, pre, activation, 0)
        rounding.launch_unbent8(grad, pre, held, activation, rounding.planned(columns, 1 + gated))
        assert torch.equal(found.isfinite(), held[0].isfinite())
        alike(found.nan_to_num(0, 0, 0), held[0].nan_to_num(0, 0, 0))


@pytest.mark.parametrize("parts", [0, 2])
def test_only_wide_rows_without_sums_are_read_back(parts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    for name in ("launch_twice", "launch_unbent8"):
        monkeypatch.setattr(rounding, name, lambda *given, name=name: seen.append(name))
    for columns in (4096, 4097):
        rounding.unbent8(draw(1, columns), draw(1, 2 * columns), "silu", parts)
    assert seen == ["launch_unbent8", "launch_unbent8" if parts else "launch_twice"]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    ("rows", "length", "heads", "size", "parts"),
    [(2, 24, 2, 32, 0), (3, 37, 4, 16, 7), (1, 1, 3, 24, 7), (2, 5, 25, 64, 1), (2, 3, 17, 64, 0)],
)
def test_gradients_side_by_side_come_with_their_rounding_and_their_sums(
    rows: int, length: int, heads: int, size: int, parts: int, layout: str
) -> None:
    grads = [LAYOUTS[layout](draw(rows, heads, length, size, seed=seed)) for seed in range(3)]
    packed, values, scale, sums = rounding.laid8(*grads, parts)
    expected = torch.cat(grads, 1).transpose(1, 2).flatten(2).flatten(0, 1)
    assert torch.equal(packed, expected)
    assert scale.shape == (rows * length, 1)
    same_bits(values, scale, expected)
    assert sums.shape == (parts, 3 * heads * size)
    if parts:
        torch.testing.assert_close(sums.sum(0), expected.float().sum(0), atol=1e-5, rtol=1e-5)


@pytest.mark.skipif(
    not GPU and TRITON_VERSION < (3, 9), reason="the interpreter before 3.9 casts 8 of 393,216 to the next float8"
)
@pytest.mark.parametrize("power", [0, -80, 100])
def test_every_quotient_of_bfloat16_is_rounded_as_by_a_division(power: int) -> None:
    """All 128 largest magnitudes, and below them all numbers that do not round to 0: with powers of two nothing else
    changes, as long as nothing leaves the range."""
    significands = torch.arange(128, 256).double()
    largest_N1 = significands[:, None]
    smaller = (significands[None, :] * 2.0 ** -torch.arange(24)[:, None]).flatten()
    rows_NC = torch.where(smaller > largest_N1, largest_N1, smaller)
    rows_NC[:, 1::2] *= -1  # both signs of each row's: the largest has an even place or stands twice
    rows_NC = (rows_NC * 2.0**power).bfloat16().to(DEVICE)
    grads = [x.contiguous().view(1, 128, 16, 64).transpose(1, 2) for x in rows_NC.chunk(3, -1)]
    packed, values, scale, _sums = made = rounding._laid8_shapes(*grads, 0)
    how = rounding.planned(1024, 3)
    how = how if DEVICE == "cuda" else how._replace(rows=32)  # the interpreter takes as long for one row as for many
    rounding.launch_laid8(*grads, made, how)
    assert torch.equal(packed, rows_NC)
    same_bits(values, scale, rows_NC)
    multiplied = (rows_NC.float() * (1 / scale)).clamp(-448, 448).to(FORMAT)
    assert not torch.equal(multiplied.float(), values.float())  # so there are quotients on which it depends


@pytest.mark.parametrize("activation", FORMULAS)
@pytest.mark.parametrize("zero", [0.0, -0.0])
def test_rows_of_zeros_stay_zeros_of_their_sign(activation: str, zero: float) -> None:
    pre = torch.full((5, 80), zero, dtype=torch.bfloat16, device=DEVICE)
    pre[2] = 1.0
    for gated in (False, True):
        hidden, values, scale = rounding.bent8(pre, activation, gated)
        same_bits(values, scale, hidden)
        assert not values[[0, 1, 3, 4]].float().any()
        assert scale[0].item() == pytest.approx(1e-30 / 448)
    grads = [pre.view(1, 5, 2, 40).transpose(1, 2)] * 3
    packed, values, scale, _sums = rounding.laid8(*grads, 1)
    same_bits(values, scale, packed)


@pytest.mark.parametrize("odd", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("gated", [False, True])
def test_what_is_not_finite_is_seen_and_stays_in_its_row(gated: bool, odd: float) -> None:
    pre, grad = draw(6, (1 + gated) * 40, seed=1), draw(6, 40, seed=2)
    others = [0, 1, 2, 4, 5]
    for activation in FORMULAS:
        clean = (*rounding.bent8(pre, activation, gated), *rounding.unbent8(grad, pre, activation, 0)[:3])
        spoiled = pre.clone()
        spoiled[3, 7] = odd
        hidden, values, scale = rounding.bent8(spoiled, activation, gated)
        same_bits(values, scale, hidden)
        assert hidden[3, 7].isfinite().item() == (odd == -float("inf") and activation == "relu2")
        found, back, scales, sums = rounding.unbent8(grad, spoiled, activation, 2)
        same_bits(back, scales, found)
        for one, two in zip((hidden, values, scale, found, back, scales), clean, strict=True):
            assert torch.equal(one[others].float(), two[others].float())
        assert sums[:, 8:40].isfinite().all()


@pytest.mark.parametrize("odd", [float("nan"), float("inf"), float("-inf")])
def test_what_is_not_finite_stays_in_its_token(odd: float) -> None:
    query, key, value = (draw(2, 3, 5, 16, seed=seed) for seed in range(3))
    key[1, 2, 3, 4] = odd
    packed, values, scale, _sums = rounding.laid8(query, key, value, 3)
    same_bits(values, scale, packed)
    assert scale.isfinite().logical_not().nonzero().tolist() == [[8, 0]]
    assert values.float().isnan().any(-1).nonzero().tolist() == [[8]]


@pytest.mark.parametrize("parts", [0, 1, 7])
@pytest.mark.parametrize("gated", [False, True])
def test_no_rows_are_rounded_to_none(gated: bool, parts: int) -> None:
    pre = draw(0, 80 if gated else 40)
    hidden, values, scale = rounding.bent8(pre, "silu", gated)
    assert hidden.shape == values.shape == (0, 40)
    assert scale.shape == (0, 1)
    found, values, scale, sums = rounding.unbent8(hidden, pre, "silu", parts)
    assert found.shape == values.shape == pre.shape
    assert scale.shape == (0, 1)
    assert sums.shape == (parts, pre.shape[1])
    assert not sums.any()
    packed, values, scale, sums = rounding.laid8(*[draw(0, 2, 5, 16)] * 3, parts)
    assert packed.shape == values.shape == (0, 96)
    assert scale.shape == (0, 1)
    assert sums.shape == (parts, 96)
    assert not sums.any()


def test_tensors_may_lie_in_any_way() -> None:
    turned, spread = draw(40, 40, seed=1).t(), draw(1, 1).expand(40, 40)
    for one, two in zip(
        (*rounding.bent8(turned, "gelu", False), *rounding.unbent8(spread, turned, "gelu", 3)),
        (
            *rounding.bent8(turned.contiguous(), "gelu", False),
            *rounding.unbent8(spread.contiguous(), turned.contiguous(), "gelu", 3),
        ),
        strict=True,
    ):
        assert torch.equal(one.float(), two.float())


@pytest.mark.parametrize("parts", [1, 4, 30])
def test_bits_repeat_whatever_the_number_of_parts(parts: int) -> None:
    rows = 500 if DEVICE == "cuda" else 50  # the interpreter is slow
    pre, grad = draw(rows, 600, seed=1), draw(rows, 300, seed=2)
    first, second = (rounding.unbent8(grad, pre, "silu", parts) for _ in range(2))
    for one, two in zip(first, second, strict=True):
        assert torch.equal(one.float(), two.float())
    other = rounding.unbent8(grad, pre, "silu", 3)
    for one, two in zip(first[:3], other[:3], strict=True):
        assert torch.equal(one.float(), two.float())
    torch.testing.assert_close(first[3].sum(0), other[3].sum(0), rtol=1e-5, atol=3e-4)


def test_rows_are_gone_over_in_powers_of_two_that_threads_can_hold() -> None:
    for spans in (1, 2, 3):
        for columns in (1, 7, 33, 768, 1600, 3072, 5632, 6400, 16_384 // spans):
            how = rounding.planned(columns, spans)
            assert not how.columns & (how.columns - 1)
            assert not how.rows & (how.rows - 1)
            held = how.rows * spans * how.columns * -(-columns // how.columns)
            assert held <= 36 * 32 * how.warps
            assert rounding.parts(spans * columns) > 0


def operators() -> list[tuple[Any, tuple[Any, ...]]]:
    pre, grad, heads = draw(5, 80, seed=1), draw(5, 40, seed=2), draw(2, 2, 3, 16, seed=3)
    return [
        (rounding.bent8, (pre, "silu", True)),
        (rounding.unbent8, (grad, pre, "silu", 3)),
        (rounding.unbent8, (grad, pre, "silu", 0)),
        (rounding.laid8, (heads, heads, heads, 3)),
    ]


def test_operators_are_what_they_say_of_themselves() -> None:
    for operator, arguments in operators():
        torch.library.opcheck(operator, arguments, test_utils=("test_schema", "test_faketensor"))


def test_operators_stay_whole_in_a_compiled_graph() -> None:
    for operator, arguments in operators():
        tensors = [x for x in arguments if isinstance(x, Tensor)]
        rest = arguments[len(tensors) :]

        def run(*tensors: Tensor, operator: Any = operator, rest: tuple[Any, ...] = rest) -> Any:
            return operator(*tensors, *rest)

        compiled = torch.compile(run, backend="aot_eager", fullgraph=True, dynamic=True)
        for one, two in zip(compiled(*tensors), run(*tensors), strict=True):
            assert one.dtype == two.dtype
            assert torch.equal(one.float(), two.float())
        torch._dynamo.reset()


@needs_gpu  # the interpreter is too slow for so many numbers
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("activation", FORMULAS)
def test_large_layers_are_those_of_the_kernels_without_rounding(activation: str, gated: bool) -> None:
    from trivium.kernels import bend

    pre, grad = draw(4096, (1 + gated) * 3072, seed=1, scale=2), draw(4096, 3072, seed=2, scale=1e-4)
    hidden, values, scale = rounding.bent8(pre, activation, gated)
    alike(hidden, bend.forward(pre, None, activation, gated))
    same_bits(values, scale, hidden)
    parts = rounding.parts(pre.shape[1])
    found, values, scale, sums = rounding.unbent8(grad, pre, activation, parts)
    expected, others = bend.backward(grad, pre, activation, 300)
    alike(found, expected)
    same_bits(values, scale, found)
    torch.testing.assert_close(sums.sum(0), others.sum(0), rtol=1e-4, atol=1e-5)


@needs_gpu  # the interpreter is too slow for so many numbers
@pytest.mark.parametrize("columns", [4104, 5632, 8192, 14_336])
@pytest.mark.parametrize("activation", FORMULAS)
def test_wide_gradients_are_those_of_the_kernel_without_rounding(activation: str, columns: int) -> None:
    from trivium.kernels import bend

    pre, grad = draw(3000, 2 * columns, seed=1, scale=2), draw(3000, columns, seed=2, scale=1e-4)
    for _ in range(3):  # what is read back before it is written would differ from time to time
        found, values, scale, _sums = rounding.unbent8(grad, pre, activation, 0)
        alike(found, bend.backward(grad, pre, activation, 0)[0])
        same_bits(values, scale, found)


@needs_gpu  # the interpreter is too slow for so many numbers
@pytest.mark.parametrize(("rows", "heads"), [(4, 12), (4, 16), (2, 25)])
def test_large_gradients_side_by_side_are_those_of_the_kernel_without_rounding(rows: int, heads: int) -> None:
    from trivium.kernels import parted

    grads = [draw(rows, 1024, heads, 64, seed=seed, scale=1e-4).transpose(1, 2) for seed in range(3)]
    packed, values, scale, sums = rounding.laid8(*grads, rounding.parts(3 * heads * 64))
    expected, others = parted.together(*grads, 256)
    assert torch.equal(packed, expected.flatten(0, 1))
    same_bits(values, scale, packed)
    torch.testing.assert_close(sums.sum(0), others.sum(0), rtol=1e-4, atol=1e-5)
