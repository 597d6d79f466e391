"""Predict the next token (spec: objectives §1)."""

# B rows, T tokens, D width

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
import torch
from torch import Tensor

from trivium.data.batch import Batch
from trivium.data.packing import RowBatch
from trivium.models.transformer import States
from trivium.parts.output import IGNORED, Head


class Objective(Protocol):
    """A pure function from rows and a random generator to a batch, and from states to a summed loss."""

    def inputs(self, rows: RowBatch, rng: np.random.Generator) -> Batch: ...
    def loss(self, head: Head, states: States, labels: Tensor) -> Tensor: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Causal:
    """Logits at position t predict token t+1; every real token counts the same."""

    documents: Literal["join", "mask"] = "join"  # may attention cross a document's border inside a row?

    def inputs(self, rows: RowBatch, rng: np.random.Generator) -> Batch:
        tokens_BT = torch.from_numpy(rows.ids[:, :-1])
        labels_BT = torch.from_numpy(rows.labels)
        inputs = {"tokens": tokens_BT}
        if self.documents == "mask":
            documents_BT = torch.from_numpy(rows.documents)
            inputs |= {"documents": documents_BT, "positions": restarting(documents_BT)}
        return Batch(inputs=inputs, labels=labels_BT, count=int((rows.labels != IGNORED).sum()))

    def loss(self, head: Head, states: States, labels: Tensor) -> Tensor:
        """The sum of the counted tokens' losses in nats; the caller divides by the count of the whole step."""
        return head.nll(states.hidden.flatten(0, 1), labels.flatten()).sum()


OBJECTIVES: dict[str, type[Objective]] = {"causal": Causal}


def restarting(documents_BT: Tensor) -> Tensor:
    """Positions that begin again at 0 with every document of a row."""
    index = torch.arange(documents_BT.shape[1]).expand_as(documents_BT)
    changed = torch.ones_like(documents_BT, dtype=torch.bool)
    changed[:, 1:] = documents_BT[:, 1:] != documents_BT[:, :-1]
    return index - torch.where(changed, index, 0).cummax(dim=1).values
