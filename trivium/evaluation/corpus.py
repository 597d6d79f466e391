"""The files of a corpus, found in a folder and hashed as they are read."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import final

from trivium.data.pairs import Pair, read_pairs
from trivium.data.sources import Piece, Source, pieces
from trivium.errors import DataError, RequestError

_FORMS = ("", ".gz", ".xz")


@final
class Corpus:
    """The files of the corpus `name` in `folder`, or in the folder of that name inside it; plain, .gz or .xz."""

    def __init__(self, name: str, folder: Path | None) -> None:
        self.name = name
        self.folder = folder
        self.sources: dict[str, str] = {}  # every file that was read, by its sha256

    def path(self, file: str) -> Path:
        """Where a file is, or a sentence that says what is expected where."""
        if self.folder is None:
            raise RequestError(f"{self.name} needs its data; add --data-dir with the folder that holds {file}")
        for place in (self.folder / self.name, self.folder):
            for form in _FORMS:
                if (place / (file + form)).is_file():
                    return place / (file + form)
        raise DataError(
            f"{self.folder} holds no {file} (also .gz or .xz), nor does {self.folder / self.name}; "
            f"name the folder of {self.name} with --data-dir"
        )

    def runs(self, file: str) -> Iterator[Piece]:
        """The text of a file in pieces that end between words, for what reads it once."""
        return pieces([self.path(file)], separator="", field="text", read=lambda _: None, done=self._note)

    def documents(self, file: str) -> list[str]:
        """The documents of a file, which a form feed parts."""
        found: list[list[str]] = []
        for piece in self.runs(file):
            if piece.first:
                found.append([])
            found[-1].append(piece.text)
        return ["".join(parts) for parts in found]

    def pairs(self, *files: str, columns: tuple[int, int] = (0, 1)) -> list[Pair]:
        """The sentences of two files side by side, or of two columns of one."""
        return list(read_pairs(list(map(self.path, files)), columns, read=lambda _: None, done=self._note))

    def _note(self, source: Source) -> None:
        self.sources[source.path.name] = source.sha256
