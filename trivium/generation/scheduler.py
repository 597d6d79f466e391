"""Which sequences are read, which are decoded and which leave, round by round: plain Python, no tensors.

A sequence waits in the order of arrival until it gets a slot. Its prompt is read in pieces, so that a long one holds
up the others by one chunk a round at most; with the last piece its first token is drawn, and from then on it takes
part in every decoding step until all of its tokens are under way or it leaves. An executor carries out the plan of a
round: slots are freed, sequences moved, pieces read, steps made, in this order.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

CHUNK = 512  # prompt tokens that are read in a round in which others decode
WHOLE = 32_768  # and in a round without decoding


class Piece(NamedTuple):
    """The tokens `start` to `stop` of a prompt, to be read into a slot; with the `last` piece a token is drawn."""

    id: int
    slot: int
    start: int
    stop: int
    last: bool


class Share(NamedTuple):
    """How many of a round's steps draw a token of this sequence."""

    id: int
    slot: int
    steps: int


class Plan(NamedTuple):
    """One round."""

    freed: list[int]  # slots whose sequences have left
    moves: list[tuple[int, int]]  # sequences that go from one slot to another, which is free
    rows: int  # the first so many slots are in use
    pieces: list[Piece]
    steps: int  # of all sequences whose prompts are read, those of this round among them
    shares: list[Share]

    @property
    def works(self) -> bool:
        """Whether the device has something to compute."""
        return bool(self.pieces or self.steps)


@dataclass(slots=True)
class _Entry:
    """A sequence as the scheduler sees it."""

    id: int
    prompt: int  # tokens to read
    left: int  # tokens that are not under way yet
    need: int  # tokens that its slot must hold
    slot: int = -1
    read: int = 0

    @property
    def is_read(self) -> bool:
        return self.read == self.prompt


class Scheduler:
    """The sequences of an engine: `submit` and `leave` at any time, `plan` for the next round.

    `fits(rows, longest)` says whether the device can hold so many sequences of so many tokens. Sequences are admitted
    in groups of `group` where there are as many. With `shrinks` the sequences are moved together when few are left, so
    that an executor computes fewer rows, but never fewer than `least`.
    """

    def __init__(
        self,
        *,
        slots: int,
        chunk: int = CHUNK,
        whole: int = WHOLE,
        burst: int = 1,
        group: int = 1,
        shrinks: bool = True,
        least: int = 1,
        fits: Callable[[int, int], bool] = lambda rows, longest: True,
    ) -> None:
        assert slots >= 1
        assert chunk >= 2
        assert whole >= chunk
        assert burst >= 1
        self.slots, self._chunk, self._whole, self._burst = slots, chunk, whole, burst
        self._group, self._shrinks, self._fits = min(group, slots), shrinks, fits
        self._waiting: deque[_Entry] = deque()
        self._live: dict[int, _Entry] = {}  # in the order of arrival
        self._free: set[int] = set(range(slots))
        self._freed: list[int] = []
        self._least = min(least, slots)
        self._rows = self._least if shrinks else slots

    @property
    def waiting(self) -> int:
        """Sequences without a slot."""
        return len(self._waiting)

    @property
    def live(self) -> int:
        """Sequences with a slot."""
        return len(self._live)

    @property
    def busy(self) -> bool:
        """Whether there is something to plan."""
        return bool(self._waiting or self._live)

    def submit(self, id: int, prompt: int, tokens: int, need: int = 0, *, first: bool = False) -> None:
        """Put a sequence in the queue: its prompt's tokens, those to draw, and how many its slot must hold.

        With `first` it comes before all others: one whose round has failed.
        """
        assert prompt >= 1
        assert tokens >= 1
        entry = _Entry(id, prompt, tokens, need or prompt + tokens)
        if first:
            self._waiting.appendleft(entry)
        else:
            self._waiting.append(entry)

    def leave(self, id: int) -> None:
        """End a sequence; its slot is free for the next round."""
        entry = self._live.pop(id, None)
        if entry is not None:
            self._release(entry)
        elif any(waiting.id == id for waiting in self._waiting):
            self._waiting = deque(waiting for waiting in self._waiting if waiting.id != id)

    def plan(self) -> Plan:
        """The next round; its tokens count as under way from now on."""
        moves = self._compact()
        self._admit()
        freed = [slot for slot in self._freed if slot in self._free]
        self._freed.clear()
        pieces = self._read()
        steps, shares = self._decode(pieces)
        rows = self._rows
        for entry in [entry for entry in self._live.values() if not entry.left]:
            del self._live[entry.id]  # its tokens are all under way, and what comes after them in its slot is later
            self._release(entry)
        return Plan(freed, moves, rows, pieces, steps, shares)

    def _release(self, entry: _Entry) -> None:
        self._free.add(entry.slot)
        self._freed.append(entry.slot)

    def _compact(self) -> list[tuple[int, int]]:
        """Halve the rows when the queue is empty and half suffice; sequences beyond them move."""
        if not self._shrinks or self._waiting:
            return []
        while self._rows >= 2 * self._least and 2 * len(self._live) <= self._rows:
            self._rows //= 2
        holes = iter(sorted(slot for slot in self._free if slot < self._rows))
        moves = []
        for entry in self._live.values():
            if entry.slot >= self._rows:
                slot = next(holes)
                if entry.read:  # else there is nothing to move yet
                    moves.append((entry.slot, slot))
                self._free.remove(slot)
                self._free.add(entry.slot)
                entry.slot = slot
        return moves

    def _admit(self) -> None:
        """Give the lowest free slots to the first of those that wait."""
        if len(self._free) < min(self._group, len(self._waiting)):
            return
        longest = max((entry.need for entry in self._live.values()), default=0)
        while self._waiting and self._free:
            entry, slot = self._waiting[0], min(self._free)
            rows = max(self._rows, _bucket(slot + 1)) if self._shrinks else self._rows
            rows, longest = min(rows, self.slots), max(longest, entry.need)
            if not self._fits(rows, longest) and self._live:
                return  # those behind it wait too: nobody overtakes
            self._rows = rows
            self._free.remove(slot)
            entry.slot = slot
            self._live[entry.id] = self._waiting.popleft()

    def _read(self) -> list[Piece]:
        """The next piece of every prompt, within the tokens of a round.

        Prompts come in the order of arrival; the first leaves half of the round to the others if they need it.
        """
        reading = [entry for entry in self._live.values() if not entry.is_read]
        left = self._chunk if len(reading) < len(self._live) else self._whole
        others = sum(entry.prompt - entry.read for entry in reading[1:])
        pieces = []
        for number, entry in enumerate(reading):
            most = max(left // 2, left - others) if number == 0 else left
            count = min(entry.prompt - entry.read, most)
            if not count:
                break
            start, entry.read = entry.read, entry.read + count
            pieces.append(Piece(entry.id, entry.slot, start, entry.read, entry.is_read))
            left -= count
        return pieces

    def _decode(self, pieces: list[Piece]) -> tuple[int, list[Share]]:
        """The steps of a round and whose tokens they draw; the first token of a prompt is drawn with its last piece."""
        for piece in pieces:
            if piece.last:
                self._live[piece.id].left -= 1
        drawing = [entry for entry in self._live.values() if entry.is_read and entry.left]
        steps = min(self._burst, max((entry.left for entry in drawing), default=0))
        shares = []
        for entry in drawing:
            count = min(entry.left, steps)
            entry.left -= count
            shares.append(Share(entry.id, entry.slot, count))
        return steps, shares


def _bucket(size: int) -> int:
    """The next power of two."""
    return 1 << (size - 1).bit_length()
