"""The training loop: batches, losses, gradients, update.

The order of the data and every random number are functions of (seed, step), so a run that is stopped anywhere and
started again makes the same updates.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from trivium.data.batch import Batch
from trivium.parts.losses import Losses, merge, total
from trivium.training.graphed import run_step
from trivium.training.job import Job
from trivium.training.oom import RunStep, with_oom_retry
from trivium.training.prefetch import Prefetcher, lookahead
from trivium.training.spikes import past
from trivium.training.step import StepResult, StepScalars, Update, detached, step_result, step_seed, trimmed


def updates(job: Job, ahead: int | None = None) -> Iterator[Update]:
    """Train step by step to the horizon of the timeline; `ahead` batches are made before their step has come."""
    run = run_step(job, train_step)
    with Prefetcher(job, lookahead(job.model.device) if ahead is None else ahead) as prefetcher:
        while job.step < job.timeline.horizon:  # which the session moves on
            job.cursor = past(job.skipped, job.cursor, job.order.size)
            yield next_update(job, prefetcher, run)


def next_update(job: Job, prefetcher: Prefetcher, run: RunStep) -> Update:
    """Take the next batches, run the step, and count it."""
    scale, done = job.scaler.scale, job.step + 1 - job.overflows
    factor = job.recipe.schedule.factor(job.timeline.position(done), job.timeline.planned)
    batches, result, note = with_oom_retry(job, prefetcher, run, factor, job.average.share(done))
    job.overflows += result.overflow
    job.step += 1
    job.cursor += job.order.size
    job.tokens += batches.counts["tokens"]
    return Update(job.step, result, batches.counts, job.recipe.optim.rate * factor, scale, note)


def train_step(job: Job, batches: Sequence[Batch], scalars: StepScalars) -> StepResult:
    """One update of the weights from the micro-batches of a step, which are on the device."""
    torch.manual_seed(step_seed(job.recipe.seed, job.step))  # dropout
    job.model.train()
    loss = torch.zeros((), device=job.model.device)
    losses: Losses = {}
    with job.optimizer.working_weights(len(batches)):  # around the backward pass too, which may compute blocks again
        for batch in trimmed(batches):
            terms = job.compute(batch)
            share = total(terms, scalars.counts)
            job.scaler.scale_loss(share).backward()  # type: ignore[no-untyped-call]
            loss += share.detach()
            losses = merge(losses, detached(terms))
    job.scaler.unscale(job.model.parameters())
    norm = job.optimizer.clip(job.recipe.clip)
    loss = job.guard.agree(loss)
    overflow = job.scaler.overflowed(loss, norm)
    finite = job.guard.check(loss, norm, overflow)
    job.moving = True  # a step that fails from here on is not tried again
    job.optimizer.step(scalars.factor, finite)
    job.average.follow(scalars.average, finite)
    job.moving = False
    job.optimizer.zero_grad()
    return step_result(loss, norm, finite, losses, overflow=overflow)
