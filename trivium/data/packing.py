"""A stream of documents as rows of equal length: concatenate and cut."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from trivium.data.shards import Stream
from trivium.labels import IGNORED

# N rows, T tokens of a row, K rings


class RowBatch(NamedTuple):
    """Some rows: ids [N, T+1], labels [N, T], and the number [N, T] of each token's document inside its row.

    Labels are -100 and document numbers 0 where there is nothing to predict; documents count from 1. The rows' own
    `numbers` [N] say where in the stream they are, for objectives that look beyond them: i is the row that begins at
    token i*T, and ~i one that begins at token i.
    """

    ids: npt.NDArray[np.int64]
    labels: npt.NDArray[np.int64]
    documents: npt.NDArray[np.int32]
    numbers: npt.NDArray[np.int64]
    stream: Stream
    widths: tuple[int, int] = (0, 0)  # of the sources and of the targets in rows of packed pairs

    @property
    def text(self) -> npt.NDArray[np.int64]:
        """The tokens [N, T] that belong to these rows alone: all rows' together are the stream, each token once.

        Only the closing END, which has no text behind it, is in none of them; it is a label and nothing else.
        """
        return self.ids[:, :-1]

    @property
    def begins(self) -> npt.NDArray[np.int64]:
        """Where [N] in the stream each row begins; one that reaches past the end goes on at the beginning."""
        return np.where(self.numbers < 0, ~self.numbers, self.numbers * self.labels.shape[1])

    @property
    def lengths(self) -> npt.NDArray[np.int64]:
        """How many tokens [N] of `text` are real; only the last row of a stream can have fewer than T."""
        lengths: npt.NDArray[np.int64] = np.sum(self.documents > 0, axis=1, dtype=np.int64)
        return lengths


class Rows:
    """Row i is `stream[i*T : i*T+T+1]`, so every token after the first is a label exactly once.

    With T `shifts`, number `shift * len(rows) + i` is row i of the same stream whose rows all begin `shift` tokens
    later: what lies before the first of them follows behind the last token, as if the stream were a ring. It is one,
    since it ends with the END that it begins with. So every shift has as many rows, and every token is a label once.
    `rings` says where stretches of whole documents begin that are rings of their own, cut from their first token on.
    """

    def __init__(self, stream: Stream, length: int, *, shifts: int = 1, rings: Sequence[int] = (0,)) -> None:
        assert length > 0
        self.stream = stream
        self.length = length
        self.shifts = shifts
        self._begin_K = np.array(rings, np.int64)
        ends_K = np.append(self._begin_K[1:], max(0, len(stream) - 1))
        self._size_K = ends_K - self._begin_K
        self._first_K = np.append(0, np.cumsum(-(-self._size_K // length)))
        documents_K = np.searchsorted(stream.starts, [self._begin_K, ends_K])
        self._documents_K = documents_K[1] - documents_K[0]

    def __len__(self) -> int:
        return int(self._first_K[-1])

    def first(self, place: int) -> int:
        """The first row that begins at this place of the stream or later in its ring."""
        ring = int(np.searchsorted(self._begin_K, place, side="right")) - 1
        return int(self._first_K[ring] - (self._begin_K[ring] - place) // self.length)

    def take(self, indices: npt.NDArray[np.int64]) -> RowBatch:
        """The rows with these numbers; a last, shorter row is filled up with END."""
        count = len(self) * self.shifts
        if len(indices) and not (indices.min() >= 0 and indices.max() < count):
            raise IndexError(f"rows are numbered from 0 to {count - 1}")
        shift_N, row_N = np.divmod(indices.astype(np.int64), max(1, len(self)))
        ring_N = np.searchsorted(self._first_K, row_N, side="right") - 1
        begin_N1, size_N1, many_N1 = (of[ring_N, None] for of in (self._begin_K, self._size_K, self._documents_K))
        # How far each token is from the first one of the epoch, and from the beginning of the ring.
        since_NT = (row_N - self._first_K[ring_N])[:, None] * self.length + np.arange(self.length)
        place_NT = since_NT + shift_N[:, None] % size_N1
        again_NT = place_NT >= size_N1
        at_NT = begin_N1 + place_NT - again_NT * size_N1
        real_NT = since_NT < size_N1
        last = len(self.stream) - 1  # the closing END, which is also what fills a row up
        next_NT = self.stream.ids[np.where(real_NT, at_NT + 1, last)].astype(np.int64)
        number_NT = np.searchsorted(self.stream.starts, at_NT, side="right") + again_NT * many_N1
        begins_N = at_NT[:, 0]
        return RowBatch(
            ids=np.concatenate((self.stream.ids[begins_N, None].astype(np.int64), next_NT), axis=1),
            labels=np.where(real_NT, next_NT, IGNORED),
            documents=np.where(real_NT, number_NT - number_NT[:, :1] + 1, 0).astype(np.int32),
            numbers=np.where(begins_N % self.length, ~begins_N, begins_N // self.length),
            stream=self.stream,
        )
