"""The whole road in one place: rows, batch, states, loss, gradients, update.

The order of the data and every random number are functions of (seed, step), so a run that is stopped anywhere and
started again makes the same updates.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from trivium.data.batch import Batch
from trivium.errors import OutOfMemory
from trivium.models.transformer import Transformer
from trivium.objectives.objective import Task
from trivium.objectives.second import beside, mean
from trivium.objectives.seq2seq import judgement
from trivium.training.ahead import Feed, Made, lookahead, number
from trivium.training.guards import clip, give_back, is_out_of_memory
from trivium.training.job import Job
from trivium.training.replay import Dials, Replay
from trivium.training.scaling import Unscaled
from trivium.training.spikes import past

T = TypeVar("T")


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


class Pending:
    """Updates whose numbers are on their way to the host, copied beside the computation."""

    def __init__(self) -> None:
        self._coming: deque[tuple[Update, Tensor, torch.cuda.Event | None]] = deque()

    def add(self, update: Update) -> None:
        numbers = torch.stack([update.loss, update.norm.float(), update.allowed.float()])
        event = None
        if numbers.is_cuda:
            numbers = numbers.to("cpu", non_blocking=True)  # into pinned memory
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record()
        self._coming.append((update, numbers, event))

    def read(self, behind: int = 0) -> list[tuple[Update, float, float, bool]]:
        """All that have arrived, in order; the host waits for those that are older than the last `behind`."""
        found: list[tuple[Update, float, float, bool]] = []
        while self._coming and (len(self._coming) > behind or _arrived(*self._coming[0][1:], bool(found))):
            update, numbers, event = self._coming.popleft()
            if event is not None:
                event.synchronize()
            loss, norm, ok = numbers.tolist()
            found.append((update, loss, norm, ok > 0))
        return found


def _arrived(numbers: Tensor, event: torch.cuda.Event | None, waited: bool) -> bool:
    """Whether reading costs no wait: without events (mps) only after one, in which the device has done all it had."""
    if event is not None:
        return bool(event.query())  # type: ignore[no-untyped-call]
    return waited or numbers.is_cpu


def updates(job: Job, ahead: int | None = None) -> Iterator[Update]:
    """Train step by step to the horizon of the timeline; `ahead` batches are made before their step has come."""
    replay = None
    if job.recipe.compile == "graphs" and isinstance(job.scaler, Unscaled):  # fp16 decides on the host what follows
        replay = Replay(job.model.device, lambda parts, dials: advance(job, parts, dials))
    with Feed(job, lookahead(job.model.device) if ahead is None else ahead) as feed:
        while job.step < job.timeline.horizon:  # which the session moves on
            job.cursor = past(job.skipped, job.cursor, job.order.size)
            yield _update(job, feed, replay)


def _update(job: Job, feed: Feed, replay: Replay | None) -> Update:
    """One step."""
    recipe, scale, done = job.recipe, job.scaler.scale, job.step + 1 - job.overflows
    position = job.timeline.position(done)
    if job.twins is not None:
        job.twins.refresh()  # here, since a recorded step would not
    factor, follow = recipe.schedule.factor(position, job.timeline.planned), job.average.share(done)

    def attempt(made: Made) -> tuple[Tensor, Callable[[], tuple[bool, Tensor, Tensor]]]:
        """The loss with the gradients in the model, and what moves the weights; a recorded step has done both."""
        dials = Dials(made.counts, factor, follow)
        torch.manual_seed(number(recipe.seed, job.step))  # dropout
        if replay is not None:
            dials = replay.on_device(dials)
            if (played := replay.recorded(made, dials)) is not None:
                return played[0], lambda: (False, *played[1:])
        loss = gradients(job, [part.to(job.model.device) for part in made.parts], dials)
        return loss, lambda: move(job, loss, dials)

    (loss, finish), made, note = fitted(job, feed, attempt, replay)
    overflow, norm, allowed = finish()
    job.overflows += overflow
    job.step += 1
    job.cursor += job.order.size
    job.tokens += made.labels
    return Update(job.step, loss, norm, allowed, recipe.optim.rate * factor, made.labels, scale, overflow, note)


def advance(job: Job, parts: list[Batch], dials: Dials) -> tuple[Tensor, Tensor, Tensor]:
    """A step on batches that are on the device already: loss, gradient norm, and whether the update was allowed."""
    loss = gradients(job, parts, dials)
    _, norm, allowed = move(job, loss, dials)
    return loss, norm, allowed


def move(job: Job, loss: Tensor, dials: Dials) -> tuple[bool, Tensor, Tensor]:
    """Move the weights by their gradients: whether fp16 overflowed, the gradient norm, whether it was allowed."""
    job.scaler.reduce(job.model.parameters())
    norm = clip(job.model.parameters(), job.recipe.clip, job.twins)
    overflow = job.scaler.overflowed(loss, norm)
    if overflow:
        allowed = torch.zeros_like(job.soundness.sound)
    else:
        allowed = job.soundness.allow(loss, norm)
        job.optimizer.step(dials.factor, allowed)
        job.average.follow(dials.follow, allowed)
    forget(job)
    return overflow, norm, allowed


def fitted(job: Job, feed: Feed, attempt: Callable[[Made], T], replay: Replay | None = None) -> tuple[T, Made, str]:
    """What `attempt` makes of a batch, of fewer rows at a time if memory runs out and the recipe leaves that open.

    Gives that, the batch, and a sentence if `job.micro` was halved.
    """
    note = ""
    while True:
        try:
            made = feed.take()
            return attempt(made), made, note
        except Exception as error:
            if not is_out_of_memory(error) or job.recipe.batch.micro:
                raise
            if job.micro == 1:
                raise OutOfMemory(
                    f"out of memory on {job.recipe.device} with a single row of {job.rows.length} tokens; "
                    f"set recompute=blocks, or start a new run with a smaller {job.recipe.data.limit} or model.width"
                ) from error
        # outside the handler: the traceback keeps alive what filled the memory
        forget(job)
        if job.twins is not None:
            job.twins.drop()  # they are of no use to a batch in parts
        if replay is not None:
            replay.forget()
        if job.model.device.type == "cuda":
            torch.cuda.empty_cache()
        job.micro = -(-job.micro // 2)
        less = f"{job.micro} {job.recipe.batch.unit} at a time (batch.micro)"
        note = f"out of memory at step {job.step + 1}: from here on {less}"


def forget(job: Job) -> None:
    """Let go of the gradients."""
    job.model.zero_grad(set_to_none=True)
    if job.twins is not None:
        job.twins.clear()


def gradients(job: Job, parts: Sequence[Batch], dials: Dials) -> Tensor:
    """Leave the gradients of these batches in the model; the mean loss over the labels of all of them."""
    job.model.train()
    loss = torch.zeros((), device=job.model.device)
    # gradients of several parts are added up in float32, which those of twins are not
    with job.twins.used() if job.twins is not None and len(parts) == 1 else nullcontext():
        for batch in parts:
            sums = job.compute(batch)
            part = mean(sums, dials.counts)
            job.scaler.enlarged(part).backward()  # type: ignore[no-untyped-call]
            loss += part.detach()
            if len(parts) > 1 and loss.is_cpu:
                give_back()  # the next part finds other holes than it needs: 10 to 40 % of the activations
    return loss


def computation(
    model: Transformer,
    task: Task,
    autocast: Callable[[], AbstractContextManager[object]],
    compiled: bool,
    ragged: bool = False,
    odd: bool = True,
) -> Callable[[Batch], Tensor]:
    """The road from a batch to its summed loss as one function, so that the compiler sees all of it.

    A model that is not in training is judged by what validation reports. Batches that are `ragged` have many shapes,
    for which the compiler makes one program and not one each; those that are `odd` get one only if that is said, since
    compiling takes 20 s or more on a GPU, and one of them may come in an epoch.
    """

    def loss(inputs: dict[str, Tensor], targets: dict[str, Tensor]) -> Tensor:
        states = model(**inputs)
        judge = task.loss if model.training else judgement(task)
        return beside(judge(model.head, states, targets), model, states, targets)

    function = torch.compile(loss, dynamic=True if ragged else None) if compiled else loss

    def compute(batch: Batch) -> Tensor:
        with autocast():
            return (loss if batch.odd and not odd else function)(batch.inputs, batch.targets)

    return compute
