"""Beam search of many texts on a GPU: rows that texts join and leave, one captured graph per step."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from trivium.fast.graphs import Arriving
from trivium.fast.hooks import fingerprint
from trivium.generation.frontier import Frontier, Rules
from trivium.generation.pool import STEPS, WORDS, Pool, Room, Wish, multiple
from trivium.generation.scorer import Scorer, require_finite

BEHIND = 2  # steps by which the host's knowledge of what is done lags
ROWS = 512  # texts at a time
_SHARE = 0.3  # of the memory that is free


class Pools:
    """The pool that a model was last searched with: its graphs are worth keeping."""

    def __init__(self) -> None:
        self._kept: tuple[Hashable, Pool] | None = None

    @property
    def size(self) -> int:
        """Bytes of the pool that is kept: free for the next search, which uses it again or lets it go."""
        return 0 if self._kept is None else self._kept[1].size

    def clear(self) -> None:
        """Let go of the pool."""
        self._kept = None

    def __deepcopy__(self, memo: dict[int, Any]) -> Pools:
        return Pools()  # a copied model has other weights, graphs do not follow

    @contextmanager
    def lent(self, scorer: Scorer, rules: Rules, same: Hashable, room: Room) -> Iterator[Pool]:
        """A pool with that much room for these rules, of which `same` is the key; nobody else has it meanwhile."""
        weights = (tensor for model in scorer.models for tensor in (*model.parameters(), *model.buffers()))
        models = tuple(map(weakref.ref, scorer.models))  # weakly: the pool is kept by the first of them
        modules = tuple(map(fingerprint, scorer.models))
        key = (same, room, models, modules, tuple((tensor.data_ptr(), tensor.dtype) for tensor in weights))
        kept, self._kept = self._kept, None
        if kept is None or kept[0] != key:
            kept = None  # before the new one is made: only one is in memory
            kept = (key, Pool(scorer, rules, room))
        yield kept[1]
        self._kept = kept  # not after an error: who knows what its rows hold


def pools_of(scorer: Scorer) -> Pools:
    """Those of the first model; they live and die with it."""
    found: Pools = scorer.models[0].__dict__.setdefault("pools", Pools())
    return found


def room_for(scorer: Scorer, wishes: Sequence[Wish], beams: int, wanted: int, rows: int = ROWS) -> Room:
    """The rows, steps and source tokens that a search of all of them needs, as far as there is memory."""
    steps = multiple(max(wish.limit for wish in wishes), STEPS, scorer.context)
    words = multiple(max(len(wish.source) for wish in wishes), WORDS, scorer.context)
    each = sum(
        (steps * beams + words) * shape.heads * (shape.key + shape.value) * model.embedding.weight.element_size()
        for model in scorer.models
        for shape in (model.decoder.cache_shapes if model.decoder is not None else ())
    )
    fits = rows
    if scorer.device.type == "cuda":
        fits = int(_free(scorer) * _SHARE / each)
    while rows > 8 and (rows > fits or rows >= 2 * len(wishes)):
        rows //= 2
    return Room(rows=rows, steps=steps, words=words, wanted=wanted)


def _free(scorer: Scorer) -> int:
    """Bytes of the device that a pool can have: what torch has set aside unused and the last pool count as free."""
    unused = torch.cuda.memory_reserved(scorer.device) - torch.cuda.memory_allocated(scorer.device)
    return torch.cuda.mem_get_info(scorer.device)[0] + unused + pools_of(scorer).size


def together(pool: Pool, wishes: Sequence[Wish]) -> Iterator[tuple[list[int], Frontier]]:
    """Search for all of them; as they are done, which ones and their rows on the host."""
    return _Shift(pool, wishes).run()


class _Shift:
    """One search of a pool: who has which row, since when."""

    def __init__(self, pool: Pool, wishes: Sequence[Wish]) -> None:
        self.pool, self.wishes = pool, wishes
        # the longest first: at the end, when rows are left empty, the short ones are soon done
        self.waiting = deque(sorted(range(len(wishes)), key=lambda text: -len(wishes[text].source)))
        self.rows = pool.room.rows  # those that are still used
        self.owner: dict[int, int] = {}  # row -> text
        self.since: dict[int, int] = {}  # row -> the step at which it joined
        self.words: dict[int, int] = {}
        self.gone: list[int] = []  # rows of texts that are done, to be fetched
        self.watch: deque[tuple[int, Arriving]] = deque()
        self.time = 0

    def run(self) -> Iterator[tuple[list[int], Frontier]]:
        pool, coming = self.pool, deque[tuple[list[int], Arriving]]()
        pool.state.done.fill_(True)
        while self.waiting or self.owner:
            self._fill()
            longest = max(self.time - since for since in self.since.values()) + 1
            pool.step(self.rows, longest, max(self.words.values()))
            self.time += 1
            self._look()
            if len(self.gone) >= pool.group or len(self.gone) == len(self.owner):
                coming.append(([self.owner[row] for row in self.gone], pool.fetch(self.gone)))
                for row in self.gone:
                    del self.owner[row], self.since[row], self.words[row]
                self.gone.clear()
                self._shrink()
            if len(coming) > 1:
                yield _arrived(*coming.popleft())
        for texts, arriving in coming:
            yield _arrived(texts, arriving)

    def _fill(self) -> None:
        """Let texts join while there are rows enough for a whole group of them."""
        free = [row for row in range(self.rows) if row not in self.owner]
        while self.waiting and len(free) >= min(self.pool.group, len(self.waiting)):
            texts = [self.waiting.popleft() for _ in range(min(self.pool.group, len(self.waiting)))]
            rows, free = free[: len(texts)], free[len(texts) :]
            words = self.pool.join(rows, [self.wishes[text] for text in texts])
            for row, text in zip(rows, texts, strict=True):
                self.owner[row], self.since[row], self.words[row] = text, self.time, words

    def _look(self) -> None:
        """Find out who is done: at the limit at once, else some steps later, so that nobody waits for the device."""
        done: set[int] = {
            row for row, text in self.owner.items() if self.time - self.since[row] >= self.wishes[text].limit
        }
        self.watch.append((self.time, Arriving([self.pool.state.done[: self.rows]])))
        if len(self.watch) > BEHIND:
            time, arriving = self.watch.popleft()
            flags = arriving.get()[0].tolist()
            done |= {row for row in self.owner if flags[row] and self.since[row] < time}
        self.gone += sorted(done.difference(self.gone))

    def _shrink(self) -> None:
        """When nobody waits any more, use half of the rows as soon as they suffice."""
        if self.waiting or not self.owner:
            return
        while self.rows >= 32 and len(self.owner) * 2 <= self.rows:
            self.rows //= 2
        if max(self.owner) < self.rows:
            return
        old = sorted(self.owner)
        self.pool.move(old)
        self.owner = {row: self.owner[was] for row, was in enumerate(old)}
        self.since = {row: self.since[was] for row, was in enumerate(old)}
        self.words = {row: self.words[was] for row, was in enumerate(old)}
        self.watch.clear()


def _arrived(texts: list[int], arriving: Arriving) -> tuple[list[int], Frontier]:
    state = Frontier(*arriving.get())
    require_finite(state.sound)
    return texts, state
