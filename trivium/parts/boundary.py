"""A hidden token told from the two tokens around its span and its place in it (spec: objectives §5)."""

# N tokens of spans, D width, P size of a place

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trivium.config import at_least, place
from trivium.parts.feedforward import ACTIVATIONS, Activation
from trivium.parts.linear import Linear
from trivium.parts.norms import NORMS, LayerNorm, Norm
from trivium.parts.output import Head, Softmax
from trivium.parts.site import MOST, Cost, Site, matrix


class Boundary(Protocol):
    """The options of a boundary head; `tied` is the embedding matrix, which is also its output's."""

    @property
    def rows(self) -> int:
        """The tokens of a span that it can tell apart; those further in have no loss."""

    def build(self, site: Site, tied: nn.Parameter) -> nn.Module: ...
    def cost(self, site: Site) -> Cost: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class SpanBoundary:
    """SpanBERT's: two layers of `norm(gelu(W h + b))` over both borders and a vector of the place, then all ids."""

    rows: int = 15  # places: a span is counted in words and can have more pieces than words
    size: int = 200  # of the vector of a place
    activation: Activation = "gelu"
    norm: Norm = place(NORMS, LayerNorm(eps=1e-12))

    def __post_init__(self) -> None:
        at_least("rows", self.rows, 1, MOST)
        at_least("size", self.size, 1, MOST)

    def build(self, site: Site, tied: nn.Parameter) -> nn.Module:
        return BoundaryHead(self, site, tied)

    def cost(self, site: Site) -> Cost:
        first = matrix(2 * site.width + self.size, site.width, bias=True).plus(self.norm.cost(site))
        second = matrix(site.width, site.width, bias=True).plus(self.norm.cost(site))
        table = Cost(self.rows * self.size)
        return table.plus(first).plus(second).plus(Softmax(bias=True).cost(site, tied=True))


BOUNDARIES: dict[str, type[Boundary]] = {"span": SpanBoundary}


class BoundaryHead(nn.Module):
    tables = {"places": "position"}  # noqa: RUF012 - read by init and optimizers, never written

    def __init__(self, options: SpanBoundary, site: Site, tied: nn.Parameter) -> None:
        super().__init__()
        self.places = nn.Parameter(torch.empty(options.rows, options.size))
        self.activation = ACTIVATIONS[options.activation]
        self.first = Linear(2 * site.width + options.size, site.width, bias=True, role="transform")
        self.first_norm = options.norm.build(site)
        self.second = Linear(site.width, site.width, bias=True, role="transform")
        self.second_norm = options.norm.build(site)
        self.output = Softmax(bias=True).build(site, tied)

    def states(self, left_ND: Tensor, right_ND: Tensor, places_N: Tensor) -> Tensor:
        """What the borders of a span say of its tokens, each by its place from 0 on; [N, D]."""
        x = torch.cat((left_ND, right_ND, F.embedding(places_N, self.places)), -1)
        x = self.first_norm(self.activation(self.first(x)))
        result: Tensor = self.second_norm(self.activation(self.second(x)))
        return result

    def nll(self, left_ND: Tensor, right_ND: Tensor, places_N: Tensor, labels_N: Tensor) -> Tensor:
        """The negative log-likelihood of each label in nats; exactly 0 where the label is ignored."""
        return cast(Head, self.output).nll(self.states(left_ND, right_ND, places_N), labels_N)
