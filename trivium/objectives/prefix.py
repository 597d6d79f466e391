"""Read the first part of a row both ways, predict the rest (spec: objectives §7)."""

# B rows, T tokens, U = T + 1

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from trivium.data.batch import Batch
from trivium.data.packing import RowBatch
from trivium.labels import IGNORED
from trivium.models.transformer import States
from trivium.objectives.objective import HasHeads, count_labels, loss_all, shift_right
from trivium.parts.losses import Loss, Losses


@dataclass(frozen=True, kw_only=True, slots=True)
class PrefixTask:
    """Rows split in two: for one stack with a mask, for two stacks with a source."""

    length: int
    pad: int
    two_sides: bool

    def inputs(self, rows: RowBatch, rng: np.random.Generator) -> Batch:
        # As in the causal objective a row has one token more than the model reads, so the split is in 1..T.
        split_B = 1 + (rng.random(len(rows.ids)) * rows.lengths).astype(np.int64)
        at_T = np.arange(rows.labels.shape[1])
        if not self.two_sides:
            labels_BT = np.where(at_T >= split_B[:, None] - 1, rows.labels, IGNORED)
            inputs = {"tokens": torch.from_numpy(rows.text), "prefix": torch.from_numpy(split_B)}
            labels = torch.from_numpy(labels_BT)
        else:
            read_BT = at_T < split_B[:, None]
            behind_BT = np.minimum(split_B[:, None] + at_T, rows.ids.shape[1] - 1)
            tokens, labels = shift_right(
                np.take_along_axis(rows.ids, behind_BT, axis=1), rows.lengths + 1 - split_B, self.pad
            )
            source_BT = np.where(read_BT, rows.text, self.pad)
            inputs = {
                "source": torch.from_numpy(source_BT),
                "source_padding": torch.from_numpy(read_BT),
                "tokens": tokens,
            }
        return Batch(inputs=inputs, targets={"labels": labels}, counts={"tokens": count_labels(labels)})

    def loss(self, model: HasHeads, states: States, targets: dict[str, Tensor]) -> Losses:
        return {"tokens": Loss(loss_all(model.head, states, targets))}
