"""The other library's product: the same numbers and gradients as torch's own, or none at all."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from trivium.kernels import onednn

there = pytest.mark.skipif(onednn._operation() is None, reason="this torch has no oneDNN")


def drawn(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@there
@pytest.mark.parametrize("shape", [(64, 96), (3, 40, 96), (1, 17, 96)])
@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize("columns", [True, False])
def test_values_and_gradients_are_those_of_torch_in_float64(
    shape: tuple[int, ...], biased: bool, columns: bool
) -> None:
    weight = drawn(50, 96, seed=1)
    weight = weight.t().contiguous().t() if columns else weight  # as it lies for decoding
    given = [drawn(*shape, seed=0), weight, drawn(50, seed=2)]
    back = drawn(*shape[:-1], 50, seed=3)
    results = []
    for dtype, way in ((torch.float32, onednn.linear), (torch.float64, F.linear)):
        x, w, b = (tensor.detach().to(dtype).requires_grad_() for tensor in given)
        y = way(x, w, b if biased else None)
        y.backward(back.to(dtype))  # type: ignore[no-untyped-call]
        results.append([y, x.grad, w.grad, b.grad if biased else None])
    for found, expected in zip(*results, strict=True):
        if expected is None:
            assert found is None
        else:
            assert found is not None
            torch.testing.assert_close(found.double(), expected, atol=1e-4, rtol=1e-5)


@there
def test_no_gradient_is_made_that_nobody_wants() -> None:
    x, weight = drawn(20, 32, seed=0), drawn(10, 32, seed=1).requires_grad_()
    onednn.linear(x, weight, None).sum().backward()  # type: ignore[no-untyped-call]
    assert x.grad is None
    assert weight.grad is not None
    with torch.no_grad():
        assert not onednn.linear(x, weight, None).requires_grad


@there
def test_a_plain_product_takes_matrices_as_they_lie() -> None:
    left, right = drawn(30, 70, seed=0), drawn(70, 40, seed=1)
    for first in (left, left.t().contiguous().t()):
        for second in (right, right.t().contiguous().t()):
            torch.testing.assert_close(onednn.matmul(first, second), left @ right, atol=1e-4, rtol=1e-5)


@there
def test_small_products_and_other_precisions_stay_where_they_are() -> None:
    large, weight = drawn(512, 256, seed=0), drawn(256, 256, seed=1)
    assert onednn.fits(large, weight)
    assert not onednn.fits(large[:8], weight)
    assert not onednn.fits(drawn(1, 4096, seed=2), drawn(8192, 4096, seed=3))  # one row: bound by memory
    assert not onednn.fits(large.double(), weight.double())
    assert not onednn.fits(large.bfloat16(), weight.bfloat16())
    with torch.autocast("cpu", torch.bfloat16):
        assert not onednn.fits(large, weight)


@there
def test_a_gradient_has_a_gradient() -> None:
    found = []
    for way in (onednn.linear, F.linear):
        x, weight = drawn(20, 32, seed=0).requires_grad_(), drawn(10, 32, seed=1).requires_grad_()
        (first,) = torch.autograd.grad(way(x, weight, None).square().sum(), x, create_graph=True)
        found.append(torch.autograd.grad(first.square().sum(), weight)[0])
    assert found[1].norm() > 1
    torch.testing.assert_close(found[0], found[1], atol=1e-2, rtol=1e-5)
