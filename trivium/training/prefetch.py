"""The batches of coming steps, made by a thread while the device works on an earlier one."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import count, islice
from types import TracebackType
from typing import NamedTuple

import numpy as np
import torch

from trivium.data.batch import Batch, add_counts
from trivium.data.bucketing import at_once
from trivium.data.loader import share
from trivium.training.job import Job
from trivium.training.process import set_current_gpu
from trivium.training.spikes import past
from trivium.training.step import step_seed

AHEAD = 2  # batches on a GPU; a CPU has no time to spare beside the step itself

BatchKey = tuple[int, int, int]  # step, cursor and micro: what a batch is a function of, beside the seed


class StepBatches(NamedTuple):
    """The micro-batches of a step on the host, and the counts that its losses are divided by."""

    batches: list[Batch]
    counts: dict[str, int]  # added up over all of them: never an average of averages

    def to(self, device: torch.device) -> list[Batch]:
        """The micro-batches on `device`."""
        return [batch.to(device) for batch in self.batches]


class Prefetcher:
    """`with Prefetcher(job, ahead) as prefetcher:` — the batches of the job's step, and those of `ahead` more.

    What was made for another cursor than the job then has, or for another micro-batch, is thrown away: a rollback or
    memory that ran out needs no word to the prefetcher. Without `ahead` there is no thread.
    """

    def __init__(self, job: Job, ahead: int) -> None:
        self.job = job
        self.ahead = ahead
        self._pool = ThreadPoolExecutor(1, "batches", set_current_gpu, (job.model.device,)) if ahead else None
        self._coming: dict[BatchKey, Future[StepBatches]] = {}

    def __enter__(self) -> Prefetcher:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)

    def take(self) -> StepBatches:
        """The batches of the job's step; an error in their making is raised here, when their step has come."""
        job = self.job
        if self._pool is None:
            return step_batches(job, (job.step, job.cursor, job.micro))
        wanted = [*islice(_keys(job), self.ahead + 1)]
        for key in [*self._coming]:
            if key not in wanted:
                self._coming.pop(key).cancel()
        for key in wanted:
            if key not in self._coming:
                self._coming[key] = self._pool.submit(step_batches, job, key)
        return self._coming.pop(wanted[0]).result()


def step_batches(job: Job, key: BatchKey) -> StepBatches:
    """The batches of a step, ready to go to the job's device."""
    step, cursor, micro = key
    rng = np.random.default_rng(step_seed(job.recipe.seed, step))
    rows = job.order.batch(cursor)
    parts = share(rows, rank=0, world=1, micro=at_once(job.order, rows, micro))
    batches = [job.task.inputs(job.rows.take(part), rng) for part in parts]
    counts = add_counts(batch.counts for batch in batches)
    if job.model.device.type == "cuda":
        batches = [batch.pinned() for batch in batches]
    return StepBatches(batches, counts)


def lookahead(device: torch.device) -> int:
    """How many batches are made ahead for this device."""
    return 0 if device.type == "cpu" else AHEAD


def _keys(job: Job) -> Iterator[BatchKey]:
    """The key of the job's step and those that follow if nothing comes in between."""
    cursor = job.cursor
    timeline = job.timeline
    for step in range(job.step, timeline.horizon) if timeline.is_complete else count(job.step):
        yield step, cursor, job.micro
        cursor = past(job.skipped, cursor + job.order.size, job.order.size)
