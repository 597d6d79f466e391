"""Read a source, write its target: translation, summaries, anything that comes in pairs (spec: objectives §9)."""

# B pairs, S source tokens, T target tokens, V vocabulary

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from trivium.data.batch import Batch
from trivium.data.bucketing import SOURCE, TARGET
from trivium.data.packing import RowBatch
from trivium.models.transformer import States
from trivium.objectives.causal import restarting
from trivium.objectives.objective import HasHeads, count_labels, loss_all, shift_right
from trivium.parts.losses import Loss, Losses

Ids = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, slots=True)
class Seq2SeqTask:
    """Pairs side by side, each side as wide as its longest; `smoothing` is the share spread over all ids."""

    length: int
    pad: int
    smoothing: float
    align: int = 1

    def inputs(self, rows: RowBatch, rng: np.random.Generator) -> Batch:
        if any(rows.widths):
            return self._packed(rows)
        sources_B = np.count_nonzero(rows.documents == SOURCE, axis=1)
        targets_B = np.count_nonzero(rows.documents == TARGET, axis=1)
        # A row begins with the END in front of its source; the one behind the source is the source's own.
        source_BS, real_BS = self._side(rows.ids, np.ones_like(sources_B), sources_B)
        target_BT, _ = self._side(rows.ids, sources_B + 1, targets_B)
        tokens, labels = shift_right(target_BT, targets_B, self.pad)
        inputs = {
            "source": torch.from_numpy(source_BS),
            "source_padding": torch.from_numpy(real_BS),
            "tokens": tokens,
        }
        return Batch(inputs=inputs, targets={"labels": labels}, counts={"tokens": count_labels(labels)})

    def _packed(self, rows: RowBatch) -> Batch:
        """Rows of several pairs, which are documents of the same number on both sides."""
        width = rows.widths[0]
        pair_BJ = (rows.documents + 1) // 2
        real_BJ = pair_BJ > 0
        ids_BJ = np.where(real_BJ, rows.labels, self.pad)
        # No position may be left without a key: what fills up the sources is a document of its own, and behind the
        # targets the last pair goes on, where nothing counts and nothing looks back.
        source_documents = torch.from_numpy(np.where(real_BJ, pair_BJ, width + 1)[:, :width])
        documents = torch.from_numpy(np.maximum.accumulate(pair_BJ[:, width:], axis=1))
        positions = restarting(documents)
        before = torch.from_numpy(ids_BJ[:, width:]).roll(1, dims=1)
        labels = torch.from_numpy(rows.labels[:, width:])
        inputs = {
            "source": torch.from_numpy(ids_BJ[:, :width]),
            "source_documents": source_documents,
            "source_positions": restarting(source_documents),
            "tokens": torch.where(positions == 0, self.pad, before),
            "documents": documents,
            "positions": positions,
        }
        return Batch(inputs=inputs, targets={"labels": labels}, counts={"tokens": count_labels(labels)})

    def loss(self, model: HasHeads, states: States, targets: dict[str, Tensor]) -> Losses:
        """The cross-entropy with label smoothing."""
        hidden_ND = states.hidden.flatten(0, 1)
        return {"tokens": Loss(model.head.loss(hidden_ND, targets["labels"].flatten(), smoothing=self.smoothing))}

    def validation_loss(self, model: HasHeads, states: States, targets: dict[str, Tensor]) -> Losses:
        """The negative log-likelihood without smoothing, which perplexity comes from."""
        return {"tokens": Loss(loss_all(model.head, states, targets))}

    def _side(self, ids_BU: Ids, first_B: Ids, sizes_B: Ids) -> tuple[Ids, npt.NDArray[np.bool_]]:
        """`sizes_B` tokens of each row from `first_B` on, filled up with padding, and which of them are real."""
        at = np.arange(-(-int(sizes_B.max(initial=1)) // self.align) * self.align)
        real = at < sizes_B[:, None]
        found = np.take_along_axis(ids_BU, np.where(real, first_B[:, None] + at, 0), axis=1)
        return np.where(real, found, self.pad), real
