"""The whole road in one place: rows, batch, states, loss, gradients, update.

The order of the data and every random number are functions of (seed, step), so a run that is stopped anywhere and
started again makes the same updates.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from trivium.data.batch import Batch
from trivium.data.bucketing import at_once
from trivium.data.loader import RowNumbers, share
from trivium.errors import OutOfMemory
from trivium.models.transformer import Transformer
from trivium.objectives.objective import Task
from trivium.objectives.second import beside, mean
from trivium.objectives.seq2seq import judgement
from trivium.training.guards import clip, is_out_of_memory
from trivium.training.job import Job
from trivium.training.spikes import past


@dataclass(slots=True)
class Update:
    """One finished step, its numbers still on the device."""

    step: int
    loss: Tensor
    norm: Tensor
    allowed: Tensor
    rate: float
    count: int
    scale: float = math.inf  # of the loss, in fp16
    overflow: bool = False  # fp16 gradients overflowed: no update was made, the scale was halved, nothing is wrong
    note: str = ""  # a sentence for whoever watches


@dataclass(slots=True)
class Pending:
    """Updates whose numbers have not been read yet: reading them makes the host wait for the device."""

    updates: list[Update] = field(default_factory=list)

    def read(self) -> list[tuple[Update, float, float, bool]]:
        if not self.updates:
            return []
        columns = [torch.stack([u.loss, u.norm.float(), u.allowed.float()]) for u in self.updates]
        values = torch.stack(columns).tolist()
        result = [(u, loss, norm, ok > 0) for u, (loss, norm, ok) in zip(self.updates, values, strict=True)]
        self.updates.clear()
        return result


def updates(job: Job) -> Iterator[Update]:
    """Train step by step until the budget is spent."""
    recipe = job.recipe
    while job.step < job.total:
        job.cursor = past(job.skipped, job.cursor, job.order.size)
        numbers = job.order.batch(job.cursor)
        scale = job.scaler.scale
        loss, count, note = fitted(job, numbers)
        job.scaler.reduce(job.model.parameters())
        norm = clip(job.model.parameters(), recipe.clip)
        factor = recipe.schedule.factor(job.step + 1 - job.overflows, job.total)
        overflow = job.scaler.overflowed(loss, norm)
        if overflow:
            allowed = torch.zeros_like(job.soundness.sound)
            job.overflows += 1
        else:
            allowed = job.soundness.allow(loss, norm)
            job.optimizer.step(factor, allowed)
            job.average.update(job.step + 1 - job.overflows, allowed)
        job.model.zero_grad(set_to_none=True)
        job.step += 1
        job.cursor += job.order.size
        job.tokens += count
        rate = recipe.optim.rate * factor
        yield Update(job.step, loss, norm, allowed, rate, count, scale, overflow, note)


def fitted(job: Job, numbers: RowNumbers) -> tuple[Tensor, int, str]:
    """The gradients of a batch, from fewer rows at a time if memory runs out and the recipe leaves that open.

    Gives the mean loss, the number of labels, and a sentence if `job.micro` was halved.
    """
    note = ""
    while True:
        try:
            return *gradients(job, numbers), note
        except Exception as error:
            if not is_out_of_memory(error) or job.recipe.batch.micro:
                raise
            if job.micro == 1:
                raise OutOfMemory(
                    f"out of memory on {job.recipe.device} with a single row of {job.rows.length} tokens; "
                    "set recompute=blocks, or start a new run with a smaller model.context or model.width"
                ) from error
        # outside the handler: the traceback keeps alive what filled the memory
        job.model.zero_grad(set_to_none=True)
        if job.model.device.type == "cuda":
            torch.cuda.empty_cache()
        job.micro = -(-job.micro // 2)
        less = f"{job.micro} {job.recipe.batch.unit} at a time (batch.micro)"
        note = f"out of memory at step {job.step + 1}: from here on {less}"


def gradients(job: Job, numbers: RowNumbers) -> tuple[Tensor, int]:
    """Leave the gradients of these rows in the model; the mean loss over their labels, and how many there are."""
    device = job.model.device
    job.model.train()
    rng = seeded(job.recipe.seed, job.step)
    parts = share(numbers, rank=0, world=1, micro=at_once(job.order, numbers, job.micro))
    batches = [job.task.inputs(job.rows.take(part), rng) for part in parts]
    counts = [sum(batch.count for batch in batches), sum(batch.second for batch in batches)]
    loss = torch.zeros((), device=device)
    for batch in batches:
        part = mean(job.compute(batch.to(device)), counts)
        job.scaler.enlarged(part).backward()  # type: ignore[no-untyped-call]
        loss += part.detach()
    return loss, counts[0]


def computation(
    model: Transformer,
    task: Task,
    autocast: Callable[[], AbstractContextManager[object]],
    compiled: bool,
    ragged: bool = False,
) -> Callable[[Batch], Tensor]:
    """The road from a batch to its summed loss as one function, so that the compiler sees all of it.

    A model that is not in training is judged by what validation reports. Batches that are `ragged` have many shapes,
    for which the compiler makes one program and not one each.
    """

    def loss(inputs: dict[str, Tensor], targets: dict[str, Tensor]) -> Tensor:
        states = model(**inputs)
        judge = task.loss if model.training else judgement(task)
        return beside(judge(model.head, states, targets), model, states, targets)

    function = torch.compile(loss, dynamic=True if ragged else None) if compiled else loss

    def compute(batch: Batch) -> Tensor:
        with autocast():
            return function(batch.inputs, batch.targets)

    return compute


def seeded(seed: int, step: int) -> np.random.Generator:
    """Seed torch (dropout) and return a generator (masking), both functions of (seed, step) alone."""
    digest = hashlib.blake2b(f"{seed}:{step}".encode(), digest_size=8).digest()
    number = int.from_bytes(digest, "big")
    torch.manual_seed(number)
    return np.random.default_rng(number)
