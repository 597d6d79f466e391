"""All gradients of a norm by one Triton kernel against autograd; on a GPU, or in Triton's interpreter."""

# N tokens, D width

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.kernels.launch import DEVICE, needs_triton
from tests.parts.drawing import random

EPS = 1e-5

pytestmark = needs_triton


def draw(*shape: int, seed: int = 0) -> Tensor:
    return random(*shape, seed=seed).to(DEVICE)


@pytest.fixture(params=[1, 4096])
def few(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Parts of which even few tokens have several tiles, of one token and of more."""
    from trivium.kernels import postnorm

    monkeypatch.setattr(postnorm, "LAUNCH", postnorm.Launch(numbers=request.param, parts=3))
    return 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("tokens", "width"), [(1, 8), (7, 24), (41, 100), (30, 768)])
def test_the_gradients_are_those_of_autograd(tokens: int, width: int, dtype: torch.dtype, few: int) -> None:
    from trivium.kernels.postnorm import unnormed

    past, into, total = ((draw(tokens, width, seed=seed) * 3 + 1).to(dtype) for seed in range(3))
    past, into = past.T.contiguous().T, into.T.contiguous().T  # however gradients lie
    weight, shift = draw(width, seed=3), draw(width, seed=4)
    exact = [one.double().requires_grad_() for one in (total, weight, shift)]
    out = F.layer_norm(exact[0], (width,), exact[1], exact[2], EPS)
    expected, scales, shifts = torch.autograd.grad(out, exact, past.double() + into.double())
    mean = total.double().mean(-1, keepdim=True).float()
    rstd = (total.double().var(-1, correction=0, keepdim=True) + EPS).rsqrt().float()
    found = unnormed(past, into, total, mean, rstd, weight, few)
    grad, sums = found
    assert grad.dtype == dtype
    assert sums.shape == (few, 3, width)
    close = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(grad.double(), expected, atol=3 * close, rtol=close)
    # the sums are those of float32, before the gradient is rounded
    for one, two in zip(sums.sum(0), (scales, shifts, expected.sum(0)), strict=True):
        torch.testing.assert_close(one.double(), two, atol=1e-3, rtol=1e-4)
    for one, two in zip(unnormed(past, into, total, mean, rstd, weight, few), found, strict=True):
        assert torch.equal(one, two)  # the same bits again


@pytest.mark.parametrize("lend", [True, False])
@pytest.mark.parametrize("shifted", [True, False])
@pytest.mark.parametrize("way", ["eager", "turned", "compiled"])
def test_two_readers_and_the_layer_before_have_the_gradients_of_the_plain_way(
    way: str, shifted: bool, lend: bool, few: int
) -> None:
    from trivium.kernels.postnorm import normed

    width = 24
    shapes = [(2, 5, width), (width, width), (width,), (width,), (width,)]
    leaves = [draw(*shape, seed=seed).requires_grad_() for seed, shape in enumerate(shapes)]

    def read(past: Tensor, into: Tensor) -> Tensor:
        return past.sin() + into.square()

    # whatever lies in columns is normed in rows
    turned = way == "turned"

    def fast(x: Tensor, matrix: Tensor, bias: Tensor, weight: Tensor, shift: Tensor) -> Tensor:
        y = F.linear(x, matrix, bias.detach() if lend else bias)
        x = x.mT.contiguous().mT if turned else x
        return read(*normed(x, y, bias if lend else None, weight, shift if shifted else None, EPS))

    def slow(x: Tensor, matrix: Tensor, bias: Tensor, weight: Tensor, shift: Tensor) -> Tensor:
        total = x + F.linear(x, matrix, bias)
        return read(*[F.layer_norm(total, (width,), weight, shift if shifted else None, EPS)] * 2)

    run = torch.compile(fast, backend="aot_eager", fullgraph=True) if way == "compiled" else fast
    close = 1e-2 if DEVICE == "cuda" else 1e-5  # a GPU multiplies in TF32
    outs = run(*leaves), slow(*leaves)
    torch.testing.assert_close(*outs, atol=close, rtol=close)
    upstream, wanted = draw(*outs[0].shape, seed=9), leaves if shifted else leaves[:-1]
    for one, two in zip(*(torch.autograd.grad(out, wanted, upstream) for out in outs), strict=True):
        torch.testing.assert_close(one, two, atol=10 * close, rtol=10 * close)
    torch._dynamo.reset()
