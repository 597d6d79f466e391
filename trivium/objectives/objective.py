"""What the trainer asks of every objective."""

# B rows, T tokens, N positions with a loss, D width

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from trivium.data.batch import Batch
from trivium.data.packing import RowBatch
from trivium.errors import ConfigError
from trivium.labels import IGNORED
from trivium.models.transformer import States
from trivium.parts.losses import Losses
from trivium.parts.output import Head
from trivium.text.tokenizer import Tokenizer


class HasHeads(Protocol):
    """A model as objectives see it: its output part, and the heads that only some models have."""

    @property
    def head(self) -> Head: ...
    @property
    def sentence(self) -> nn.Module | None: ...
    @property
    def boundary(self) -> nn.Module | None: ...


class Task(Protocol):
    """A pure function from rows and a random generator to a batch, and from states to named losses.

    Every row takes the same number of draws, in the order of the rows: cutting a batch into micro-batches that share
    one generator changes nothing.
    """

    @property
    def length(self) -> int:
        """How many tokens of text a row takes."""

    def inputs(self, rows: RowBatch, rng: np.random.Generator) -> Batch: ...

    def loss(self, model: HasHeads, states: States, targets: dict[str, Tensor]) -> Losses:
        """Sums in nats by name, "tokens" first; the caller divides each by its count over the whole step."""


@runtime_checkable
class HasValidationLoss(Protocol):
    """A task that is validated by another loss than it learns from."""

    def validation_loss(self, model: HasHeads, states: States, targets: dict[str, Tensor]) -> Losses:
        """Sums in nats by the names of `loss`, as validation reports them."""


def validation_loss(task: Task) -> Callable[[HasHeads, States, dict[str, Tensor]], Losses]:
    """The losses that validation reports of a task."""
    return task.validation_loss if isinstance(task, HasValidationLoss) else task.loss


def loss_all(head: Head, states: States, targets: dict[str, Tensor]) -> Tensor:
    """The loss summed over every position [B, T] that has a label."""
    return head.loss(states.hidden.flatten(0, 1), targets["labels"].flatten())


def loss_at(head: Head, states: States, targets: dict[str, Tensor]) -> Tensor:
    """The loss summed over the positions `where` [N] of all rows laid end to end, the only ones to be projected."""
    hidden_ND = states.hidden.flatten(0, 1).index_select(0, targets["where"])
    return head.loss(hidden_ND, targets["labels"])


def count_labels(labels: Tensor) -> int:
    """How many labels are real."""
    return int((labels != IGNORED).sum())


def shift_right(
    target_BT: npt.NDArray[np.int64], lengths_B: npt.NDArray[np.int64], start: int
) -> tuple[Tensor, Tensor]:
    """A decoder's inputs and labels: `start` and all but the last target, and the first `lengths_B` targets."""
    tokens_BT = np.roll(target_BT, 1, axis=1)
    tokens_BT[:, 0] = start
    real_BT = np.arange(target_BT.shape[1]) < lengths_B[:, None]
    return torch.from_numpy(tokens_BT), torch.from_numpy(np.where(real_BT, target_BT, IGNORED))


def special(tokenizer: Tokenizer, spelling: str) -> int:
    """The id of a special token, or a ConfigError that says where it should have come from."""
    if spelling not in tokenizer.specials:
        raise ConfigError(
            f"objective: the tokenizer has no special token {spelling}; train from the text itself, which adds it, "
            "or from shards built with such a tokenizer"
        )
    return tokenizer.specials[spelling]
