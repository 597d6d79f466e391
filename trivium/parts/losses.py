"""Losses have names: what a part or an objective adds to the training loss, and what divides it.

An objective returns its losses by name; a part that has one (a router's balance, a ponder cost) returns `WithLosses`.
A name reaches the log, the screen and validation without anybody else knowing it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from torch import Tensor


class Loss(NamedTuple):
    """A differentiable sum over one micro-batch, the name of the count that divides it, and its weight in the total.

    The count is one of `Batch.counts`, added up over the micro-batches of a step. A statistic of a whole batch enters
    as its value times the number of sequences, over "sequences": the mean of micro-batches then does not depend on how
    many labels they have. A weight of 0 is only reported.
    """

    sum: Tensor
    over: str = "tokens"
    weight: float = 1.0


Losses = dict[str, Loss]  # names and order are the same in every step of a run


class WithLosses(NamedTuple):
    """The output of a part that has losses of its own."""

    x: Tensor
    losses: Losses


def split(output: Tensor | WithLosses) -> tuple[Tensor, Losses]:
    """The tensor that a part returned and its losses, none for most parts."""
    return (output, {}) if isinstance(output, Tensor) else output


def with_losses(x: Tensor, losses: Losses) -> Tensor | WithLosses:
    """The output of a part: a tensor alone where there are no losses."""
    return WithLosses(x, losses) if losses else x


def merge(*several: Mapping[str, Loss]) -> Losses:
    """The losses of several parts; equal names, as those of several layers, add their sums."""
    found: Losses = {}
    for losses in several:
        for name, loss in losses.items():
            found[name] = loss if name not in found else loss._replace(sum=found[name].sum + loss.sum)
    return found


def total(losses: Mapping[str, Loss], counts: Mapping[str, int | Tensor]) -> Tensor:
    """The loss that is differentiated: every sum over its count, times its weight."""
    terms = [_term(loss, counts) for loss in losses.values() if loss.weight]
    return sum(terms[1:], start=terms[0])


def _term(loss: Loss, counts: Mapping[str, int | Tensor]) -> Tensor:
    mean = loss.sum / counts[loss.over]
    return mean if loss.weight == 1.0 else mean * loss.weight
