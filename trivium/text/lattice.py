"""All segmentations of words into pieces: expected counts by forward-backward, the best one by Viterbi."""

# W words; N nodes, the borders between characters of words, offset by offset; E edges, ordered by their last node;
# P pieces, the characters first; K some of the others; T offsets in a word

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from trivium.text.substrings import LONGEST, FlatWords, Ints, Substrings, ranges

Floats = NDArray[np.float64]
Ints32 = NDArray[np.int32]  # of edges, which are most of the memory


class Segmentations(NamedTuple):
    """Some strings as pieces: `pieces[i]` is a part of string number `rows[i]`."""

    rows: Ints
    pieces: Ints


class Lattice:
    """Flat words with an edge for every occurrence of a piece; the first pieces are the characters, never dropped.

    All sums run in the order of the edges on one thread, so that their last bits do not depend on a number of threads.
    """

    def __init__(self, flat: FlatWords, characters: int, substrings: Substrings) -> None:
        self.characters = characters
        words_T = np.cumsum(np.bincount(flat.lengths_W)[::-1])[::-1]  # how many words reach each offset
        self._base_T: Ints = np.concatenate([[0], np.cumsum(words_T)])
        self._last_W: Ints = self._base_T[flat.lengths_W] + np.arange(len(flat.lengths_W))
        self._counts_W: Floats = flat.counts_W.astype(np.float64)
        where_C = np.zeros(characters, np.int64)  # the characters that no word has are on no edge
        positions = np.flatnonzero(flat.codes_M)
        where_C[flat.codes_M[positions] - 1] = positions
        where_P = np.concatenate([where_C, substrings.positions[substrings.first]])
        self._word_P, self._offset_P = flat.word_M[where_P], flat.offset_M[where_P]
        self._lengths_P: Ints = np.concatenate([np.ones(characters, np.int64), substrings.lengths])
        self._set_edges(*_occurrences(flat, self._base_T, characters, substrings))

    def expected_counts(self, scores_P: Floats) -> Floats:
        """How often each piece occurs in all words, averaged over their segmentations by probability."""
        # Backward is the gradient of forward: a node shares its posterior out among its edges by their probability.
        shares_E = np.empty(len(self._piece_E))
        forward_N = np.zeros(self._base_T[-1])
        for nodes, edges, first in self._offsets():
            values = forward_N[self._start_E[edges]] + scores_P[self._piece_E[edges]]
            degrees = np.diff(first, append=len(values))
            top = np.maximum.reduceat(values, first)
            values = np.exp(values - np.repeat(top, degrees))
            total = np.add.reduceat(values, first)
            forward_N[nodes] = top + np.log(total)
            shares_E[edges] = values / np.repeat(total, degrees)
        posterior_N = np.zeros(self._base_T[-1])
        posterior_N[self._last_W] = self._counts_W
        for _, edges, _ in reversed(self._offsets()):
            shares_E[edges] *= posterior_N[self._end_E[edges]]
            np.add.at(posterior_N, self._start_E[edges], shares_E[edges])
        return sums(self._piece_E, shares_E, len(scores_P))

    def best_counts(self, scores_P: Floats) -> Floats:
        """How often each piece occurs in the most probable segmentations; of equal ones, the longer last piece wins."""
        best_N = np.zeros(self._base_T[-1])
        edge_N = np.zeros(self._base_T[-1], np.int64)
        for nodes, edges, first in self._offsets():
            values = best_N[self._start_E[edges]] + scores_P[self._piece_E[edges]]
            best_N[nodes], chosen = _maxima(values, first)
            edge_N[nodes] = chosen + edges.start
        counts_P = np.zeros(len(scores_P))
        ends, times = self._last_W, self._counts_W
        while len(ends):
            used = edge_N[ends]
            counts_P += sums(self._piece_E[used], times, len(scores_P))
            inside = self._start_E[used] >= self._base_T[1]
            ends, times = self._start_E[used][inside], times[inside]
        return counts_P

    def alternatives(self, which_K: Ints, scores_P: Floats) -> Segmentations:
        """The most probable segmentation of each of some pieces, not characters, into other pieces."""
        lengths_K, rows_K = self._lengths_P[which_K], np.arange(len(which_K))
        best_KL = np.zeros((len(which_K), LONGEST + 1))
        last_KL = np.zeros((len(which_K), LONGEST + 1), np.int64)
        for length in range(1, lengths_K.max(initial=0) + 1):
            reach = rows_K[lengths_K >= length]  # the edges that end so far into an occurrence of the piece
            pieces = which_K[reach]
            nodes = self._base_T[self._offset_P[pieces] + length] + self._word_P[pieces]
            degrees = self._edges_N[nodes + 1] - self._edges_N[nodes]
            rows, used = np.repeat(reach, degrees), self._piece_E[ranges(self._edges_N[nodes], degrees)]
            allowed = (self._lengths_P[used] <= length) & (used != which_K[rows])
            rows, used = rows[allowed], used[allowed]
            values = best_KL[rows, length - self._lengths_P[used]] + scores_P[used]
            best_KL[reach, length], chosen = _maxima(values, np.flatnonzero(np.diff(rows, prepend=-1)))
            last_KL[reach, length] = used[chosen]
        found = [Segmentations(rows_K[:0], rows_K[:0])]
        left_K = lengths_K.copy()
        while left_K.any():
            rows = np.flatnonzero(left_K)
            found.append(Segmentations(rows, last_KL[rows, left_K[rows]]))
            left_K[rows] -= self._lengths_P[found[-1].pieces]
        return Segmentations(*map(np.concatenate, zip(*found, strict=True)))

    def keep(self, kept_P: NDArray[np.bool_]) -> None:
        """Drop all other pieces; those that stay are numbered anew, in their order."""
        assert kept_P[: self.characters].all()
        number_P = np.cumsum(kept_P) - 1
        self._word_P, self._offset_P = self._word_P[kept_P], self._offset_P[kept_P]
        self._lengths_P = self._lengths_P[kept_P]
        stay_E = kept_P[self._piece_E]
        piece_E = number_P[self._piece_E[stay_E]].astype(np.int32)
        self._set_edges(self._start_E[stay_E], self._end_E[stay_E], piece_E)

    def _set_edges(self, start_E: Ints32, end_E: Ints32, piece_E: Ints32) -> None:
        self._start_E, self._end_E, self._piece_E = start_E, end_E, piece_E
        degrees_N = np.bincount(end_E, minlength=int(self._base_T[-1]))
        self._edges_N: Ints = np.concatenate([[0], np.cumsum(degrees_N)])

    def _offsets(self) -> list[tuple[slice, slice, Ints]]:
        """Of each offset but 0: its nodes, the edges that end there, and which of those is the first of each node."""
        found = []
        for low, high in zip(self._base_T[1:-1].tolist(), self._base_T[2:].tolist(), strict=True):
            first = self._edges_N[low:high]
            found.append((slice(low, high), slice(int(first[0]), int(self._edges_N[high])), first - first[0]))
        return found


