"""What the trainer asks of every objective."""

# B rows, T tokens, N positions that are looked at, D width

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from trivium.data.batch import Batch
from trivium.data.packing import RowBatch
from trivium.errors import ConfigError
from trivium.labels import IGNORED
from trivium.models.transformer import States
from trivium.parts.output import Head
from trivium.text.tokenizer import Tokenizer


class Task(Protocol):
    """A pure function from rows and a random generator to a batch, and from states to a summed loss.

    Every row takes the same number of draws, in the order of the rows: cutting a batch into micro-batches that share
    one generator changes nothing.
    """

    @property
    def length(self) -> int:
        """How many tokens of text a row takes."""

    def inputs(self, rows: RowBatch, rng: np.random.Generator) -> Batch: ...

    def loss(self, head: Head, states: States, targets: dict[str, Tensor]) -> Tensor:
        """The sum of the counted tokens' losses in nats; the caller divides by the count of the whole step."""


def everywhere(head: Head, states: States, targets: dict[str, Tensor]) -> Tensor:
    """The loss summed over every position [B, T] that has a label."""
    return head.loss(states.hidden.flatten(0, 1), targets["labels"].flatten())


def gathered(head: Head, states: States, targets: dict[str, Tensor]) -> Tensor:
    """The loss summed over the positions `where` [N] of all rows laid end to end, the only ones to be projected."""
    hidden_ND = states.hidden.flatten(0, 1).index_select(0, targets["where"])
    return head.loss(hidden_ND, targets["labels"])


def counted(labels: Tensor) -> int:
    """How many labels are real."""
    return int((labels != IGNORED).sum())


def forced(target_BT: npt.NDArray[np.int64], lengths_B: npt.NDArray[np.int64], start: int) -> tuple[Tensor, Tensor]:
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
