"""The numbers of a run as lines of JSON: appended while it goes, cut back to the checkpoint on resume."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from io import FileIO
from pathlib import Path
from typing import Any

from trivium.errors import CheckpointError
from trivium.files import json_line, read_inside, write_atomic
from trivium.records import rows_in

_LARGEST = 1 << 30  # bytes of a journal: some six million steps


class JsonLines:
    """A file of JSON lines. What the disk refuses is kept in memory, in order, until `flush` succeeds."""

    def __init__(self, path: Path, *, damaged: bool = False) -> None:
        self.path = path
        self.damaged = damaged  # whether its reader wants to see rows that cannot be right
        self._file: FileIO | None = None
        self._left = b""  # not on the disk yet; not always whole lines, since a write may stop anywhere
        self._anew = False  # whether what is left replaces the file

    def add(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Append rows in memory."""
        self._left += _lines(rows)

    def write(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Append rows and hand them to the operating system; after an OSError they wait for the next flush."""
        self.add(rows)
        self.flush()

    def cut(self, step: int) -> None:
        """Drop what was written after `step`: the run went on from an earlier checkpoint. An OSError is as in write."""
        self._left = _lines(row for row in self.rows() if not _is_sound(row) or row.get("step", 0) <= step)
        self._anew = True
        self.close()
        self.flush()

    def flush(self) -> None:
        """Bring everything to the file, which is made again with all its content if somebody deleted it."""
        if self._anew:
            write_atomic(self.path, self._left)
            self._left, self._anew = b"", False
        if not self._left:
            return
        if self._file is not None and not _is_at(self._file, self.path):
            self._left = self._content() + self._left  # a deleted file can be read as long as it is open
            self.close()
        if self._file is None:
            # no buffer: a failed write then leaves no doubt about what is there
            self._file = FileIO(self.path, "a+", opener=_open_plain)
        while self._left:
            self._left = self._left[self._file.write(self._left) :]

    def rows(self) -> list[dict[str, Any]]:
        """All rows, also those that are not on the disk yet."""
        found = rows_in(self._left if self._anew else self._content() + self._left)
        return found if self.damaged else list(filter(_is_sound, found))

    def _content(self) -> bytes:
        if self._file is not None:
            self._file.seek(0)
            return self._file.readall()
        return _content(self.path)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


def rows(path: Path, *, damaged: bool = False) -> list[dict[str, Any]]:
    """The rows of a journal; a last line torn by a crash is left out, and so are rows that cannot be right, unless
    `damaged` asks for them.
    """
    try:
        found = rows_in(_content(path))
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}; restore it from a copy or delete it") from None
    return found if damaged else list(filter(_is_sound, found))


def _content(path: Path) -> bytes:
    """What a journal holds; nothing where there is none."""
    try:
        return read_inside(path.parent, path.name, _LARGEST)
    except FileNotFoundError:
        return b""


def _open_plain(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW, 0o666)  # a link could lead to any file of the user


def _is_sound(row: Mapping[str, Any]) -> bool:
    """Whether a row says which step it is about, where readers rely on it: somebody else may have written it."""
    step = row.get("step", None if row.get("kind") in ("train", "valid") else 0)
    return type(step) is int and 0 <= step < 2**53


def _lines(rows: Iterable[Mapping[str, Any]]) -> bytes:
    return b"".join(map(json_line, rows))


def _is_at(file: FileIO, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False
