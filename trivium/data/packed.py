"""Several pairs in each row, so that all batches have one shape and hardly any padding."""

# N pairs of C kinds of sizes in M rows; K pairs of some rows; J the tokens of a row, sources and targets

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from trivium.data.bucketing import Pairs, Sizes
from trivium.data.loader import RowNumbers
from trivium.data.packing import RowBatch, Rows
from trivium.errors import ConfigError, DataError
from trivium.labels import IGNORED

ARRANGEMENTS = 2**31  # of the pairs in the rows; each epoch draws one
_ALIGN = 8  # what the width of a side is rounded up to, if neither the longest text nor data.pack decides


class PackedPairs:
    """Row i is some pairs one after another, at most `widths` tokens of both sides together.

    How many pairs of which sizes a row has depends on all sizes alone, so every epoch has as many rows. Which pairs of
    those sizes they are depends on (seed, arrangement): number `arrangement * len(rows) + i` is row i of one of them.
    Each arrangement has every pair once.
    """

    def __init__(self, pairs: Pairs, width: int, seed: int) -> None:
        if not len(pairs):
            raise DataError("data: there is no pair to learn from; name more pairs, or raise model.context")
        if width > pairs.length:
            raise ConfigError(f"data.pack: {width} is more than a row may have; set it to {pairs.length} or less")
        longest = int(pairs.sizes.max())
        if longest > width:
            raise ConfigError(f"data.pack: {width} is less than the longest pair's {longest}; set it to {longest}")
        self.pairs = pairs
        self.seed = seed
        self.stream, self.length, self.labels, self.too_long = pairs.stream, width, pairs.labels, pairs.too_long
        self.shifts = ARRANGEMENTS
        self.widths = _widths(pairs.sizes, width)
        kinds_C2, self._kind_N, counts_C = np.unique(pairs.sizes, axis=0, return_inverse=True, return_counts=True)
        rows = filled(kinds_C2, counts_C, self.widths)
        self._bounds_M = np.append(0, np.cumsum([len(row) for row in rows]))
        # the pairs in the order of their kinds fill the places of all rows in this order
        self._place_N = np.argsort(np.argsort(np.concatenate(rows), kind="stable"), kind="stable")
        self._arranged: dict[int, RowNumbers] = {}  # those in use; never a part of the state

    def __len__(self) -> int:
        return len(self._bounds_M) - 1

    @property
    def padding(self) -> float:
        """The share of the rows that is no text, both sides together."""
        return 1 - int(self.pairs.sizes.sum()) / (len(self) * sum(self.widths))

    def take(self, indices: npt.NDArray[np.int64]) -> RowBatch:
        """The rows with these numbers: all sources, then all targets, of which the k-th are documents 2k - 1 and 2k.

        Each side is filled up with END to its width.
        """
        if len(indices) and not (indices.min() >= 0 and indices.max() < len(self) * self.shifts):
            raise IndexError(f"rows are numbered from 0 to {len(self) * self.shifts - 1}")
        chosen = [self._row(*divmod(int(index), len(self))) for index in indices]
        many = np.array([len(pairs) for pairs in chosen], np.int64)
        pairs_K = np.concatenate([np.empty(0, np.int64), *chosen])
        row_K, nth_K = np.repeat(np.arange(len(many)), many), _within(many)
        labels_MJ = np.full((len(many), sum(self.widths)), IGNORED, np.int64)
        documents_MJ = np.zeros(labels_MJ.shape, np.int32)
        first_K = self.pairs.first(pairs_K) + 1  # behind the END in front of the pair
        for side, begin in enumerate((0, self.widths[0])):
            size_K = self.pairs.sizes[pairs_K, side]
            before_K = np.cumsum(size_K) - size_K
            at_K = begin + before_K - np.repeat(before_K[np.cumsum(many) - many], many)
            # every token of this side of every pair: which pair, and where in it
            pair, token = np.repeat(np.arange(len(pairs_K)), size_K), _within(size_K)
            place = row_K[pair], at_K[pair] + token
            labels_MJ[place] = self.stream.ids[first_K[pair] + token]
            documents_MJ[place] = 2 * nth_K[pair] + side + 1
            first_K = first_K + size_K
        end = int(self.stream.ids[-1])
        ids_MJ = np.where(documents_MJ > 0, labels_MJ, end)
        return RowBatch(
            ids=np.concatenate((np.full((len(many), 1), end), ids_MJ), axis=1),
            labels=labels_MJ,
            documents=documents_MJ,
            numbers=indices.astype(np.int64),
            stream=self.stream,
            widths=self.widths,
        )

    def _row(self, arrangement: int, row: int) -> RowNumbers:
        if arrangement not in self._arranged:
            for old in [*self._arranged][:-1]:  # a batch may lie across the end of an epoch
                del self._arranged[old]
            key = np.array([self.seed % 2**64, arrangement], np.uint64)
            # a stream of its own, apart from those of Order
            counter = np.array([0, 0, 0, 2**32], np.uint64)
            shuffled_N = np.random.Generator(np.random.Philox(key=key, counter=counter)).permutation(len(self.pairs))
            by_kind_N = shuffled_N[np.argsort(self._kind_N[shuffled_N], kind="stable")]
            self._arranged[arrangement] = by_kind_N[self._place_N]
        return self._arranged[arrangement][self._bounds_M[row] : self._bounds_M[row + 1]]


Examples = Rows | Pairs | PackedPairs


def filled(kinds_C2: Sizes, counts_C: Sizes, widths: tuple[int, int]) -> list[npt.NDArray[np.int64]]:
    """The kinds of the pairs in every row.

    A row begins with the longest pair that is left and takes, one after another, the pair that fills best what is
    free (the dot product of Panigrahy et al., 2011); the same row is made as often as there are pairs for it.
    """
    # longest first: a row's first pair is then the first that is left
    order_C = np.argsort(-(kinds_C2 / widths).max(axis=1), kind="stable")
    sizes_C2, left_C = kinds_C2[order_C], counts_C[order_C].astype(np.int64)
    rows: list[npt.NDArray[np.int64]] = []
    while left_C.any():
        chosen = _fill(sizes_C2, left_C, np.array(widths))
        many_C = np.bincount(chosen, minlength=len(left_C))
        times = int((left_C[chosen] // many_C[chosen]).min())
        left_C -= times * many_C
        rows += [order_C[chosen]] * times
        if not left_C[0]:
            sizes_C2, left_C, order_C = (of[np.argmax(left_C > 0) :] for of in (sizes_C2, left_C, order_C))
    return rows


def _fill(sizes_C2: Sizes, left_C: Sizes, widths: Sizes) -> npt.NDArray[np.int64]:
    """One row of the kinds that are left, the first of them first."""
    live = np.flatnonzero(left_C)
    sizes, left = sizes_C2[live], left_C[live]
    free, best, chosen = widths, 0, list[int]()
    while True:
        chosen.append(best)
        left[best] -= 1
        free = free - sizes[best]
        fits = (sizes <= free).all(axis=1) & (left > 0)
        if not fits.any():
            return live[chosen]
        best = int(np.where(fits, sizes @ (free / widths**2), -1).argmax())


def _widths(sizes: Sizes, width: int) -> tuple[int, int]:
    """The longer side gets `width`, the other one what it needs beside it."""
    totals, longest = sizes.sum(axis=0), sizes.max(axis=0)
    needed = -(-(totals * width) // (totals.max() * _ALIGN)) * _ALIGN
    source, target = np.clip(needed, longest, width).tolist()
    return source, target


def _within(counts: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """0, 1, … up to each of the counts, one after another."""
    return np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
