"""Attention in float8: one product that is cut for its heads against one that is split."""

# B batch, T queries, D width

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import pytest
import torch
from torch import Tensor

from tests.parts.test_attention import CAUSAL, attend, made, random
from trivium.kernels import fp8
from trivium.parts import attention
from trivium.parts.attention import MultiHeadAttention
from trivium.parts.linear import narrowed
from trivium.parts.options.attention import MultiHead
from trivium.parts.options.positions import Rotary
from trivium.parts.positions import Positions
from trivium.parts.site import Site


def narrow(part: MultiHeadAttention, x_BTD: Tensor, way: str, position: Positions | None = None) -> list[Tensor]:
    """The result in float8 and the gradients of all that is not frozen."""
    position = position or Positions()
    at = torch.arange(x_BTD.shape[1])[None]
    prepared = position.prepare(at, at)

    def run(x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            result: Tensor = part(x, CAUSAL, position, prepared)
        return result

    out = (torch.compile(run, backend="aot_eager", fullgraph=True) if way == "compiled" else run)(x_BTD)
    leaves = [leaf for leaf in (x_BTD, *part.parameters()) if leaf.requires_grad]
    found = torch.autograd.grad(out, leaves, random(*out.shape, seed=8).to(out.dtype))
    torch._dynamo.reset()
    return [out.detach(), *found]


@pytest.fixture
def cuts(monkeypatch: pytest.MonkeyPatch) -> list[torch.Size]:
    """The inputs of the products in float8 whose gradients are laid together."""
    seen: list[torch.Size] = []
    whole = fp8.cut8

    def cut8(
        x: Tensor, weight: Tensor, bias: Tensor | None, heads: int, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor, Tensor]:
        seen.append(x.shape)
        return whole(x, weight, bias, heads, dtype)

    monkeypatch.setattr(fp8, "cut8", cut8)
    monkeypatch.setattr(MultiHeadAttention, "_one", lambda self, x: True)  # as on a GPU
    return seen


CASES = ["bare", "no bias", "turned", "normed", "odd", "frozen"]


@pytest.mark.parametrize(
    ("case", "way"),
    [
        ("bare", "compiled"),
        *((case, "eager") for case in CASES),
        *(pytest.param(case, "compiled", marks=pytest.mark.full) for case in CASES[1:]),
    ],
)
def test_in_float8_one_product_that_is_cut_gives_the_bits_of_one_that_is_split(
    case: str, way: str, cuts: list[torch.Size], monkeypatch: pytest.MonkeyPatch
) -> None:
    site = Site(width=32, context=16, head=16)
    options = MultiHead(
        heads=2, bias="none" if case == "no bias" else "all", norm="rms" if case == "normed" else "none"
    )
    part = made(options, site).float().train()
    narrowed(part, True)
    if case == "frozen":
        for layer in (part.query, part.key, part.value):
            layer.requires_grad_(False)
    position = Rotary().build(site) if case == "turned" else None
    x_BTD = random(2, 5 if case == "odd" else 8, 32).float().requires_grad_()
    fast = narrow(part, x_BTD, way, position)
    assert bool(cuts) == (case in ("bare", "no bias", "frozen"))  # elsewhere there would be nothing to gain
    cuts.clear()
    monkeypatch.setattr(attention, "PARTED", False)
    slow = narrow(part, x_BTD, way, position)
    assert not cuts
    assert all(torch.equal(one, other) for one, other in zip(fast, slow, strict=True))
    narrowed(part, False)
    assert torch.equal(narrow(part, x_BTD, "eager", position)[0], slow[0]) == (case == "odd")


def test_nothing_is_cut_in_float8_without_a_gradient_or_autocast(cuts: list[torch.Size]) -> None:
    part, x_BTD = made(MultiHead(heads=2), Site(width=32, context=16)).float(), random(2, 8, 32).float()
    narrowed(part, True)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        attend(part, x_BTD, CAUSAL)
    attend(part, x_BTD, CAUSAL)  # float32 was asked for
    assert not cuts


@pytest.mark.skipif(
    not (torch.cuda.is_available() and fp8.available(torch.device("cuda")) and fp8.KERNELS),
    reason="needs a GPU with products in float8, and Triton",
)
@pytest.mark.parametrize("bias", ["all", "none"])
def test_on_a_gpu_in_float8_the_compiled_layer_has_the_gradients_of_the_plain_way(
    bias: Literal["all", "none"], monkeypatch: pytest.MonkeyPatch
) -> None:
    part = made(MultiHead(heads=4, bias=bias), Site(width=64, context=48)).float().cuda().train()
    narrowed(part, True)
    x_BTD = random(4, 48, 64).float().cuda().requires_grad_()

    def run(x: Tensor) -> Tensor:
        with torch.autocast("cuda", torch.bfloat16):
            return attend(part, x, CAUSAL)

    def found(call: Callable[[Tensor], Tensor]) -> list[Tensor]:
        out = call(x_BTD)
        back = random(*out.shape, seed=8).to(out)
        return [out.detach(), *torch.autograd.grad(out, [x_BTD, *part.parameters()], back)]

    eager, compiled = found(run), found(torch.compile(run, fullgraph=True))
    torch._dynamo.reset()
    monkeypatch.setattr(attention, "PARTED", False)
    plain = found(run)
    assert torch.equal(eager[0], plain[0])
    narrowed(part.double(), False)
    x_BTD = x_BTD.detach().double().requires_grad_()
    exact = found(lambda x: attend(part, x, CAUSAL))
    for way in (eager, compiled):
        for one, other, right in zip(way, plain, exact, strict=True):
            # as near as the plain way: weights as large as these make 0.3 of a bit that falls to the other side; the
            # gradients of keys' biases are 0, all that is there is rounding
            assert (one - right).norm() < 1.5 * (other - right).norm() + 1e-2
            assert right.norm() < 1e-6 or (one - right).norm() < 0.5 * right.norm()
