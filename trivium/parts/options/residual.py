"""The settings of residual connections."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from trivium.parts.options.norms import Norm
from trivium.parts.site import Cost, Site

if TYPE_CHECKING:
    from torch import nn


class Residual(Protocol):
    """The options of a residual scheme."""

    def build(self, site: Site, norm: Norm, rate: float, variational: float = 0.0) -> nn.Module:
        """The connection around one sub-layer, whose output gets dropout at these rates."""

    def final(self, site: Site, norm: Norm) -> nn.Module: ...
    def cost(self, site: Site, norm: Norm) -> Cost: ...
    def final_cost(self, site: Site, norm: Norm) -> Cost: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class PreOptions:
    """`x + drop(F(norm(x)))` and one norm after the stack: GPT-2, T5, LLaMA."""

    def build(self, site: Site, norm: Norm, rate: float, variational: float = 0.0) -> nn.Module:
        from trivium.parts.residual import PreConnection

        return PreConnection(norm.build(site), rate, variational)

    def final(self, site: Site, norm: Norm) -> nn.Module:
        return norm.build(site)

    def cost(self, site: Site, norm: Norm) -> Cost:
        return norm.cost(site)

    def final_cost(self, site: Site, norm: Norm) -> Cost:
        return norm.cost(site)


@dataclass(frozen=True, kw_only=True, slots=True)
class PostOptions:
    """`norm(x + drop(F(x)))` and no final norm: Vaswani, GPT-1, BERT."""

    def build(self, site: Site, norm: Norm, rate: float, variational: float = 0.0) -> nn.Module:
        from trivium.parts.residual import PostConnection

        return PostConnection(norm.build(site), rate, variational)

    def final(self, site: Site, norm: Norm) -> nn.Module:
        from torch import nn

        return nn.Identity()

    def cost(self, site: Site, norm: Norm) -> Cost:
        return norm.cost(site)

    def final_cost(self, site: Site, norm: Norm) -> Cost:
        return Cost()


@dataclass(frozen=True, kw_only=True, slots=True)
class SandwichOptions:
    """`x + norm(drop(F(norm(x))))` and one norm after the stack: CogView, Gemma 2."""

    def build(self, site: Site, norm: Norm, rate: float, variational: float = 0.0) -> nn.Module:
        from trivium.parts.residual import SandwichConnection

        return SandwichConnection(norm.build(site), norm.build(site), rate, variational)

    def final(self, site: Site, norm: Norm) -> nn.Module:
        return norm.build(site)

    def cost(self, site: Site, norm: Norm) -> Cost:
        return norm.cost(site).plus(norm.cost(site))

    def final_cost(self, site: Site, norm: Norm) -> Cost:
        return norm.cost(site)


RESIDUALS: dict[str, type[Residual]] = {"pre": PreOptions, "post": PostOptions, "sandwich": SandwichOptions}
