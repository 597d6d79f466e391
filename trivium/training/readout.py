"""Numbers on their way from the device to the host, copied beside the computation."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

import torch
from torch import Tensor

from trivium.training.step import Update, at_least_one


class AsyncCopy:
    """One tensor on its way to the host."""

    def __init__(self, tensor: Tensor) -> None:
        self._event: torch.cuda.Event | None = None
        self._tensor = tensor
        if tensor.is_cuda:
            self._tensor = tensor.to("cpu", non_blocking=True)  # into pinned memory
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record()

    def has_arrived(self, *, waited: bool = False) -> bool:
        """Whether reading costs no wait.

        Without events (mps) only where the host has just `waited` for a later number: then all is done.
        """
        if self._event is not None:
            return bool(self._event.query())  # type: ignore[no-untyped-call]
        return waited or self._tensor.is_cpu

    def read(self) -> list[float]:
        """The numbers, which the host waits for."""
        if self._event is not None:
            self._event.synchronize()
        numbers: list[float] = self._tensor.tolist()
        return numbers


class MeasuredUpdate(NamedTuple):
    """An update and its numbers on the host; every loss is the mean over its count."""

    update: Update
    loss: float
    norm: float
    finite: bool
    losses: dict[str, float]


class ReadOut:
    """Updates whose numbers are on their way to the host, in order."""

    def __init__(self) -> None:
        self._coming: deque[tuple[Update, AsyncCopy]] = deque()

    def add(self, update: Update) -> None:
        self._coming.append((update, AsyncCopy(update.result.numbers)))

    def read(self, behind: int = 0) -> list[MeasuredUpdate]:
        """All that have arrived; the host waits for those that are older than the last `behind`."""
        found: list[MeasuredUpdate] = []
        while self._coming and (len(self._coming) > behind or self._coming[0][1].has_arrived(waited=bool(found))):
            update, copy = self._coming.popleft()
            found.append(_measured(update, copy.read()))
        return found


def _measured(update: Update, numbers: list[float]) -> MeasuredUpdate:
    loss, norm, finite, *sums = numbers
    divisors = at_least_one(update.counts)
    means = {name: total / divisors[over] for (name, over), total in zip(update.result.over.items(), sums, strict=True)}
    return MeasuredUpdate(update, loss, norm, finite > 0, means)
