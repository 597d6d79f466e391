"""Each fast way gives the numbers of the plain one, forward and back."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from trivium.kernels.eager import RootMeanSquare, SquaredRelu, Turned, use_cpu_kernels

Rows = tuple[int, ...]


def both(
    fast: Callable[..., Tensor], plain: Callable[..., Tensor], *inputs: Tensor
) -> tuple[list[Tensor], list[Tensor]]:
    """Outputs and gradients of two ways, for one random upstream gradient."""
    results = []
    for way in (fast, plain):
        leaves = [tensor.clone().requires_grad_() for tensor in inputs]
        out = way(*leaves)
        upstream = torch.randn(out.shape, generator=torch.Generator().manual_seed(9), dtype=out.dtype)
        results.append([out.detach(), *torch.autograd.grad(out, leaves, upstream)])
    return results[0], results[1]


def assert_same(pair: tuple[list[Tensor], list[Tensor]]) -> None:
    for one, two in zip(*pair, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("shape", [(3, 5), (2, 3, 8), (2, 2, 3, 4)])
def test_root_mean_square_is_the_norm_of_torch(shape: Rows) -> None:
    x = torch.randn(shape, dtype=torch.float64)
    weight = torch.randn(shape[-1], dtype=torch.float64)
    assert_same(
        both(
            lambda x, w: RootMeanSquare.apply(x, w, 1e-6),  # type: ignore[no-untyped-call]
            lambda x, w: F.rms_norm(x, (shape[-1],), w, 1e-6),
            x,
            weight,
        )
    )


def test_root_mean_square_of_nothing_is_nothing() -> None:
    x = torch.zeros(2, 4, requires_grad=True)
    out = RootMeanSquare.apply(x, torch.ones(4), 1e-6)  # type: ignore[no-untyped-call]
    out.sum().backward()
    assert torch.equal(out.detach(), torch.zeros(2, 4))
    assert x.grad is not None
    assert torch.isfinite(x.grad).all()


def test_squared_relu_is_the_square_of_relu() -> None:
    x = torch.randn(7, 6, dtype=torch.float64)
    assert_same(both(SquaredRelu.apply, lambda x: F.relu(x).square(), x))


def test_a_turn_is_the_product_with_a_complex_number() -> None:
    x = torch.randn(2, 3, 5, 8, dtype=torch.float64)
    angles = torch.randn(1, 1, 5, 4, dtype=torch.float64)

    def plain(x: Tensor) -> Tensor:
        first, second = x.chunk(2, dim=-1)
        turned = torch.complex(first, second) * torch.polar(torch.ones_like(angles), angles)
        return torch.cat((turned.real, turned.imag), dim=-1)

    assert_same(both(lambda x: Turned.apply(x, angles.cos(), angles.sin()), plain, x))  # type: ignore[no-untyped-call]


def test_they_are_for_eager_steps_on_a_cpu() -> None:
    x = torch.randn(3, requires_grad=True)
    assert use_cpu_kernels(x)
    assert not use_cpu_kernels(x.to("meta"))
    with torch.no_grad():
        assert not use_cpu_kernels(x)

    def asked(x: Tensor) -> Tensor:
        return x if use_cpu_kernels(x) else -x

    torch._dynamo.reset()
    assert torch.equal(torch.compile(asked, backend="eager", fullgraph=True)(x), -x)
    torch._dynamo.reset()
