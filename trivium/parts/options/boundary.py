"""The settings of SpanBERT's boundary head."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from trivium.config import at_least, place
from trivium.parts.options.feedforward import Activation
from trivium.parts.options.norms import NORMS, LayerNormOptions, Norm
from trivium.parts.options.output import SoftmaxOptions
from trivium.parts.site import MOST, Cost, Site, matrix

if TYPE_CHECKING:
    from torch import nn


class Boundary(Protocol):
    """The options of a boundary head; `tied` is the embedding matrix, which is also its output's."""

    @property
    def rows(self) -> int:
        """The tokens of a span that it can tell apart; those further in have no loss."""

    def build(self, site: Site, tied: nn.Parameter) -> nn.Module: ...
    def cost(self, site: Site) -> Cost: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class SpanBoundaryOptions:
    """SpanBERT's: two layers of `norm(gelu(W h + b))` over both borders and a vector of the place, then all ids."""

    rows: int = 15  # places: a span is counted in words and can have more pieces than words
    size: int = 200  # of the vector of a place
    activation: Activation = "gelu"
    norm: Norm = place(NORMS, LayerNormOptions(eps=1e-12))

    def __post_init__(self) -> None:
        at_least("rows", self.rows, 1, MOST)
        at_least("size", self.size, 1, MOST)

    def build(self, site: Site, tied: nn.Parameter) -> nn.Module:
        from trivium.parts.boundary import SpanBoundaryHead

        return SpanBoundaryHead(self, site, tied)

    def cost(self, site: Site) -> Cost:
        first = matrix(2 * site.width + self.size, site.width, bias=True).plus(self.norm.cost(site))
        second = matrix(site.width, site.width, bias=True).plus(self.norm.cost(site))
        table = Cost(self.rows * self.size)
        return table.plus(first).plus(second).plus(SoftmaxOptions(bias=True).cost(site, tied=True))


BOUNDARIES: dict[str, type[Boundary]] = {"span": SpanBoundaryOptions}
