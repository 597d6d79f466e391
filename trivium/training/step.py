"""What a training step takes beside its batches, and what it gives."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from trivium.data.batch import Batch
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


def step_seed(seed: int, step: int) -> int:
    """The seed of all that is random in a step: a function of (seed, step) alone."""
    digest = hashlib.blake2b(f"{seed}:{step}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big")


_SMALL = 2 << 20  # KiB of a process that need not give anything back


def trimmed(batches: Sequence[Batch]) -> Iterator[Batch]:
    """The micro-batches; after each of several on the CPU freed memory goes back to the system.

    The next one finds other holes than it needs: 10 to 40 % of the activations.
    """
    for batch in batches:
        yield batch
        if len(batches) > 1 and batch.inputs["tokens"].is_cpu:
            _trim_large_process()


def _trim_large_process() -> None:
    """Return freed memory to the system on Linux; the C library keeps it in the holes between blocks."""
    if sys.platform == "linux":
        import resource

        if resource.getrusage(resource.RUSAGE_SELF).ru_maxrss > _SMALL:
            _malloc_trim()(0)


@functools.cache
def _malloc_trim() -> Callable[[int], object]:
    """glibc's malloc_trim; another C library has none."""
    trim: Callable[[int], object] | None = getattr(ctypes.CDLL(None), "malloc_trim", None)
    return trim or (lambda padding: None)
