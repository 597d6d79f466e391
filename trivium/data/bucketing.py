"""Pairs of sentences in batches of similar lengths, counted in padded tokens (spec: training §7)."""

# N pairs in M batches; S source tokens with END, T target tokens with END; J = S + T, the row of a pair; U = J + 1

from __future__ import annotations

import bisect
import itertools

import numpy as np
import numpy.typing as npt

from trivium.data.loader import Order, Ordering, RowNumbers
from trivium.data.packing import RowBatch
from trivium.data.shards import Stream
from trivium.errors import ConfigError, DataError
from trivium.labels import IGNORED

SOURCE, TARGET = 1, 2  # the document numbers inside the row of a pair

Sizes = npt.NDArray[np.int64]


class Pairs:
    """Row i is `END source END target END`: two neighbouring documents of the stream, as long as they are.

    A pair of which one side has more than `length` tokens is in no row; `too_long` says how many are not.
    """

    def __init__(self, stream: Stream, length: int) -> None:
        ends = np.append(stream.starts[1:], len(stream) - 1)[: len(stream.starts)]
        sizes = (ends - stream.starts).astype(np.int64)
        if len(sizes) % 2 or sizes.min(initial=2) < 2:
            raise DataError("the pairs have a side without a token; build the shards again")
        sizes_N2 = sizes.reshape(-1, 2)
        fits_N = (sizes_N2 <= length).all(axis=1)
        self.stream = stream
        self.length = length
        self.sizes: Sizes = sizes_N2[fits_N]  # [N, 2] tokens of source and target, each with one END
        self.too_long = int(len(sizes_N2) - fits_N.sum())
        self._first_N = stream.starts[::2][fits_N]

    def __len__(self) -> int:
        return len(self.sizes)

    @property
    def labels(self) -> int:
        """How many tokens there are to predict."""
        return int(self.sizes[:, 1].sum())

    def first(self, indices: RowNumbers) -> RowNumbers:
        """Where in the stream these pairs begin, with the END in front of them."""
        return self._first_N[indices]

    def take(self, indices: npt.NDArray[np.int64]) -> RowBatch:
        """The rows of these pairs, the source as document 1 and the target as 2; shorter ones are filled with END."""
        if len(indices) and not (indices.min() >= 0 and indices.max() < len(self)):
            raise IndexError(f"pairs are numbered from 0 to {len(self) - 1}")
        sizes_N2 = self.sizes[indices]
        whole_N1 = sizes_N2.sum(axis=1, keepdims=True)
        at_U = np.arange(whole_N1.max(initial=0) + 1)
        # The last token of a row is END, which is also what fills it up.
        ids_NU = self.stream.ids[self._first_N[indices, None] + np.minimum(at_U, whole_N1)].astype(np.int64)
        real_NJ = at_U[:-1] < whole_N1
        documents_NJ = np.where(at_U[:-1] < sizes_N2[:, :1], SOURCE, TARGET)
        return RowBatch(
            ids=ids_NU,
            labels=np.where(real_NJ, ids_NU[:, 1:], IGNORED),
            documents=np.where(real_NJ, documents_NJ, 0).astype(np.int32),
            numbers=indices.astype(np.int64),
            stream=self.stream,
        )


