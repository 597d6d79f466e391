"""What only trying shows, tried once before a run on a copy of its job: rows that fit, the length of a step."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch

from trivium.data.bucketing import Pairs
from trivium.training.build_job import build_job
from trivium.training.context import RunContext
from trivium.training.deadline import VALIDATION
from trivium.training.fit import surely_fits
from trivium.training.job import Job
from trivium.training.loop import updates
from trivium.training.recipe import Budget, Recipe
from trivium.training.stages import Say, stage
from trivium.training.timeline import times
from trivium.training.validate import is_worth_compiling, validate

_SHARE = 0.03  # of a budget may go into measuring, once there are enough steps
_LARGE = 0.1  # of a budget, which neither the first few steps nor a validation may go beyond
_FEWEST, _MOST = 3, 8  # steps that are measured, the first among them, which compiles
_BATCHES = 4  # of a validation that is measured


class Timing(NamedTuple):
    """Seconds of a step and of a whole validation, and what measuring them took."""

    step: float
    validation: float
    measuring: float


def fit_micro_batch(context: RunContext, say: Say, clock: Callable[[], float]) -> RunContext:
    """The context with as many rows at a time as fit the device, by a trial where that is not sure.

    Not on the CPU, whose system ends a process that takes too much.
    """
    recipe = context.recipe
    if recipe.batch.micro or torch.device(recipe.device).type == "cpu" or surely_fits(recipe, context.longest):
        return context
    return try_micro_batch(context, say, clock)


def try_micro_batch(context: RunContext, say: Say, clock: Callable[[], float]) -> RunContext:
    """The same by a trial of a step."""
    recipe = context.recipe
    with stage("memory", say, clock) as current:
        micro = rows_that_fit(lambda: build_job(context, 1))
        current.detail = f"{micro} {recipe.batch.unit} at a time fit"
    if micro == recipe.micro:
        return context
    what = f"{recipe.micro} {recipe.batch.unit} at a time"
    say(f"{what} do not fit the memory of {recipe.device}: batch.micro is {micro}")
    return replace(context, recipe=replace(recipe, batch=replace(recipe.batch, micro=micro)))


def plan_budget(context: RunContext, say: Say, clock: Callable[[], float]) -> RunContext:
    """The context with a budget in steps, or with a plan for one in minutes."""
    recipe = context.recipe
    if recipe.budget.tokens:
        steps = math.ceil(recipe.budget.tokens / context.tokens_per_step())
        return replace(context, recipe=replace(recipe, budget=Budget(steps=steps)))
    if not recipe.budget.minutes or recipe.budget.planned:  # the file of a run in minutes repeats it
        return context
    seconds = recipe.budget.minutes * 60
    rows = _validated_rows(context)
    say("timing some steps, to plan the minutes by")
    with stage("timing", say, clock) as current:
        trial = partial(build_job, context, 1_000_000)
        timing = measure(seconds, trial, lambda made, batches: time_validation(made, context, batches, clock), clock)
        current.detail = f"{timing.step:.3g} s a step"
    if slow := warn_of_long_steps(timing, recipe):
        say(slow)
    planned = max(1, int((seconds - timing.measuring) * (1 - VALIDATION) / max(timing.step, 1e-9)))
    recipe = replace(recipe, budget=replace(recipe.budget, planned=planned))
    # a margin for a machine that is busier later on
    allowed = 0.8 * VALIDATION * seconds / times(recipe.evaluate.every, planned)
    if rows and timing.validation > allowed:
        fewer = max(1, int(rows * allowed / timing.validation))
        say(
            f"each validation reads {fewer:,} of {rows:,} rows, so that all of them take less than a tenth of "
            f"{recipe.budget.minutes:g} minutes (evaluate.rows)"
        )
        recipe = replace(recipe, evaluate=replace(recipe.evaluate, rows=fewer))
    each = timing.validation * (recipe.evaluate.rows or rows) / max(1, rows)
    return replace(context, recipe=recipe, spent=timing.measuring, validation=each)


def time_validation(trial: Job, context: RunContext, batches: float, clock: Callable[[], float]) -> float:
    """The seconds that one validation takes, by a part of it."""
    recipe, rows, wanted = context.recipe, context.valid, _validated_rows(context)
    if not wanted:
        return 0.0
    tokens = int(rows.sizes.max(axis=1).mean()) if isinstance(rows, Pairs) and recipe.batch.tokens else 1
    part = min(wanted, max(1, int(batches * trial.micro) // tokens))
    # as the run will: the number of steps is not known yet, that of validations is, or they are few
    often = times(recipe.evaluate.every, 1_000_000) if isinstance(recipe.evaluate.every, float) else 10
    compiled = is_worth_compiling(trial, often * wanted)
    if recipe.compile != "off":  # once before the clock runs: a model in evaluation is another program to compile
        validate(trial, rows, limit=part, compiled=compiled)
    before = clock()
    validate(trial, rows, limit=part, compiled=compiled)
    return (clock() - before) * wanted / part


def _validated_rows(context: RunContext) -> int:
    """How many rows each validation reads."""
    return min(len(context.valid), context.recipe.evaluate.rows or len(context.valid))


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
