"""The settings of norms."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from trivium.errors import ConfigError
from trivium.parts.site import Cost, Site

if TYPE_CHECKING:
    from torch import nn


class Norm(Protocol):
    """The options of a norm over the last axis."""

    def build(self, site: Site) -> nn.Module: ...
    def cost(self, site: Site) -> Cost: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerNormOptions:
    """Zero mean, unit deviation, then a learned scale and (unless `bias` is false) shift."""

    eps: float = 1e-5
    bias: bool = True

    def __post_init__(self) -> None:
        _positive(self.eps)

    def build(self, site: Site) -> nn.Module:
        from trivium.parts.norms import LayerNorm

        return LayerNorm(site.width, self.eps, self.bias)

    def cost(self, site: Site) -> Cost:
        return Cost(site.width * (2 if self.bias else 1), kept=site.width)


@dataclass(frozen=True, kw_only=True, slots=True)
class RMSNormOptions:
    """LayerNorm without centring and shift: divided by the root of the mean square, then a learned scale."""

    eps: float = 1e-6

    def __post_init__(self) -> None:
        _positive(self.eps)

    def build(self, site: Site) -> nn.Module:
        from trivium.parts.norms import RMSNorm

        return RMSNorm(site.width, self.eps)

    def cost(self, site: Site) -> Cost:
        return Cost(site.width, kept=site.width)


NORMS: dict[str, type[Norm]] = {"layer": LayerNormOptions, "rms": RMSNormOptions}


def _positive(eps: float) -> None:
    if not eps > 0:
        raise ConfigError(f"eps: {eps} is not positive; try 1e-5")
