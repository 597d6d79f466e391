"""The Triton kernels for 8- and 4-bit weights against products with the matrix that the levels stand for.

On a GPU, or in Triton's interpreter; the layer that uses them on a GPU alone.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.kernels.launch import DEVICE, GPU, needs_gpu, needs_triton
from trivium.fast.choose import fast
from trivium.kernels import levels
from trivium.kernels.hardware import INTERPRETED
from trivium.parts.linear import Linear
from trivium.parts.quantized import Bits, Packed, QuantizedLinear, pack, unpack

pytestmark = needs_triton

BITS: tuple[Bits, ...] = (8, 4)
SHAPES = [(40, 64), (33, 190), (70, 768), (5, 320)]  # padded inputs, groups that are no power of two, few outputs


@pytest.fixture(autouse=True)
def no_tf32() -> Iterator[None]:
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32 = before


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def packed_of(outputs: int, inputs: int, bits: Bits, seed: int = 0) -> tuple[Packed, Tensor]:
    """Levels, and the matrix that they stand for in float64."""
    packed = pack(drawn(outputs, inputs, seed=seed), bits)
    return packed, unpack(packed, inputs).double()


def error(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected).norm() / expected.norm())


def zeros() -> Tensor:
    return torch.zeros(64, dtype=torch.int32, device=DEVICE)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("rows", [1, 2, 5, 17])
@pytest.mark.parametrize(("outputs", "inputs"), SHAPES)
@pytest.mark.parametrize(("dtype", "close"), [(torch.float32, 1e-6), (torch.bfloat16, 8e-3)])
def test_few_rows_are_multiplied_with_the_matrix_of_the_levels(
    bits: Bits, rows: int, outputs: int, inputs: int, dtype: torch.dtype, close: float
) -> None:
    from trivium.kernels import narrow

    if not GPU and rows > 1 and dtype == torch.bfloat16:
        pytest.skip("the interpreter multiplies the bits of bfloat16")
    packed, matrix = packed_of(outputs, inputs, bits)
    x, bias = drawn(rows, inputs, seed=1).to(dtype), drawn(outputs, seed=2).to(dtype)
    for arrived in (None, zeros()):
        assert error(narrow.multiply(x, packed, None, arrived=arrived), x.double() @ matrix.T) < close
        found = narrow.multiply(x, packed, bias, arrived=arrived)
        assert found.dtype == dtype
        assert error(found, x.double() @ matrix.T + bias.double()) < close


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("tile", [(1, 2, 1), (4, 4, 4), (16, 16, 4)])
def test_one_row_is_the_same_however_its_work_is_cut(bits: Bits, tile: tuple[int, int, int]) -> None:
    from trivium.kernels import narrow

    packed, matrix = packed_of(37, 704, bits)  # eleven groups
    x = drawn(1, 704, seed=1)
    assert error(narrow.multiply(x, packed, None, tile=tile), x.double() @ matrix.T) < 1e-6


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("tile", [(16, 1, 2), (32, 3, 3), (16, 4, 4)])
def test_parts_of_the_inputs_add_up_and_leave_their_counters_at_zero(bits: Bits, tile: tuple[int, int, int]) -> None:
    from trivium.kernels import narrow

    packed, matrix = packed_of(50, 704, bits)
    x, arrived = drawn(6, 704, seed=1), zeros()
    first, second = (narrow.multiply(x, packed, None, arrived=arrived, tile=tile) for _ in range(2))
    assert error(first, x.double() @ matrix.T) < 1e-6
    assert torch.equal(first, second)
    assert not arrived.any()


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("name", ["gelu-tanh", "silu", "relu2"])
@pytest.mark.parametrize("gated", [False, True])
def test_activation_gate_and_residual_are_those_of_torch(bits: Bits, rows: int, name: str, gated: bool) -> None:
    from trivium.kernels import narrow

    activations: dict[str, Callable[[Tensor], Tensor]] = {
        "gelu-tanh": lambda x: F.gelu(x, approximate="tanh"),
        "silu": F.silu,
        "relu2": lambda x: F.relu(x).square(),
    }
    activation = activations[name]
    packed, matrix = packed_of(40, 192, bits)
    other, gates = packed_of(40, 192, bits, seed=3)
    x, residual = drawn(rows, 192, seed=1) / 10, drawn(rows, 40, seed=2)
    bias, gate_bias = drawn(40, seed=4), drawn(40, seed=5)
    inner = x.double() @ matrix.T + bias.double()
    if gated:
        expected = activation(x.double() @ gates.T + gate_bias.double()) * inner + residual.double()
    else:
        expected = activation(inner) + residual.double()
    how: dict[str, Any] = {"activation": name, "gated": (other, gate_bias) if gated else None, "arrived": zeros()}
    found = narrow.multiply(x, packed, bias, residual=residual, **how)
    assert found is residual
    assert error(found, expected) < 1e-6


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("centred", [False, True])
@pytest.mark.parametrize("gated", [False, True])
def test_a_norm_before_one_row_is_that_of_torch(bits: Bits, centred: bool, gated: bool) -> None:
    from trivium.kernels import narrow
    from trivium.kernels.step import Scale

    packed, matrix = packed_of(40, 320, bits)
    x, weight, bias = 3 + 2 * drawn(1, 320, seed=1), drawn(320, seed=2), drawn(320, seed=3)
    wide = (x.double(), (320,), weight.double())
    normed = F.layer_norm(*wide, bias.double(), 1e-3) if centred else F.rms_norm(*wide, 1e-3)
    scale = Scale(weight, bias if centred else None, 1e-3, centred)
    expected = normed @ matrix.T
    if gated:
        expected = expected * F.silu(expected)
    how: dict[str, Any] = {"gated": (packed, None), "activation": "silu"} if gated else {}
    assert error(narrow.multiply(x, packed, None, scale=scale, **how), expected) < 1e-6


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("rows", [1, 64])
def test_every_level_is_exact_in_every_place(bits: Bits, rows: int) -> None:
    from trivium.kernels import narrow

    values = torch.arange(256, dtype=torch.uint8)
    held = torch.stack([values.roll(shift) for shift in range(8)]).to(DEVICE)
    packed = Packed(held.view(torch.int8) if bits == 8 else held, torch.ones(8, 4 if bits == 8 else 16).to(DEVICE))
    inputs = 256 if bits == 8 else 512
    signed = [value - 256 * (value > 127) for value in range(256)]
    halves = [value % 16 - 16 * (value % 16 > 7) for value in range(256)] + [value // 16 for value in signed]
    wanted = torch.stack([torch.tensor(row) for row in _rolled(signed if bits == 8 else halves, 8)]).float()
    assert torch.equal(narrow.whole(packed, inputs, torch.float32).cpu(), wanted)
    at = torch.arange(0, inputs, 1 if GPU or rows > 1 else 37)
    ones = torch.eye(inputs, device=DEVICE)[at]
    found = torch.cat([narrow.multiply(some.contiguous(), packed, None) for some in torch.split(ones, rows)])
    assert torch.equal(found.cpu(), wanted.T[at])


def _rolled(values: list[int], times: int) -> Iterator[list[int]]:
    for shift in range(times):
        parts = [values[start : start + 256] for start in range(0, len(values), 256)]
        yield [part[(at - shift) % 256] for part in parts for at in range(256)]


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize(("outputs", "inputs"), [*SHAPES, (9, 2112)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_whole_matrix_is_that_of_the_plain_way(bits: Bits, outputs: int, inputs: int, dtype: torch.dtype) -> None:
    from trivium.kernels import narrow

    packed, matrix = packed_of(outputs, inputs, bits)
    found = narrow.whole(packed, inputs, dtype)
    if INTERPRETED and dtype != torch.float32:  # it does not round to the nearest
        torch.testing.assert_close(found, matrix.to(dtype), rtol=torch.finfo(dtype).eps, atol=0)
    else:
        assert torch.equal(found, matrix.to(dtype))


def test_four_bits_with_an_odd_number_of_groups_are_left_to_the_plain_way() -> None:
    from trivium.kernels import narrow

    assert [narrow.fits(pack(drawn(4, inputs), 4)) for inputs in (32, 64, 96, 128)] == [False, True, False, True]
    assert narrow.fits(pack(drawn(4, 192), 8))
    whole = pack(drawn(4, 128), 8)
    assert not narrow.fits(Packed(whole.levels.T.contiguous().T, whole.scales))


def test_a_compiler_that_fails_is_told_and_is_as_good_as_none(monkeypatch: pytest.MonkeyPatch) -> None:
    from trivium.kernels import narrow

    def failing(*given: Any, **more: Any) -> Tensor:
        raise ValueError("no such instruction")

    monkeypatch.setattr(narrow, "multiply", failing)
    levels.gpu.cache_clear()
    with pytest.warns(UserWarning, match="slow on this GPU"):
        assert not levels.gpu(0)
    levels.gpu.cache_clear()


def layer(bits: Bits, outputs: int = 96, inputs: int = 320) -> QuantizedLinear:
    plain = Linear(inputs, outputs, bias=True, role="up").to(DEVICE)
    plain.weight.data, plain.bias.data = drawn(outputs, inputs), drawn(outputs, seed=1)
    new = QuantizedLinear(plain, bits)
    new.fill(plain.weight)
    fast(new)
    return new


@needs_gpu
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("leading", [(1,), (1, 1), (3, 2), (64,), (5, 40), (0,)])
@pytest.mark.parametrize(("dtype", "close"), [(torch.float32, 1e-6), (torch.bfloat16, 1e-2), (torch.float16, 2e-3)])
def test_the_layer_on_a_gpu_is_the_product_with_its_matrix(
    bits: Bits, leading: tuple[int, ...], dtype: torch.dtype, close: float
) -> None:
    new = layer(bits).to(dtype)
    assert levels.gpu(torch.cuda.current_device())
    x = drawn(*leading, 320, seed=2).to(dtype)
    assert new.bias is not None
    with torch.no_grad():
        found = new(x)
        expected = F.linear(x.double(), new.dense().double(), new.bias.double())
    assert found.dtype == dtype
    assert found.shape == expected.shape
    assert not len(x) or error(found, expected) < close
    learned = x.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(new(learned).sum(), learned)
    assert not len(x) or error(gradient, new.dense().detach().double().sum(0).expand_as(x)) < close
    with torch.autocast("cuda", torch.bfloat16), torch.no_grad():
        assert new(x).dtype == torch.bfloat16


@needs_gpu
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("rows", [1, 8, 100])
@torch.no_grad()
def test_the_layer_is_captured_in_a_graph(bits: Bits, rows: int) -> None:
    new = layer(bits).bfloat16()
    x = torch.zeros(rows, 320, device=DEVICE, dtype=torch.bfloat16)
    new(x)  # compiled and compared before
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = new(x)
    x.copy_(drawn(rows, 320, seed=3))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        graph.replay()
    assert torch.equal(found, new(x))
