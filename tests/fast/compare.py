"""A part against its fast copy: the same weights, outputs and all gradients."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from trivium.fast.choose import fast
from trivium.kernels.hardware import INTERPRETED
from trivium.models.transformer import Transformer
from trivium.parts.masks import Mask, ScoreMask
from trivium.parts.mixers import Context
from trivium.parts.positions import Positions

Part = TypeVar("Part", bound=nn.Module)
Call = Callable[[Tensor], Tensor]


def fast_copy(part: Part) -> Part:
    """The part with the same weights, fast."""
    other = copy.deepcopy(part)
    fast(other)
    return other


def outcome(call: Call, x: Tensor, leaves: Sequence[Tensor], *, autocast: bool = False) -> list[Tensor]:
    """The output, and the gradients of the input and of all leaves that are not frozen."""
    x = x.detach().requires_grad_()
    with torch.autocast(x.device.type, torch.bfloat16, enabled=autocast, cache_enabled=False):
        out = call(x)
    generator = torch.Generator().manual_seed(6)
    upstream = torch.randn(out.shape, generator=generator).to(out.device, out.dtype)
    moving = [x, *(leaf for leaf in leaves if leaf.requires_grad)]
    return [out.detach(), *torch.autograd.grad(out, moving, upstream)]


def close(found: Sequence[Tensor], expected: Sequence[Tensor], room: float) -> None:
    """Every tensor within this share of its size."""
    for at, (one, other) in enumerate(zip(found, expected, strict=True)):
        off, size = (one.double() - other.double()).norm().item(), other.double().norm().item()
        assert off <= room * size + 1e-6, f"tensor {at} is off by {off:.3g} of {size:.3g}"


def as_near(found: Sequence[Tensor], plain: Sequence[Tensor], exact: Sequence[Tensor], room: float = 1.5) -> None:
    """Every tensor as near to that of float64 as the plain one, but for this factor.

    Triton's interpreter cuts bfloat16 off where it should round: every operation shrinks a gradient by 0.3 %.
    """
    share = 0.04 if INTERPRETED else 1e-4
    for at, (one, other, right) in enumerate(zip(found, plain, exact, strict=True)):
        off, most = ((tensor.double() - right).norm().item() for tensor in (one, other))
        least = share * right.norm().item() + 1e-5
        assert off <= room * most + least, f"tensor {at} is off by {off:.3g}, the plain one by {most:.3g}"


def narrow(model: Transformer) -> Transformer:
    """The plain model with a bf16 residual stream, as fast stacks have it: the rest is what the two differ by."""
    other = copy.deepcopy(model)
    for side in (other.encoder, other.decoder):
        if side is not None:
            side.register_forward_pre_hook(lambda module, given: (given[0].to(torch.bfloat16), *given[1:]))
    return other


def context(
    x_BTD: Tensor,
    mask: Mask,
    position: Positions | None = None,
    score_mask: Callable[..., ScoreMask] | None = None,
    source_BSD: Tensor | None = None,
) -> Context:
    """That of a layer without a cache; `score_mask` takes mask, queries, the number of keys and the bias."""
    position, length = position or Positions(), x_BTD.shape[1]
    at = torch.arange(length, device=x_BTD.device)[None]
    prepared = position.prepare(at, at)

    def scores(mask: Mask, keys: int, bias: Tensor | None) -> ScoreMask:
        if score_mask is None:
            return ScoreMask(mask, length, keys, x_BTD.device, bias)
        return score_mask(mask, x_BTD, keys, bias)

    given: dict[str, Any] = {}
    if source_BSD is not None:
        given = {"source": source_BSD, "source_mask": scores(Mask(), source_BSD.shape[1], None)}
    own = scores(mask, length, position.bias(prepared))
    return Context(mask=own, position=position, prepared=prepared, at=at, **given)
