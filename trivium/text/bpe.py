"""Learning merges from counted words: the most frequent pair of neighbours becomes one symbol, again and again."""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from itertools import pairwise
from typing import Literal, NamedTuple

Tie = Literal["pairs", "ids"]
Pair = tuple[int, int]


class Merge(NamedTuple):
    """Two symbols that became one, and how often they stood side by side when they did."""

    left: str
    right: str
    times: int


class Learned(NamedTuple):
    """Every symbol in the order of its id, and the merges in the order of their rank."""

    symbols: list[str]
    merges: list[Merge]


class Segments:
    """Words as symbols, with the counts of symbols and of pairs of neighbours kept up to date from merge to merge."""

    def __init__(self, words: Mapping[tuple[str, ...], int], alphabet: Sequence[str]) -> None:
        self.symbols = list(alphabet)
        self.id_of = {symbol: id for id, symbol in enumerate(alphabet)}
        self.words = [[self.id_of[symbol] for symbol in word] for word in words]
        self.times = list(words.values())
        self.pairs: dict[Pair, int] = defaultdict(int)
        self.totals: list[int] = [0] * len(self.symbols)  # how often each symbol occurs
        self._where: dict[Pair, set[int]] = defaultdict(set)
        for index, word in enumerate(self.words):
            for id in word:
                self.totals[id] += self.times[index]
            for pair in pairwise(word):
                self.pairs[pair] += self.times[index]
                self._where[pair].add(index)

    def merge(self, pair: Pair, symbol: str) -> Collection[Pair]:
        """Make `pair` one symbol everywhere, left to right; the pairs whose counts changed."""
        id = self.id_of.setdefault(symbol, len(self.symbols))
        if id == len(self.symbols):
            self.symbols.append(symbol)
            self.totals.append(0)
        changes: dict[Pair, int] = defaultdict(int)
        for index in self._where.pop(pair):
            old, times = self.words[index], self.times[index]
            new = self._merged(index, pair, id, changes)
            gone = (len(old) - len(new)) * times  # 0 if an earlier merge took the pair out of this word
            self.totals[pair[0]] -= gone
            self.totals[pair[1]] -= gone
            self.totals[id] += gone
            self.words[index] = new
        changed = [neighbours for neighbours, change in changes.items() if change]
        for neighbours in changed:
            self.pairs[neighbours] += changes[neighbours]
            if not self.pairs[neighbours]:
                del self.pairs[neighbours]
        return changed

    def _merged(self, index: int, pair: Pair, id: int, changes: dict[Pair, int]) -> list[int]:
        """A word with `id` in the place of `pair`; neighbours that came or went are added to `changes`."""
        word, times = self.words[index], self.times[index]
        left, right = pair
        out: list[int] = []
        place, last = 0, len(word) - 1
        while place <= last:
            symbol = word[place]
            if symbol != left or place == last or word[place + 1] != right:
                out.append(symbol)
                place += 1
                continue
            changes[pair] -= times
            if out:
                changes[out[-1], left] -= times
                changes[out[-1], id] += times
                self._where[out[-1], id].add(index)
            place += 2
            if place <= last:
                changes[right, word[place]] -= times
                changes[id, word[place]] += times
                self._where[id, word[place]].add(index)
            out.append(id)
        return out


def learn(
    words: Mapping[tuple[str, ...], int],
    alphabet: Sequence[str],
    *,
    size: int,
    min_count: int,
    tie: Tie,
    spell: Mapping[str, str],
    reserved: Collection[str] = (),
    prefix: str = "",
) -> Learned:
    """Merge until there are `size` symbols or no pair occurs `min_count` times.

    Of equally frequent pairs the first one wins: by the spelling of left, then right ("pairs"), or by their ids
    ("ids", the rule of the `tokenizers` library). `spell` gives the letters that stand for a character in that order.
    No merge makes a symbol that is `reserved`. A symbol that continues a word begins with `prefix`, which a merge drops
    from its right half.
    """
    state = Segments(words, alphabet)
    table = str.maketrans(dict(spell))
    spelled = [symbol.translate(table) for symbol in state.symbols]

    def entry(pair: Pair) -> tuple[int, tuple[str, ...], Pair]:
        left, right = pair
        return -state.pairs[pair], (spelled[left], spelled[right]) if tie == "pairs" else (), pair

    heap = [entry(pair) for pair in state.pairs]
    heapq.heapify(heap)
    merges: list[Merge] = []
    while heap and len(state.symbols) < size:
        count, _, pair = heapq.heappop(heap)
        if state.pairs.get(pair) != -count:
            continue  # the count has changed since, and the pair was pushed again with the new one
        if -count < min_count:
            break
        left, right = (state.symbols[id] for id in pair)
        symbol = left + right.removeprefix(prefix)
        if symbol in reserved:
            continue
        changed = state.merge(pair, symbol)
        spelled += [symbol.translate(table) for symbol in state.symbols[len(spelled) :]]
        merges.append(Merge(left, right, -count))
        for other in changed:
            if other in state.pairs:
                heapq.heappush(heap, entry(other))
    return Learned(state.symbols, merges)
