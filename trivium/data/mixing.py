"""Several sources mixed by weight: every stretch of training sees them in their shares, each in its own epochs."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from trivium.data.config import DataConfig
from trivium.data.loader import Order, Ordering, RowNumbers
from trivium.data.packing import Rows
from trivium.data.shards import Stream
from trivium.errors import ConfigError, DataError

PERIOD = 10_000  # weights are taken to a hundredth of a percent, so that the pattern of sources repeats after so many


def training_rows(stream: Stream, length: int, config: DataConfig) -> Rows:
    """The rows that a run learns from; sources that are mixed are moved each in its own epochs, so each has its own."""
    if config.shift == "none":
        return Rows(stream, length)
    return Rows(stream, length, shifts=length, rings=stream.sources if config.weights else (0,))


def ordering(rows: Rows, weights: Sequence[float], batch: int, seed: int) -> Ordering:
    """The order of a text: all of it in one epoch after the other, or its sources mixed by `weights`."""
    if not weights:
        return Order(len(rows), batch, seed, shifts=rows.shifts, apart=len(rows))
    sources = rows.stream.sources
    if len(sources) != len(weights):
        raise ConfigError(f"data.weights: {len(weights)} weights for {len(sources)} sources; give one for each")
    # a row belongs to the source in which it begins
    return Mixture([*map(rows.first, sources), len(rows)], weights, batch, seed, shifts=rows.shifts)


class Mixture:
    """The rows of every global batch: which source comes at a position is fixed, which of its rows follows its Order.

    Source k holds the rows from `bounds[k]` up to `bounds[k + 1]`. After any number of rows each source has had its
    share of them within one row. `shifts` are those of an Order.
    """

    def __init__(
        self, bounds: Sequence[int], weights: Sequence[float], batch: int, seed: int, *, shifts: int = 1
    ) -> None:
        sizes = [stop - start for start, stop in itertools.pairwise(bounds)]
        assert len(sizes) == len(weights)
        short = [number for number, size in enumerate(sizes, 1) if size < 1]
        if short:
            raise DataError(f"data.paths: the text of path {short[0]} is too short for a single row; name more text")
        self.size = batch
        self._first = bounds[:-1]
        self._orders = [
            Order(rows, batch, seed, source, shifts=shifts, apart=bounds[-1]) for source, rows in enumerate(sizes)
        ]
        self._pattern = pattern(quotas(weights))
        sources = np.arange(len(sizes))
        # before[i, k]: rows of source k among the first i of a period
        before = np.cumsum(self._pattern[:, None] == sources, axis=0, dtype=np.int64)
        self._before = np.concatenate([np.zeros((1, len(sizes)), np.int64), before])

    def batch(self, cursor: int) -> RowNumbers:
        """The row numbers from global position `cursor` (rows consumed so far) on."""
        chosen = self._pattern[np.arange(cursor, cursor + self.size) % PERIOD]
        rows = np.empty(self.size, np.int64)
        for source, order in enumerate(self._orders):
            places = chosen == source
            rows[places] = self._first[source] + order.span(self.drawn(cursor, source), int(places.sum()))
        return rows

    def drawn(self, cursor: int, source: int) -> int:
        """How many of the first `cursor` rows come from a source."""
        periods, rest = divmod(cursor, PERIOD)
        return periods * int(self._before[-1, source]) + int(self._before[rest, source])


def quotas(weights: Sequence[float]) -> list[int]:
    """The rows of each source in a period: their shares, rounded so that they fill it (largest remainders)."""
    exact = [weight / sum(weights) * PERIOD for weight in weights]
    rows = [int(share) for share in exact]
    largest = sorted(range(len(rows)), key=lambda source: (rows[source] - exact[source], source))
    for source in largest[: PERIOD - sum(rows)]:
        rows[source] += 1
    if 0 in rows:
        raise ConfigError(f"data.weights: weight {rows.index(0) + 1} is below 0.01 % of all; leave the path out")
    return rows


def pattern(rows: Sequence[int]) -> npt.NDArray[np.int64]:
    """The source of each position of a period in which source k has `rows[k]`.

    Tijdeman's chairman assignment (1980): among the sources that may come now, the one whose next turn is due first.
    No prefix is ever a whole row away from the shares; taking the largest debt instead would not promise that.
    """
    slack = max(1, 2 * len(rows) - 2)
    drawn = [0] * len(rows)
    result = np.empty(PERIOD, np.int64)
    for position in range(1, PERIOD + 1):
        # debts in units of 1 / (PERIOD * slack) row, all whole numbers
        debts = [(due * position - had * PERIOD) * slack for due, had in zip(rows, drawn, strict=True)]
        waits = [
            (((slack - 1) * PERIOD - debt) / due, source)
            for source, (debt, due) in enumerate(zip(debts, rows, strict=True))
            if debt >= PERIOD
        ]
        _, source = min(waits)
        drawn[source] += 1
        result[position - 1] = source
    return result
