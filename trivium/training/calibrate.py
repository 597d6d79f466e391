"""What only trying shows, tried once before a run on a copy of its job: rows that fit, the length of a step."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import NamedTuple

import torch

from trivium.training.job import Job
from trivium.training.loop import updates
from trivium.training.recipe import Recipe

_SHARE = 0.03  # of a budget may go into measuring, once there are enough steps
_LARGE = 0.1  # of a budget, which neither the first few steps nor a validation may go beyond
_FEWEST, _MOST = 3, 8  # steps that are measured, the first among them, which compiles
_BATCHES = 4  # of a validation that is measured


class Timing(NamedTuple):
    """Seconds of a step and of a whole validation, and what measuring them took."""

    step: float
    validation: float
    measuring: float


def measure(
    seconds: float, make: Callable[[], Job], validation: Callable[[Job, float], float], clock: Callable[[], float]
) -> Timing:
    """Time some steps of a job like the real one, for a run of `seconds`.

    One step is always made, and two where the first compiles: more only if they leave nine tenths of the budget.
    `validation` times a validation by so many batches of it, or a part of one.
    """
    start = clock()
    job = make()
    least = 1 if job.recipe.compile == "off" else 2
    lengths: list[float] = []
    before = clock()
    for update in updates(job):
        float(update.loss)  # wait for the device
        now = clock()
        lengths.append(now - before)
        before = now
        spent = now - start
        if len(lengths) >= _MOST or (len(lengths) >= _FEWEST and spent > _SHARE * seconds):
            break
        if len(lengths) >= least and spent + lengths[-1] > _LARGE * seconds:
            break
    step = statistics.median(lengths[1:] or lengths)
    once = validation(job, min(_BATCHES, _LARGE * seconds / max(step, 1e-9)))
    del job
    _release()
    return Timing(step, once, clock() - start)


def warn_of_long_steps(timing: Timing, recipe: Recipe) -> str:
    """The sentence about a budget in minutes that a few steps use up; "" if there is nothing to say."""
    seconds, batch = 60 * recipe.budget.minutes, recipe.batch
    if timing.step <= _LARGE * seconds:
        return ""
    return (
        f"a step takes {timing.step:.3g} s, {timing.step / seconds:.0%} of budget.minutes={recipe.budget.minutes:g}: "
        f"lower batch.{batch.unit} (now {batch.size:,}) for more steps"
    )


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
