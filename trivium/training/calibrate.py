"""What only trying shows, tried once before a run on a copy of its job: rows that fit, the length of a step."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import NamedTuple

import torch

from trivium.training.job import Job
from trivium.training.loop import updates

_SHARE = 0.03  # of a budget may go into measuring, once there are enough steps
_FEWEST, _MOST = 3, 8  # steps that are measured, the first among them, which compiles


class Timing(NamedTuple):
    """Seconds of a step and of a whole validation, and what measuring them took."""

    step: float
    validation: float
    measuring: float


def measure(
    seconds: float, make: Callable[[], Job], validation: Callable[[Job], float], clock: Callable[[], float]
) -> Timing:
    """Time some steps of a job like the real one, for a run of `seconds`; `validation` times a validation of it."""
    start = clock()
    job = make()
    lengths: list[float] = []
    before = clock()
    for update in updates(job):
        float(update.loss)  # wait for the device
        now = clock()
        lengths.append(now - before)
        before = now
        if len(lengths) >= _MOST or (len(lengths) >= _FEWEST and now - start > _SHARE * seconds):
            break
    once = validation(job)
    del job
    _release()
    return Timing(statistics.median(lengths[1:] or lengths), once, clock() - start)


def rows_that_fit(make: Callable[[], Job]) -> int:
    """How many rows go through the device at a time: all of a batch, or half of that until a step fits its memory."""
    job = make()
    update = next(updates(job))
    float(update.loss)  # wait for the device
    micro = job.micro
    del job, update
    _release()
    return micro


def _release() -> None:
    """Give back what a thrown-away job held."""
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
