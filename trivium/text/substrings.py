"""Counted words as one array of characters, and the substrings that occur often in it."""

# W words; M characters of all words with a separator after each; S substrings

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

LONGEST = 16  # characters of a substring, a power of two; SentencePiece's limit
Ints = NDArray[np.int64]


class FlatWords:
    """Counted words, at least one, in one array of character codes: longest first, a separator (0) after each."""

    def __init__(self, words: Mapping[str, int], alphabet: Sequence[str]) -> None:
        ordered = sorted(words, key=lambda word: (-len(word), word))
        self.counts_W: Ints = np.array([words[word] for word in ordered], np.int64)
        self.lengths_W: Ints = np.array([len(word) for word in ordered], np.int64)
        begins_W = np.cumsum(self.lengths_W + 1) - self.lengths_W - 1
        self.text = "".join(word + "\0" for word in ordered)
        self.word_M: Ints = np.repeat(np.arange(len(ordered)), self.lengths_W + 1)
        self.offset_M: Ints = np.arange(len(self.text)) - begins_W[self.word_M]
        self.codes_M: Ints = np.searchsorted(_code_points("".join(alphabet)), _code_points(self.text)) + 1
        self.codes_M[begins_W + self.lengths_W] = 0

    def left(self, positions: Ints) -> Ints:
        """How many characters a word still has at each of some positions."""
        found: Ints = self.lengths_W[self.word_M[positions]] - self.offset_M[positions]
        return found


class Substrings(NamedTuple):
    """Some substrings of flat words; `positions[first : first + times]` are the positions where one of them begins."""

    lengths: Ints
    first: Ints
    times: Ints
    counts: Ints  # how often it occurs if every word occurs as often as it was counted
    positions: Ints  # one for every character of the flat words, in the order of what follows

    def select(self, which: Ints) -> Substrings:
        """Only these of them."""
        return Substrings(self.lengths[which], self.first[which], self.times[which], self.counts[which], self.positions)

    def strings(self, text: str) -> list[str]:
        """The substrings themselves."""
        begins = self.positions[self.first].tolist()
        return [text[begin : begin + length] for begin, length in zip(begins, self.lengths.tolist(), strict=True)]


def frequent_substrings(flat: FlatWords, most: int, reserved: Collection[str]) -> Substrings:
    """The substrings of 2 to 16 characters with the highest count x length, ties by spelling; none of the `reserved`.

    As in SentencePiece, one that the same character always follows is left out: the longer one is there too.
    """
    every = _branching(flat)
    # suffixes are in the order of their spelling, so `first` breaks ties by spelling
    order = np.lexsort((every.lengths, every.first, -every.counts * every.lengths))
    best = every.select(order[: most + len(reserved)])
    allowed = np.array([text not in reserved for text in best.strings(flat.text)], bool)
    return best.select(np.flatnonzero(allowed)[:most])


def ranges(first: Ints, times: Ints) -> Ints:
    """first[0], first[0] + 1, ... (`times[0]` of them), first[1], first[1] + 1, ..."""
    every: Ints = np.repeat(first - np.cumsum(times) + times, times) + np.arange(times.sum())
    return every


def _branching(flat: FlatWords) -> Substrings:
    """Every substring that occurs twice or more and that different characters, or the end of a word, follow."""
    positions_M, lcp_M = _suffix_array(flat.codes_M)
    counts_M, left_M = flat.counts_W[flat.word_M[positions_M]], flat.left(positions_M)
    found: list[Substrings] = []
    groups = np.flatnonzero(lcp_M < 2)  # where the suffixes that begin with the same 2 characters start
    for length in range(2, LONGEST + 1):
        longer_M = lcp_M < length + 1
        counts = np.add.reduceat(counts_M, groups)
        parts = np.add.reduceat(longer_M.astype(np.int64), groups)  # by their next character
        ends = left_M[groups] == length
        wanted = np.flatnonzero((left_M[groups] >= length) & (counts >= 2) & ((parts > 1) | ends | (length == LONGEST)))
        times = np.diff(groups, append=len(positions_M))
        found.append(Substrings(np.full(len(groups), length), groups, times, counts, positions_M).select(wanted))
        groups = np.flatnonzero(longer_M)
    lengths, first, times, counts = map(np.concatenate, zip(*(each[:-1] for each in found), strict=True))
    return Substrings(lengths, first, times, counts, positions_M)


def _suffix_array(codes_M: Ints) -> tuple[Ints, Ints]:
    """The suffix array by the first 16 characters, and how many of them each suffix shares with the one before it."""
    ranks = {1: np.concatenate([codes_M, np.zeros(LONGEST, np.int64)])}
    width = 1
    while width < LONGEST:
        rank = ranks[width]
        follow = np.concatenate([rank[width:], np.zeros(width, np.int64)])
        ranks[2 * width] = np.unique(rank * (rank.max() + 1) + follow, return_inverse=True)[1]
        width *= 2
    positions_M: Ints = np.argsort(ranks[LONGEST][: len(codes_M)], kind="stable")
    one, next = positions_M[:-1], positions_M[1:]
    lcp = np.zeros(len(codes_M) - 1, np.int64)
    for width in sorted(ranks, reverse=True):
        rank = ranks[width]
        lcp += width * ((lcp < LONGEST) & (rank[one + lcp] == rank[next + lcp]))
    return positions_M, np.concatenate([[0], lcp])


def _code_points(text: str) -> NDArray[np.uint32]:
    return np.frombuffer(text.encode("utf-32-le"), np.uint32)
