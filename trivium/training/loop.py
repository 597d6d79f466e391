"""The whole road in one place: rows, batch, states, loss, gradients, update.

The order of the data and every random number are functions of (seed, step), so a run that is stopped anywhere and
started again makes the same updates.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TypeVar

import torch
from torch import Tensor

from trivium.data.batch import Batch
from trivium.errors import OutOfMemory
from trivium.models.transformer import Transformer
from trivium.objectives.objective import Task, validation_loss
from trivium.parts.losses import Losses, merge, total
from trivium.training.ahead import Feed, Made, lookahead, number
from trivium.training.guards import clip, give_back, is_out_of_memory
from trivium.training.job import Job
from trivium.training.replay import Replay
from trivium.training.scaling import Unscaled
from trivium.training.spikes import past
from trivium.training.step import StepResult, StepScalars, Update, at_least_one, step_result

T = TypeVar("T")


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
    factor, share = recipe.schedule.factor(position, job.timeline.planned), job.average.share(done)

    def attempt(made: Made) -> Callable[[], StepResult]:
        """Leave the gradients in the model; what then moves the weights, or has done so in a recorded step."""
        scalars = StepScalars(at_least_one(made.counts), factor, share)
        torch.manual_seed(number(recipe.seed, job.step))  # dropout
        if replay is not None:
            scalars = replay.on_device(scalars)
            if (played := replay.recorded(made, scalars)) is not None:
                return lambda: played
        loss, losses = gradients(job, [part.to(job.model.device) for part in made.parts], scalars)
        return lambda: move(job, loss, losses, scalars)

    finish, made, note = fitted(job, feed, attempt, replay)
    result = finish()
    job.overflows += result.overflow
    job.step += 1
    job.cursor += job.order.size
    job.tokens += made.counts["tokens"]
    return Update(job.step, result, made.counts, recipe.optim.rate * factor, scale, note)


def advance(job: Job, parts: list[Batch], scalars: StepScalars) -> StepResult:
    """A step on batches that are on the device already."""
    loss, losses = gradients(job, parts, scalars)
    return move(job, loss, losses, scalars)


def move(job: Job, loss: Tensor, losses: Losses, scalars: StepScalars) -> StepResult:
    """Move the weights by their gradients."""
    job.scaler.reduce(job.model.parameters())
    norm = clip(job.model.parameters(), job.recipe.clip, job.twins)
    overflow = job.scaler.overflowed(loss, norm)
    if overflow:
        finite = torch.zeros_like(job.soundness.sound)
    else:
        finite = job.soundness.allow(loss, norm)
        job.optimizer.step(scalars.factor, finite)
        job.average.follow(scalars.average, finite)
    forget(job)
    return step_result(loss, norm, finite, losses, overflow=overflow)


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


def gradients(job: Job, parts: Sequence[Batch], scalars: StepScalars) -> tuple[Tensor, Losses]:
    """Leave the gradients of these batches in the model; the loss over all of them, and its terms by name."""
    job.model.train()
    loss, losses = torch.zeros((), device=job.model.device), Losses()
    # gradients of several parts are added up in float32, which those of twins are not
    with job.twins.used() if job.twins is not None and len(parts) == 1 else nullcontext():
        for batch in parts:
            found = job.compute(batch)
            part = total(found, scalars.counts)
            job.scaler.enlarged(part).backward()  # type: ignore[no-untyped-call]
            loss += part.detach()
            losses = merge(losses, {name: each._replace(sum=each.sum.detach()) for name, each in found.items()})
            if len(parts) > 1 and loss.is_cpu:
                give_back()  # the next part finds other holes than it needs: 10 to 40 % of the activations
    return loss, losses


def computation(
    model: Transformer,
    task: Task,
    autocast: Callable[[], AbstractContextManager[object]],
    compiled: bool,
    ragged: bool = False,
    odd: bool = True,
) -> Callable[[Batch], Losses]:
    """The road from a batch to its losses as one function, so that the compiler sees all of it.

    A model that is not in training gives the losses of validation. Batches that are `ragged` have many shapes,
    for which the compiler makes one program and not one each; those that are `odd` get one only if that is said, since
    compiling takes 20 s or more on a GPU, and one of them may come in an epoch.
    """

    def loss(inputs: dict[str, Tensor], targets: dict[str, Tensor]) -> Losses:
        states = model(**inputs)
        losses = task.loss if model.training else validation_loss(task)
        return merge(losses(model, states, targets), states.losses)

    function = torch.compile(loss, dynamic=True if ragged else None) if compiled else loss

    def compute(batch: Batch) -> Losses:
        with autocast():
            return (loss if batch.odd and not odd else function)(batch.inputs, batch.targets)

    return compute
