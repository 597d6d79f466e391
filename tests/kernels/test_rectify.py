"""A linear layer with its ReLU as one product: values and gradients are those of the two apart."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from trivium.kernels.rectify import rectified


def given(biased: bool) -> tuple[Tensor, Tensor, Tensor | None]:
    generator = torch.Generator().manual_seed(0)
    x, weight, bias = (
        torch.randn(*shape, generator=generator, dtype=torch.float64) for shape in ((2, 5, 6), (9, 6), (9,))
    )
    return x, weight, bias if biased else None


@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize("compiled", [False, True])
def test_it_is_a_linear_layer_and_a_relu(biased: bool, compiled: bool) -> None:
    inputs = [one.requires_grad_() for one in given(biased) if one is not None]

    def one(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return rectified(x, weight, bias, torch.float64)

    run = torch.compile(one, backend="aot_eager", fullgraph=True) if compiled else one
    found, expected = run(*inputs), F.relu(F.linear(*inputs))
    torch.testing.assert_close(found, expected)
    back = torch.randn(found.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    pairs = zip(*(torch.autograd.grad(out, inputs, back) for out in (found, expected)), strict=True)
    for ours, plain in pairs:
        torch.testing.assert_close(ours, plain)


def test_only_the_gradients_that_are_wanted_are_made() -> None:
    x, weight, bias = given(True)
    weight.requires_grad_()
    (found,) = torch.autograd.grad(rectified(x, weight, bias, torch.float64).sum(), weight)
    (expected,) = torch.autograd.grad(F.relu(F.linear(x, weight, bias)).sum(), weight)
    torch.testing.assert_close(found, expected)


def test_no_rows_give_no_rows() -> None:
    x, weight, bias = given(True)
    assert rectified(x[:0], weight, bias, torch.float64).shape == (0, 5, 9)
