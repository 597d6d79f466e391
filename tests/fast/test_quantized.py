"""Layers that multiply by their levels: the products of the matrix that the levels stand for."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import cast

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.fast.compare import fast_copy
from tests.parts.test_quantized import BITS, drawn, layer
from trivium.fast.choose import fast
from trivium.fast.quantized import FastQuantizedLinear, FastTiedLinear
from trivium.kernels import levels
from trivium.parts.linear import Linear
from trivium.parts.quantized import Bits, QuantizedLinear, TiedLinear, pack, unpack


def close(found: Tensor, expected: Tensor) -> None:
    assert float((found.double() - expected).norm() / expected.norm()) < 1e-6


def made(weight: Tensor, bits: Bits, *, bias: bool = True) -> FastQuantizedLinear:
    new = layer(weight, bits, bias=bias)[1]
    fast(new)
    assert isinstance(new, FastQuantizedLinear)
    return new


@pytest.fixture
def two_threads() -> Iterator[None]:
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(1)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("shape", [(40, 100), (33, 64), (1100, 1024)], ids=["padded", "whole groups", "in chunks"])
@pytest.mark.parametrize("bias", [True, False])
def test_values_and_gradients_are_those_of_the_plain_layer(bits: Bits, shape: tuple[int, int], bias: bool) -> None:
    plain = layer(drawn(*shape), bits, bias=bias)[1]
    new = fast_copy(plain)
    for leading in ((1,), (1, 1), (3, 2), (4, 16), (0,)):
        x = torch.randn(*leading, shape[1], generator=torch.Generator().manual_seed(1))
        expected = F.linear(x.double(), plain.dense().double(), None if plain.bias is None else plain.bias.double())
        with torch.no_grad():
            found = new(x)
            assert found.shape == expected.shape
            assert not x.numel() or (found.double() - expected).norm() < 1e-6 * expected.norm()
        learned = x.clone().requires_grad_()
        ways = [torch.autograd.grad(one(learned).square().sum(), learned)[0] for one in (new, plain)]
        assert (ways[0] - ways[1]).norm() <= 1e-5 * ways[1].norm()


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.usefixtures("two_threads")
def test_a_single_row_is_shared_by_the_threads(bits: Bits) -> None:
    new, x = made(drawn(640, 330), bits), drawn(1, 330)
    with torch.no_grad():
        torch.testing.assert_close(new(x), F.linear(x, new.dense(), new.bias))


@pytest.mark.parametrize("bits", BITS)
def test_a_copy_and_a_dtype_keep_the_matrix(bits: Bits) -> None:
    new = made(drawn(20, 70), bits)
    dense = new.dense()
    assert torch.equal(copy.deepcopy(new).dense(), dense)
    for dtype in (torch.float64, torch.bfloat16, torch.float32):
        moved = copy.deepcopy(new).to(dtype)
        assert torch.equal(moved.dense(), dense)
        assert moved(torch.ones(2, 70, dtype=dtype)).dtype == dtype


@pytest.mark.parametrize("bits", [8, pytest.param(4, marks=pytest.mark.full)])  # compiling takes seconds
def test_a_compiled_layer_gives_what_it_gives_in_eager_mode(bits: Bits) -> None:
    new, x = made(drawn(40, 100), bits), drawn(3, 100)
    torch._dynamo.reset()
    compiled = cast(nn.Module, torch.compile(new, backend="aot_eager", fullgraph=True))
    torch.testing.assert_close(compiled(x), new(x))
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), new(x))


@pytest.mark.parametrize("bits", BITS)
def test_arithmetic_in_bfloat16_by_autocast_stays_in_bfloat16(bits: Bits) -> None:
    new, x = made(drawn(40, 100), bits), drawn(3, 100)
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        found = new(x)
    assert found.dtype == torch.bfloat16
    exact = new(x).detach()
    assert float((found.float() - exact).norm() / exact.norm()) < 0.01


@pytest.mark.parametrize("rows", [1, 100])
@pytest.mark.parametrize("inputs", [192, 400])
def test_inputs_of_another_width_are_refused(inputs: int, rows: int) -> None:
    new = made(drawn(16, 320), 8)
    with pytest.raises(ValueError, match=f"{inputs} inputs for a layer that has 320"):
        new(drawn(rows, inputs))


def tied_to(table: Tensor) -> FastTiedLinear:
    linear = Linear(table.shape[1], table.shape[0], bias=False, role="head")
    linear.weight.data = table
    tied = TiedLinear(linear)
    fast(tied)
    assert isinstance(tied, FastTiedLinear)
    return tied


def test_a_tied_matrix_of_levels_is_multiplied_as_its_floats_are() -> None:
    table = unpack(pack(drawn(60, 100), 8), 100)
    tied, x = tied_to(table), drawn(6, 100, seed=1).view(2, 3, 100)
    with torch.no_grad():
        close(tied(x), x.double() @ table.double().T)
        many = drawn(100, 100, seed=2)
        close(tied(many), many.double() @ table.double().T)


def test_a_tied_matrix_that_is_changed_is_read_anew() -> None:
    tied, x = tied_to(unpack(pack(drawn(60, 100), 8), 100)), drawn(1, 100, seed=1)
    with torch.no_grad():
        tied(x)
        other = unpack(pack(drawn(60, 100, seed=3), 8), 100)
        tied.weight.copy_(other)
        close(tied(x), x.double() @ other.double().T)


@pytest.mark.skipif(levels.product() is None, reason="no C compiler")
def test_gradients_and_other_precisions_take_the_plain_way() -> None:
    """A table that levels cannot say tells by which of both it was multiplied."""
    tied, x = tied_to(drawn(60, 100)).requires_grad_(False), drawn(1, 100, seed=1)

    def off(found: Tensor) -> float:
        exact = x.double() @ tied.weight.double().T
        return float((found.detach().double() - exact).norm() / exact.norm())

    with torch.no_grad():
        assert off(tied(x)) > 1e-4  # by levels
    learned = x.clone().requires_grad_()
    found = tied(learned)
    assert off(found) < 1e-6
    torch.testing.assert_close(torch.autograd.grad(found.sum(), learned)[0], tied.weight.sum(0, keepdim=True))
    many = drawn(17, 100, seed=2)
    torch.testing.assert_close(tied(many), many @ tied.weight.T)
    tied.double()
    with torch.no_grad():
        assert off(tied(x.double())) < 1e-12


def test_the_levels_of_a_tied_table_are_neither_copied_nor_moved() -> None:
    tied, x = tied_to(unpack(pack(drawn(60, 100), 8), 100)), drawn(1, 100, seed=1)
    with torch.no_grad():
        tied(x)
        other = copy.deepcopy(tied)
        assert other._copy is None
        torch.testing.assert_close(other(x), tied(x))
        before = tied.state_dict().keys()
        tied.double()
        assert tied._copy is None
        assert tied.state_dict().keys() == before


def test_a_tied_table_of_inference_mode_decodes() -> None:
    with torch.inference_mode():
        linear = Linear(64, 100, bias=False, role="head")
        linear.weight.copy_(drawn(100, 64))
        x = drawn(1, 64, seed=1)
        expected = x.double() @ linear.weight.double().T
        tied = TiedLinear(linear)
        fast(tied)
        assert type(tied) is FastTiedLinear
        assert float((tied(x).double() - expected).norm() / expected.norm()) < 1e-2


def test_a_plain_quantised_layer_has_the_same_levels_and_names() -> None:
    plain = layer(drawn(20, 70), 8)[1]
    new = fast_copy(plain)
    assert isinstance(new, QuantizedLinear)
    assert [name for name, _ in new.named_parameters()] == [name for name, _ in plain.named_parameters()]
    assert all(torch.equal(one, other) for one, other in zip(new.packed, plain.packed, strict=True))
