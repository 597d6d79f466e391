"""Learning WordPiece: merge the most frequent pair, or the most frequent one for the frequency of its two parts."""

# P pairs of neighbours, dead ones included

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

import numpy as np
from numpy.typing import NDArray

from trivium.text.bpe import Pair, Segments, learn

CONTINUES = "##"


def split(word: str) -> tuple[str, ...]:
    """The characters of a word as pieces: all but the first continue it."""
    return (word[0], *(CONTINUES + character for character in word[1:]))


def alphabet(words: Iterable[str]) -> list[str]:
    """The pieces of single characters that occur in some words, those that begin a word first."""
    pieces = {piece for word in words for piece in split(word)}
    return sorted(pieces, key=lambda piece: (piece.startswith(CONTINUES), piece))


def learn_by_frequency(words: Mapping[str, int], *, size: int, min_count: int, longest: int = 100) -> list[str]:
    """At most `size` pieces: characters, then merges of the most frequent pair, ties by spelling.

    A word of more than `longest` characters adds its characters and is in no pair.
    """
    parts = _split_words(words, longest)
    return learn(
        parts, alphabet(words), size=size, min_count=min_count, tie="pairs", spell={}, prefix=CONTINUES
    ).symbols


def learn_by_likelihood(words: Mapping[str, int], *, size: int, min_count: int, longest: int = 100) -> list[str]:
    """The same by count(ab) / (count(a) count(b)) in the place of count(ab)."""
    state = Segments(_split_words(words, longest), alphabet(words))
    scores = _Scores(state, min_count)
    while len(state.symbols) < size and (pair := scores.best()) is not None:
        left, right = (state.symbols[id] for id in pair)
        symbol = left + right.removeprefix(CONTINUES)
        changed = state.merge(pair, symbol)
        scores.update(changed, {*pair, state.id_of[symbol]})
    return state.symbols


def _split_words(words: Mapping[str, int], longest: int) -> dict[tuple[str, ...], int]:
    return {split(word): times for word, times in words.items() if len(word) <= longest}


class _Scores:
    """The score of every pair. A merge moves the scores of all pairs that hold one of its parts: a heap would drown."""

    def __init__(self, state: Segments, min_count: int) -> None:
        self._state = state
        self._min_count = min_count
        self._row: dict[Pair, int] = {}
        self._pairs: list[Pair] = []
        self._ids_P2: NDArray[np.int64] = np.zeros((0, 2), np.int64)
        self._counts_P: NDArray[np.float64] = np.zeros(0)
        self._scores_P: NDArray[np.float64] = np.zeros(0)
        self._totals: NDArray[np.float64] = np.zeros(0)  # of each symbol
        self.update(list(state.pairs), set(range(len(state.symbols))))

    def best(self) -> Pair | None:
        """The pair to merge next; None if all that is left is too rare."""
        known_P = self._scores_P[: len(self._pairs)]
        top = known_P.max(initial=0.0)
        if top <= 0:
            return None
        symbols = self._state.symbols
        tied = (self._pairs[row] for row in np.flatnonzero(known_P == top))
        return min(tied, key=lambda pair: (symbols[pair[0]], symbols[pair[1]]))

    def update(self, changed: Collection[Pair], touched: set[int]) -> None:
        """Count anew what a merge changed, and score every pair that holds one of the `touched` symbols."""
        for pair in changed:
            if pair not in self._row:
                self._row[pair] = len(self._pairs)
                self._pairs.append(pair)
        self._reserve()
        for pair in changed:
            row = self._row[pair]
            self._ids_P2[row], self._counts_P[row] = pair, self._state.pairs.get(pair, 0)
        for id in touched:
            self._totals[id] = self._state.totals[id]
        ids_P2 = self._ids_P2[: len(self._pairs)]
        rows = np.flatnonzero(np.isin(ids_P2, list(touched)).any(axis=1))
        counts, totals = self._counts_P[rows], self._totals[ids_P2[rows]].prod(axis=1)
        # a pair whose part has died out occurs no more: it is 0 / 1
        self._scores_P[rows] = np.where(counts >= self._min_count, counts, 0.0) / np.maximum(totals, 1.0)

    def _reserve(self) -> None:
        """Room for all pairs and symbols there are, twice as much whenever it runs out."""
        if len(self._pairs) > len(self._scores_P):
            room = 2 * len(self._pairs)
            self._ids_P2 = np.resize(self._ids_P2, (room, 2))
            self._counts_P, self._scores_P = np.resize(self._counts_P, room), np.resize(self._scores_P, room)
        if len(self._state.symbols) > len(self._totals):
            self._totals = np.resize(self._totals, 2 * len(self._state.symbols))
