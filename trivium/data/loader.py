"""Which rows each step sees: a function of seed and position only, whatever the number of ranks."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt

from trivium.errors import ConfigError, DataError

RowNumbers = npt.NDArray[np.int64]


class Ordering(Protocol):
    """The rows of every global batch, as a function of the rows consumed before it."""

    @property
    def size(self) -> int:
        """Rows of a batch."""

    def batch(self, cursor: int) -> RowNumbers:
        """The row numbers from global position `cursor` (rows consumed so far) on."""


class Order:
    """Each epoch is a fresh permutation that depends on (seed, source, epoch) alone.

    So does one of `shifts` numbers, 0 in the first epoch, that says how many times `apart` its row numbers are moved.
    """

    def __init__(self, rows: int, batch: int, seed: int, source: int = 0, *, shifts: int = 1, apart: int = 0) -> None:
        assert batch > 0
        if rows < 1:
            raise DataError("data.paths: the text is too short for a single row; name more text")
        self.rows, self.size, self.seed, self.source = rows, batch, seed, source
        self.shifts, self.apart = shifts, apart
        # The permutation in use, kept because drawing one takes seconds for 10**8 rows; never a part of the state.
        self._epoch, self._permutation = -1, np.empty(0, np.int64)

    def batch(self, cursor: int) -> RowNumbers:
        """The row numbers from global position `cursor` (rows consumed so far) on, across the ends of epochs."""
        return self.span(cursor, self.size)

    def span(self, start: int, count: int) -> RowNumbers:
        """`count` row numbers from position `start` on."""
        parts: list[RowNumbers] = [np.empty(0, np.int64)]
        position, stop = start, start + count
        while position < stop:
            epoch, at = divmod(position, self.rows)
            parts.append(self._order(epoch)[at : at + stop - position])
            position += len(parts[-1])
        return np.concatenate(parts)

    def epoch(self, cursor: int) -> float:
        """How often the text has been seen after `cursor` rows."""
        return cursor / self.rows

    def _order(self, epoch: int) -> RowNumbers:
        if epoch != self._epoch:
            key = np.array([self.seed % 2**64, epoch], np.uint64)
            # the last word of the counter is never reached by counting: a stream of its own for each source
            counter = np.array([0, 0, 0, self.source], np.uint64)
            generator = np.random.Generator(np.random.Philox(key=key, counter=counter))
            rows = generator.permutation(self.rows)
            shift = int(generator.integers(self.shifts)) if epoch else 0
            rows += shift * self.apart
            self._epoch, self._permutation = epoch, rows
        return self._permutation


def share(rows: RowNumbers, *, rank: int, world: int, micro: int) -> list[RowNumbers]:
    """This rank's micro-batches of at most `micro` rows; all ranks have equally many and together all `rows` in order.

    A batch that cannot be shared so is refused with a ConfigError.
    """
    parts = np.array_split(rows, world)  # the first are the longer ones, by one row at most
    steps = -(-len(parts[0]) // micro)
    if len(parts[-1]) < max(1, steps):
        raise ConfigError(f"batch: {len(rows)} rows do not spread over {world} ranks; try a multiple of {world}")
    return np.array_split(parts[rank], steps)