class Buckets:
    """Each epoch is all pairs in batches of similar lengths, an Ordering whose cursor counts `size` for every batch.

    A batch holds at most `tokens` padded tokens of its longer side. Which pairs of one length share a batch and the
    order of the batches depend on (seed, epoch) alone; where the batches are cut depends on the lengths alone, so
    every epoch has equally many. `align` is what lengths are rounded up to a multiple of.
    """

    def __init__(self, sizes: Sizes, tokens: int, seed: int, *, size: int = 1, align: int = 1) -> None:
        if not len(sizes):
            raise DataError("data: there is no pair to learn from; name more pairs, or raise model.context")
        self.sizes = sizes
        self.align = align
        # How far a batch moves the cursor, however many pairs it has: a run that goes back reckons with equal steps.
        self.size = size
        self._widths_N2 = -(-sizes // align) * align
        self._longest_N = self._widths_N2.max(axis=1)
        most = int(self._longest_N.max())
        if most > tokens:
            raise ConfigError(f"batch.tokens: {tokens} are less than the longest pair's {most}; set it to {most}")
        self._place_N = _places(self._widths_N2, align)
        self._bounds = balanced(np.sort(self._longest_N), tokens)
        self._pairs = Order(len(sizes), len(sizes), seed)
        self._batches = Order(len(self), 1, seed, source=1)
        # The pairs of the epoch in use, batch after batch; never a part of the state.
        self._epoch, self._arranged_N = -1, np.empty(0, np.int64)

    def __len__(self) -> int:
        """The batches of an epoch."""
        return len(self._bounds) - 1

    @property
    def padding(self) -> float:
        """The share of what goes through the model that is no text, both sides together, in the first epoch."""
        widest_M2 = np.maximum.reduceat(self._widths_N2[self._arranged(0)], self._bounds[:-1])
        return 1 - int(self.sizes.sum()) / int((widest_M2.sum(axis=1) * np.diff(self._bounds)).sum())

    def batch(self, cursor: int) -> RowNumbers:
        """The pairs of the batch at `cursor`; all positions inside a batch are its own."""
        before = cursor // self.size
        number = int(self._batches.batch(before)[0])
        return self._arranged(before // len(self))[self._bounds[number] : self._bounds[number + 1]]

    def like(self, sizes: Sizes, tokens: int) -> Buckets:
        """Batches of other pairs, always in the same order, of at most `tokens` or the longest pair."""
        longest = -(-int(sizes.max(initial=0)) // self.align) * self.align
        return Buckets(sizes, max(tokens, longest), 0, align=self.align)

    def longest(self, rows: RowNumbers) -> int:
        """How many tokens each of these pairs takes, padding too."""
        return int(self._longest_N[rows].max())

    def _arranged(self, epoch: int) -> RowNumbers:
        if epoch != self._epoch:
            shuffled_N = self._pairs.batch(epoch * len(self._place_N))
            # stable: what has the same place stays shuffled
            self._arranged_N = shuffled_N[np.argsort(self._place_N[shuffled_N], kind="stable")]
            self._epoch = epoch
        return self._arranged_N


def at_once(order: Ordering, rows: RowNumbers, micro: int) -> int:
    """How many rows of a batch go through the device at a time if it holds `micro` rows, or tokens of pairs."""
    return max(1, micro // order.longest(rows)) if isinstance(order, Buckets) else micro


def _places(widths_N2: Sizes, align: int) -> Sizes:
    """Where each pair stands: by the length of its longer side, then by which side that is, to and fro.

    Sorting by the shorter side as well would save half of what is left of the padding (3 instead of 6 % of Multi30k
    at 4,096 tokens), but then three of four pairs in a batch would meet again in every epoch, not one of three.
    """
    longest_N = widths_N2.max(axis=1)
    turned_N = longest_N // align % 2 == 1
    place_N: Sizes = 2 * longest_N + ((widths_N2[:, 0] > widths_N2[:, 1]) ^ turned_N)
    return place_N


def balanced(longest_N: Sizes, tokens: int) -> list[int]:
    """Where ascending lengths are cut: as few batches of at most `tokens` as there can be, of nearly equal size.

    Cutting as late as possible would leave a last batch of a few rows, an update as large as any other.
    """
    fewest = len(cuts(longest_N, tokens))
    least = int(longest_N[-1])
    budgets = range(least, tokens + 1)
    enough = bisect.bisect_left(budgets, True, key=lambda budget: len(cuts(longest_N, budget)) <= fewest)
    return cuts(longest_N, budgets[enough])


def cuts(longest_N: Sizes, tokens: int) -> list[int]:
    """The borders of batches that each take as many of the ascending lengths as `tokens` hold."""
    lengths = longest_N.tolist()
    borders = [0]
    while borders[-1] < len(lengths):
        start = borders[-1]
        stops = range(start + 1, len(lengths) + 1)

        def padded(stop: int, start: int = start) -> int:
            return (stop - start) * int(lengths[stop - 1])

        borders.append(start + bisect.bisect_right(stops, tokens, key=padded))
    assert all(start < stop for start, stop in itertools.pairwise(borders))
    return borders
