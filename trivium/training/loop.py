"""The whole road in one place: rows, batch, states, loss, gradients, update; then validate, sample and save.

The order of the data and every random number are functions of (seed, step), so a run that is stopped anywhere and
started again makes the same updates.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from trivium.data.batch import Batch
from trivium.data.loader import Order, share
from trivium.data.packing import Rows
from trivium.models.transformer import Transformer
from trivium.objectives.causal import Objective
from trivium.optim.optimizers import Optimizer
from trivium.training.guards import Soundness, clip
from trivium.training.recipe import Recipe


@dataclass(kw_only=True, slots=True)
class Job:
    """The state of a run: what a checkpoint holds, and what it takes to go on."""

    recipe: Recipe
    model: Transformer
    optimizer: Optimizer
    rows: Rows
    order: Order
    soundness: Soundness
    compute: Callable[[Batch], Tensor]  # the summed loss of a micro-batch, compiled or not
    total: int
    step: int = 0
    cursor: int = 0  # rows consumed
    tokens: int = 0  # labels that counted


@dataclass(slots=True)
class Update:
    """One finished step, its numbers still on the device."""

    step: int
    loss: Tensor
    norm: Tensor
    allowed: Tensor
    rate: float
    count: int


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
    recipe, device = job.recipe, job.model.device
    while job.step < job.total:
        job.model.train()
        numbers = job.order.batch(job.cursor)
        rng = seeded(recipe.seed, job.step)
        batches = [
            recipe.objective.inputs(job.rows.take(part), rng)
            for part in share(numbers, rank=0, world=1, micro=recipe.micro)
        ]
        count = sum(batch.count for batch in batches)  # of the whole step: never an average of averages
        loss = torch.zeros((), device=device)
        for batch in batches:
            part = job.compute(batch.to(device)) / max(1, count)
            part.backward()  # type: ignore[no-untyped-call]
            loss += part.detach()
        norm = clip(job.model.parameters(), recipe.clip)
        allowed = job.soundness.allow(loss, norm)
        factor = recipe.schedule.factor(job.step + 1, job.total)
        job.optimizer.step(factor, allowed)
        job.model.zero_grad(set_to_none=True)
        job.step += 1
        job.cursor += len(numbers)
        job.tokens += count
        yield Update(job.step, loss, norm, allowed, recipe.optim.rate * factor, count)


def computation(
    model: Transformer, objective: Objective, autocast: Callable[[], AbstractContextManager[object]], compiled: bool
) -> Callable[[Batch], Tensor]:
    """The road from a batch to its summed loss as one function, so that the compiler sees all of it."""

    def loss(inputs: dict[str, Tensor], labels: Tensor) -> Tensor:
        return objective.loss(model.head, model(**inputs), labels)

    function = torch.compile(loss) if compiled else loss

    def compute(batch: Batch) -> Tensor:
        with autocast():
            return function(batch.inputs, batch.labels)

    return compute


def seeded(seed: int, step: int) -> np.random.Generator:
    """Seed torch (dropout) and return a generator (masking), both functions of (seed, step) alone."""
    digest = hashlib.blake2b(f"{seed}:{step}".encode(), digest_size=8).digest()
    number = int.from_bytes(digest, "big")
    torch.manual_seed(number)
    return np.random.default_rng(number)