def sums(groups: NDArray[np.integer], values: Floats, size: int) -> Floats:
    """The sum of the values of each of `size` groups, added in their order."""
    return np.bincount(groups, values, minlength=size).astype(np.float64, copy=False)


def _occurrences(
    flat: FlatWords, base_T: Ints, characters: int, substrings: Substrings
) -> tuple[Ints32, Ints32, Ints32]:
    """The first node, the last node and the piece of every occurrence, by last node, shorter pieces first."""
    positions = np.flatnonzero(flat.codes_M)
    starts, ends, pieces = [], [], []
    for length in range(1, LONGEST + 1):
        if length == 1:
            used = flat.codes_M[positions] - 1
        else:
            which = np.flatnonzero(substrings.lengths == length)
            positions = substrings.positions[ranges(substrings.first[which], substrings.times[which])]
            used = np.repeat(which + characters, substrings.times[which])
        words, offsets = flat.word_M[positions], flat.offset_M[positions]
        starts.append((base_T[offsets] + words).astype(np.int32))
        ends.append((base_T[offsets + length] + words).astype(np.int32))
        pieces.append(used.astype(np.int32))
    end = np.concatenate(ends)
    order = np.argsort(end, kind="stable")
    return np.concatenate(starts)[order], end[order], np.concatenate(pieces)[order]


def _maxima(values: Floats, first: Ints) -> tuple[Floats, Ints]:
    """The largest value of each group and where it is, the last of equal ones; groups start at `first`."""
    top = np.maximum.reduceat(values, first)
    group = np.repeat(np.arange(len(first)), np.diff(first, append=len(values)))
    where = np.zeros(len(first), np.int64)
    ties = np.flatnonzero(values == top[group])
    where[group[ties]] = ties  # the last assignment to an index holds
    return top, where
