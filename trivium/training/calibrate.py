"""What only trying shows, tried once at the start on a copy that is thrown away: rows that fit, steps in a budget."""

from __future__ import annotations

import statistics
from collections.abc import Callable

import torch

from trivium.errors import ConfigError
from trivium.training.job import Job
from trivium.training.loop import updates

_SHARE = 0.05  # of the budget may go into measuring
_RESERVE = 0.98  # of what is left is planned: samples and checkpoints take the rest


def steps_for(
    seconds: float,
    make: Callable[[], Job],
    validation: Callable[[Job], float],
    evaluations: Callable[[int], int],
    clock: Callable[[], float],
) -> int:
    """The number of steps that end within `seconds` from now, validations included.

    `make` gives a job like the real one, `validation` the seconds that one validation takes, `evaluations` how many
    there are in a run of so many steps.
    """
    start = clock()
    job = make()
    times: list[float] = []
    before = clock()
    for update in updates(job):
        float(update.loss)  # wait for the device
        now = clock()
        times.append(now - before)
        before = now
        if len(times) >= 4 and now - start > _SHARE * seconds:
            break
    first = max(0.0, times[0] - statistics.median(times))  # compiling, which the real job does again
    step = statistics.median(times[2:] or times)
    once = validation(job)
    del job
    _release()
    left = seconds - (clock() - start) - first
    validating = evaluations(max(0, int(left / step))) * once
    steps = int((left - validating) * _RESERVE / step)
    if steps < 1:
        raise ConfigError(
            f"budget.minutes: {seconds / 60:.2f} minutes do not hold a step of {step:.1f} s beside {validating:.0f} s "
            "of validation; give more time, a smaller model or batch, or a smaller evaluate.rows"
        )
    return steps


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
