"""Predict the next token (spec: objectives §1)."""

# B rows, T tokens

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from trivium.data.batch import Batch
from trivium.data.packing import RowBatch
from trivium.models.transformer import States
from trivium.objectives.objective import HasHeads, count_labels, loss_all
from trivium.objectives.options import Documents
from trivium.parts.losses import Loss, Losses


@dataclass(frozen=True, kw_only=True, slots=True)
class CausalTask:
    """Next tokens of rows as long as the context."""

    length: int
    documents: Documents = "join"

    def inputs(self, rows: RowBatch, rng: np.random.Generator) -> Batch:
        labels_BT = torch.from_numpy(rows.labels)
        inputs = {"tokens": torch.from_numpy(rows.ids[:, :-1])}
        if self.documents == "mask":
            documents_BT = torch.from_numpy(rows.documents)
            inputs |= {"documents": documents_BT, "positions": restarting(documents_BT)}
        return Batch(inputs=inputs, targets={"labels": labels_BT}, counts={"tokens": count_labels(labels_BT)})

    def loss(self, model: HasHeads, states: States, targets: dict[str, Tensor]) -> Losses:
        return {"tokens": Loss(loss_all(model.head, states, targets))}


def restarting(documents_BT: Tensor) -> Tensor:
    """Positions that begin again at 0 with every document of a row."""
    index = torch.arange(documents_BT.shape[1]).expand_as(documents_BT)
    changed = torch.ones_like(documents_BT, dtype=torch.bool)
    changed[:, 1:] = documents_BT[:, 1:] != documents_BT[:, :-1]
    return index - torch.where(changed, index, 0).cummax(dim=1).values
