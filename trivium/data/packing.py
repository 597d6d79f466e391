"""A stream of documents as rows of equal length: concatenate and cut."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from trivium.data.shards import Stream
from trivium.parts.output import IGNORED

# N rows, T tokens of a row, U = T + 1


class RowBatch(NamedTuple):
    """Some rows: ids [N, T+1], labels [N, T], and the number [N, T] of each token's document inside its row.

    Labels are -100 and document numbers 0 where there is nothing to predict; documents count from 1. The rows' own
    `numbers` [N] say where in the stream they are, for objectives that look beyond them.
    """

    ids: npt.NDArray[np.int64]
    labels: npt.NDArray[np.int64]
    documents: npt.NDArray[np.int32]
    numbers: npt.NDArray[np.int64]
    stream: Stream

    @property
    def text(self) -> npt.NDArray[np.int64]:
        """The tokens [N, T] that belong to these rows alone: all rows' together are the stream, each token once.

        Only the closing END, which has no text behind it, is in none of them; it is a label and nothing else.
        """
        return self.ids[:, :-1]

    @property
    def lengths(self) -> npt.NDArray[np.int64]:
        """How many tokens [N] of `text` are real; only the last row of a stream can have fewer than T."""
        lengths: npt.NDArray[np.int64] = np.sum(self.documents > 0, axis=1, dtype=np.int64)
        return lengths


class Rows:
    """Row i is `stream[i*T : i*T+T+1]`, so every token after the first is a label exactly once."""

    def __init__(self, stream: Stream, length: int) -> None:
        assert length > 0
        self.stream = stream
        self.length = length

    def __len__(self) -> int:
        return max(0, -(-(len(self.stream) - 1) // self.length))

    def take(self, indices: npt.NDArray[np.int64]) -> RowBatch:
        """The rows with these numbers; a last, shorter row is filled up with END."""
        at_NU = indices.astype(np.int64)[:, None] * self.length + np.arange(self.length + 1)
        if len(indices) and not (indices.min() >= 0 and indices.max() < len(self)):
            raise IndexError(f"rows are numbered from 0 to {len(self) - 1}")
        last = len(self.stream) - 1  # the closing END, which is also what fills a row up
        ids_NU = self.stream.ids[np.minimum(at_NU, last)].astype(np.int64)
        real_NT = at_NU[:, 1:] <= last
        number_NT = np.searchsorted(self.stream.starts, at_NU[:, :-1], side="right")
        documents_NT = np.where(real_NT, number_NT - number_NT[:, :1] + 1, 0).astype(np.int32)
        labels_NT = np.where(real_NT, ids_NU[:, 1:], IGNORED)
        return RowBatch(ids_NU, labels_NT, documents_NT, indices.astype(np.int64), self.stream)
