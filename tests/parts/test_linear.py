"""A product with a single row is shared by the threads, and is the same product."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F

from trivium.parts.linear import Linear, columns, in_float8, product


@pytest.fixture
def two_threads() -> Iterator[None]:
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(1)


@pytest.mark.parametrize("shape", [(640, 320), (320, 640), (321, 320)])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.usefixtures("two_threads")
def test_a_shared_product_is_the_product(shape: tuple[int, int], bias: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(shape, generator=generator, dtype=torch.float64)
    offset = torch.randn(shape[0], generator=generator, dtype=torch.float64) if bias else None
    for rows in (1, 3):
        x = torch.randn(rows, 1, shape[1], generator=generator, dtype=torch.float64)
        for layout in (weight, columns(weight)):
            with torch.no_grad():
                torch.testing.assert_close(product(x, layout, offset), F.linear(x, weight, offset))


@pytest.mark.usefixtures("two_threads")
def test_a_single_row_has_a_gradient_all_the_same() -> None:
    layer = Linear(320, 640, bias=True, role="up").double()
    torch.nn.init.normal_(layer.weight)
    torch.nn.init.zeros_(layer.bias)
    x = torch.randn(1, 320, dtype=torch.float64, requires_grad=True)
    layer(x).sum().backward()
    torch.testing.assert_close(x.grad, layer.weight.detach().sum(0, keepdim=True))


@pytest.mark.parametrize("shape", [(8, 3), (3, 8), (4, 4)])
def test_columns_change_the_layout_and_nothing_else(shape: tuple[int, int]) -> None:
    weight = torch.randn(shape)
    arranged = columns(weight)
    assert torch.equal(arranged, weight)
    assert arranged.stride() == ((1, shape[0]) if shape[0] > shape[1] else (shape[1], 1))


def test_products_in_float8_are_those_of_training_under_autocast_that_fit() -> None:
    x = torch.empty(2, 8, 32)
    assert not in_float8(x, 48)
    with torch.autocast("cpu", torch.bfloat16):
        assert in_float8(x, 48)
        assert not in_float8(x, 40)
        assert not in_float8(x[:1], 48)
        assert not in_float8(x[:0], 48)
        assert not in_float8(x[..., :24], 48)
        with torch.no_grad():
            assert not in_float8(x, 48)
