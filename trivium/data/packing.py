"""A stream of documents as rows of equal length: concatenate and cut."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from trivium.data.shards import Stream
from trivium.parts.output import IGNORED

# N rows, T context, U = T + 1


class RowBatch(NamedTuple):
    """Some rows: ids [N, T+1], labels [N, T], and the number [N, T] of each token's document inside its row.

    Labels are -100 and document numbers 0 where there is nothing to predict; documents count from 1.
    """

    ids: npt.NDArray[np.int64]
    labels: npt.NDArray[np.int64]
    documents: npt.NDArray[np.int32]


class Rows:
    """Row i is `stream[i*T : i*T+T+1]`, so every token after the first is a label exactly once."""

    def __init__(self, stream: Stream, context: int) -> None:
        assert context > 0
        self.stream = stream
        self.context = context

    def __len__(self) -> int:
        return max(0, -(-(len(self.stream) - 1) // self.context))

    def take(self, indices: npt.NDArray[np.int64]) -> RowBatch:
        """The rows with these numbers; a last, shorter row is filled up with END."""
        at_NU = indices.astype(np.int64)[:, None] * self.context + np.arange(self.context + 1)
        if len(indices) and not (indices.min() >= 0 and indices.max() < len(self)):
            raise IndexError(f"rows are numbered from 0 to {len(self) - 1}")
        last = len(self.stream) - 1  # the closing END, which is also what fills a row up
        ids_NU = self.stream.ids[np.minimum(at_NU, last)].astype(np.int64)
        real_NT = at_NU[:, 1:] <= last
        number_NT = np.searchsorted(self.stream.starts, at_NU[:, :-1], side="right")
        documents_NT = np.where(real_NT, number_NT - number_NT[:, :1] + 1, 0).astype(np.int32)
        return RowBatch(ids_NU, np.where(real_NT, ids_NU[:, 1:], IGNORED), documents_NT)
