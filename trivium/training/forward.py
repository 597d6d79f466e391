"""From a batch to its losses, as one function that the compiler sees whole."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from trivium.data.batch import Batch
from trivium.models.transformer import Transformer
from trivium.objectives.objective import Task, validation_loss
from trivium.parts.losses import Losses, merge


def computation(
    model: Transformer,
    task: Task,
    autocast: Callable[[], AbstractContextManager[object]],
    compiled: bool,
    ragged: bool = False,
    odd: bool = True,
) -> Callable[[Batch], Losses]:
    """The losses of a batch: those of the task, and those of parts that have some.

    A model that is not in training gives the losses of validation. Batches that are `ragged` have many shapes, for
    which the compiler makes one program and not one each; those that are `odd` get one only if that is said, since
    compiling takes 20 s or more on a GPU, and one of them may come in an epoch.
    """

    def losses(inputs: dict[str, Tensor], targets: dict[str, Tensor]) -> Losses:
        states = model(**inputs)
        of_task = task.loss if model.training else validation_loss(task)
        return merge(of_task(model, states, targets), states.losses)

    function = torch.compile(losses, dynamic=True if ragged else None) if compiled else losses

    def compute(batch: Batch) -> Losses:
        with autocast():
            return (losses if batch.odd and not odd else function)(batch.inputs, batch.targets)

    return compute
