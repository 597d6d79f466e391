"""What every id stands for: its name, its bytes, where words begin and end; and the text of a row of ids."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Literal, NamedTuple, final

from trivium.errors import RequestError


class Joint(NamedTuple):
    """How the bytes of ids join to a text: the one space that is dropped at an edge, and what precedes a special."""

    drop: Literal["none", "first", "last"] = "none"  # a space that marks the first word's start or the last one's end
    special: bytes = b""


class Piece(NamedTuple):
    """One id: a name for showing, the bytes it stands for, and whether a word begins or ends with it."""

    name: str
    raw: bytes
    starts: bool
    ends: bool


@final
class Pieces:
    """The pieces of a vocabulary by id; ids that it does not have are refused."""

    def __init__(self, pieces: Iterable[Piece], specials: Mapping[str, int], joint: Joint) -> None:
        self._pieces = list(pieces)
        self._raw = [piece.raw for piece in self._pieces]
        self._spelled = list(self._raw)
        for spelling, id in specials.items():
            self._spelled[id] = joint.special + spelling.encode()
        self._drop = joint.drop

    def __getitem__(self, id: int) -> Piece:
        self._check((id,))
        return self._pieces[id]

    def text(self, ids: Sequence[int], *, skip_specials: bool) -> str:
        """The text of some ids; bytes that are not UTF-8 become U+FFFD."""
        self._check(ids)
        table = self._raw if skip_specials else self._spelled
        raw = b"".join([table[id] for id in ids])
        if self._drop == "first":
            raw = raw.removeprefix(b" ")
        elif self._drop == "last":
            raw = raw.removesuffix(b" ")
        return raw.decode("utf-8", "replace")

    def _check(self, ids: Sequence[int]) -> None:
        size = len(self._pieces)
        for id in (min(ids), max(ids)) if len(ids) else ():
            if not 0 <= id < size:
                raise RequestError(f"there is no id {id}: the tokenizer has {size}, from 0 to {size - 1}")
