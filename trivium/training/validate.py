"""The validation text, every token scored once."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch

from trivium.data.batch import add_counts
from trivium.data.bucketing import Buckets, Pairs
from trivium.data.loader import RowNumbers
from trivium.data.packed import Examples
from trivium.objectives.options import Causal
from trivium.parts.losses import Losses
from trivium.training.job import Job
from trivium.training.step import at_least_one
from trivium.training.timeline import times

_BATCHES = 1000  # of all validations of a run


class Result(NamedTuple):
    """The total loss in nats, bits per byte of text where every token is predicted once, the mean of every loss."""

    loss: float
    bits_per_byte: float | None
    losses: dict[str, float] = {}  # noqa: RUF012 - never written


def validate(job: Job, rows: Examples, *, limit: int, compiled: bool | None = None) -> Result:
    """Score up to `limit` rows (0: all) with the weights for use; the order and the random numbers are fixed.

    Whether that is `compiled` is decided by how many rows all validations of the run read, unless it is said.
    """
    number = min(len(rows), limit) if limit else len(rows)
    if compiled is None:
        compiled = is_worth_compiling(job, times(job.recipe.evaluate.every, job.timeline.planned) * number)
    with job.in_use():
        return _score(job, rows, number, compiled)


@torch.inference_mode()
def _score(job: Job, rows: Examples, number: int, compiled: bool) -> Result:
    job.model.eval()
    sums, counts, found = dict[str, float](), dict[str, int](), Losses()
    rng = np.random.default_rng(0)  # one for all rows: what is masked does not depend on how many go at a time
    for portion in _portions(job, rows, number):
        batch = job.task.inputs(rows.take(portion), rng)
        whole = isinstance(job.order, Buckets) or len(portion) == job.micro  # a last, shorter batch is another program
        compute = job.compute if compiled and whole else job.evaluate
        found = compute(batch.to(job.model.device))
        for name, part in zip(found, torch.stack([loss.sum for loss in found.values()]).tolist(), strict=True):
            sums[name] = sums.get(name, 0.0) + part  # numbers of the host are float64
        counts = add_counts((counts, batch.counts))
    divisors = at_least_one(counts)
    losses = {name: total / divisors[found[name].over] for name, total in sums.items()}
    loss = sum((mean * found[name].weight for name, mean in losses.items() if found[name].weight), start=0.0)
    if not isinstance(job.recipe.objective, Causal):
        return Result(loss, None, losses)
    # exact when all rows are scored; with a limit, at the split's own bytes per token
    bytes_per_token = rows.stream.text_bytes / max(1, len(rows.stream) - 1)
    return Result(loss, losses["tokens"] / math.log(2) / bytes_per_token, losses)


def is_worth_compiling(job: Job, rows: int) -> bool:
    """Whether so many rows in all validations of a run make enough batches to compile a model in evaluation for them.

    That is another program than training, 10 to 20 s of compiling on a GPU; it saves some 15 ms a batch of GPT-2's.
    """
    return rows / max(1, job.micro) > _BATCHES or isinstance(job.order, Buckets)


def _portions(job: Job, rows: Examples, number: int) -> Iterator[RowNumbers]:
    """The first `number` rows, as many at a time as the device holds."""
    if isinstance(job.order, Buckets) and isinstance(rows, Pairs):
        buckets = job.order.like(rows.sizes[:number], job.micro)
        return (buckets.batch(cursor) for cursor in range(len(buckets)))
    return (np.arange(start, min(start + job.micro, number)) for start in range(0, number, job.micro))
