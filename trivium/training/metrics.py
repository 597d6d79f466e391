"""The numbers of a run as lines of JSON: appended while it goes, cut back to the checkpoint on resume."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import IO, Any

from trivium.files import write_atomic


class Journal:
    """A file of JSON lines, one per event; open for appending."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: IO[str] | None = None

    def write(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Append rows and hand them to the operating system."""
        if self._file is None:
            self._file = self.path.open("a", encoding="utf-8")
        for row in rows:
            self._file.write(json.dumps(row, ensure_ascii=False) + "\n")
        self._file.flush()

    def cut(self, step: int) -> None:
        """Drop what was written after `step`: the run went on from an earlier checkpoint."""
        self.close()
        kept = [row for row in rows(self.path) if row.get("step", 0) <= step]
        write_atomic(self.path, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in kept).encode())

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


def rows(path: Path) -> list[dict[str, Any]]:
    """The rows of a journal; a last line torn by a crash is left out."""
    if not path.is_file():
        return []
    found: list[dict[str, Any]] = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if isinstance(row, dict):
            found.append(row)
    return found
