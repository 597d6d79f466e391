"""What a training step takes beside its batches, and what it gives."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from trivium.parts.losses import Losses


class StepScalars(NamedTuple):
    """The numbers of a step, on the host, or tensors on the device."""

    counts: Mapping[str, int | Tensor]  # what the sum of each loss is divided by, at least 1
    factor: float | Tensor  # the schedule's share of the peak rate
    average: float | Tensor  # the share of the weights that goes into their average


class StepResult(NamedTuple):
    """The outcome of a step, its numbers still on the device: one tensor, so that one copy brings them to the host."""

    numbers: Tensor  # loss, gradient norm, 1 if both are finite, then the sum of every named loss
    over: dict[str, str]  # the names of the losses, and of the counts that divide their sums
    overflow: bool = False  # fp16 gradients overflowed: no update was made, the scale was halved, nothing is wrong

    @property
    def loss(self) -> Tensor:
        return self.numbers[0]

    @property
    def norm(self) -> Tensor:
        return self.numbers[1]

    @property
    def finite(self) -> Tensor:
        return self.numbers[2] > 0


def detached(losses: Losses) -> Losses:
    """The same losses without their graph."""
    return {name: loss._replace(sum=loss.sum.detach()) for name, loss in losses.items()}


def step_result(loss: Tensor, norm: Tensor, finite: Tensor, losses: Losses, *, overflow: bool = False) -> StepResult:
    """The outcome of a step with these losses, whose sums are over all of its micro-batches."""
    sums = [each.sum.float() for each in losses.values()]
    numbers = torch.stack([loss, norm.float(), finite.float(), *sums])
    return StepResult(numbers, {name: each.over for name, each in losses.items()}, overflow)


@dataclass(frozen=True, slots=True)
class Update:
    """One finished step of a run."""

    step: int
    result: StepResult
    counts: dict[str, int]  # of the labels in all micro-batches
    rate: float
    scale: float = math.inf  # of the loss, in fp16
    note: str = ""  # a sentence for the user

    @property
    def loss(self) -> Tensor:
        return self.result.loss

    @property
    def norm(self) -> Tensor:
        return self.result.norm

    @property
    def finite(self) -> Tensor:
        return self.result.finite

    @property
    def overflow(self) -> bool:
        return self.result.overflow

    @property
    def tokens(self) -> int:
        return self.counts["tokens"]


def at_least_one(counts: Mapping[str, int]) -> dict[str, int]:
    """The same counts as divisors: a loss without a label is 0, not 0/0."""
    return {name: max(1, count) for name, count in counts.items()}
