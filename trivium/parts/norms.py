"""Normalisation of the residual stream (spec: architecture §3)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trivium.errors import ConfigError
from trivium.parts.kernels.eager import RootMeanSquare, wanted
from trivium.parts.site import Cost, Site


class Norm(Protocol):
    """The options of a norm over the last axis."""

    def build(self, site: Site) -> nn.Module: ...
    def cost(self, site: Site) -> Cost: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerNorm:
    """Zero mean, unit deviation, then a learned scale and (unless `bias` is false) shift."""

    eps: float = 1e-5
    bias: bool = True

    def __post_init__(self) -> None:
        _positive(self.eps)

    def build(self, site: Site) -> nn.Module:
        return LayerNormed(site.width, self.eps, self.bias)

    def cost(self, site: Site) -> Cost:
        return Cost(site.width * (2 if self.bias else 1), kept=site.width)


@dataclass(frozen=True, kw_only=True, slots=True)
class RMSNorm:
    """LayerNorm without centring and shift: divided by the root of the mean square, then a learned scale."""

    eps: float = 1e-6

    def __post_init__(self) -> None:
        _positive(self.eps)

    def build(self, site: Site) -> nn.Module:
        return RMSNormed(site.width, self.eps)

    def cost(self, site: Site) -> Cost:
        return Cost(site.width, kept=site.width)


NORMS: dict[str, type[Norm]] = {"layer": LayerNorm, "rms": RMSNorm}


class LayerNormed(nn.Module):
    def __init__(self, width: int, eps: float, bias: bool) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(width))
        self.bias = nn.Parameter(torch.zeros(width)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)


class RMSNormed(nn.Module):
    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        if wanted(x) and x.dtype == self.weight.dtype and x.dtype in (torch.float32, torch.float64):
            fast: Tensor = RootMeanSquare.apply(x, self.weight, self.eps)  # type: ignore[no-untyped-call]
            return fast
        # Statistics in at least float32, cast back before the scale: the order of the published LLaMA checkpoints.
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        return F.rms_norm(wide, self.weight.shape, None, self.eps).to(x.dtype) * self.weight


def _positive(eps: float) -> None:
    if not eps > 0:
        raise ConfigError(f"eps: {eps} is not positive; try 1e-5")
