"""Where a part stands in a model, and what it says it costs there."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

MOST = 10_000_000  # of any size in a configuration: no model has one such, and a stranger's file may ask for anything


@dataclass(frozen=True, kw_only=True, slots=True)
class Site:
    """All that a part may know of its surroundings; it never sees the whole configuration."""

    width: int  # D, the size of the residual stream
    context: int  # the longest input
    vocab: int = 0
    layer: int = 0
    depth: int = 1  # layers in this stack
    causal: bool = True
    source: int = 0  # the width that keys and values come from; 0 unless this is cross-attention
    heads: int = 0  # H, the query heads; this and the two sizes are for positions that act inside attention
    head: int = 0  # E, the size of a query or key in one head
    value: int = 0  # the size of a value in one head


@dataclass(frozen=True, kw_only=True, slots=True)
class NoPart:
    """An empty place."""


class Cost(NamedTuple):
    """What a part adds to a model: parameters, forward FLOPs per token at the site's full context, and the elements per
    token that it keeps for the backward pass; its input counts, its output is the input of the next part.
    """

    parameters: int = 0
    flops: int = 0
    kept: int = 0

    def plus(self, other: Cost) -> Cost:
        return Cost(self.parameters + other.parameters, self.flops + other.flops, self.kept + other.kept)


def matrix(inputs: int, outputs: int, *, bias: bool = False) -> Cost:
    """The cost of one linear layer: a multiply-add counts as two operations, a bias as none."""
    return Cost(inputs * outputs + (outputs if bias else 0), 2 * inputs * outputs)
