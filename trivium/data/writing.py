"""One pass over text into the files of a folder of shards: ids and document starts per split, hashed on the way."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from trivium.config import dump
from trivium.data.config import DataConfig
from trivium.data.sources import Piece, Source, files, held_out, pieces
from trivium.errors import DataError
from trivium.files import remove
from trivium.text.tokenizer import Tokenizer

FORMAT = 1
Split = Literal["train", "valid"]
Ids = npt.NDArray[np.unsignedinteger[Any]]
DTYPES: dict[str, np.dtype[Any]] = {"uint16": np.dtype("<u2"), "uint32": np.dtype("<u4")}
STARTS = np.dtype("<i8")
_PIECES, _CHARACTERS = 4096, 1 << 20  # a batch for the tokenizer: many small documents, or 16 pieces of a large one
_BLOCK = 1 << 18  # ids in memory at a time


def mapped(path: Path, dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    """A file of numbers without reading it."""
    # An empty file cannot be mapped.
    return np.memmap(path, dtype, mode="r") if path.stat().st_size else np.empty(0, dtype)


class _Writer:
    """One split on its way to disk, hashed as it is written."""

    def __init__(self, folder: Path, split: Split, dtype: np.dtype[Any], end: int) -> None:
        self.paths = {name: folder / name for name in (f"{split}.bin", f"{split}.docs.bin")}
        self._files = [path.open("wb") for path in self.paths.values()]
        self._hashes = [hashlib.sha256() for _ in self.paths]
        self._pending: tuple[list[int], list[int]] = ([], [])
        self._dtypes = (dtype, STARTS)
        self._end = end
        self.tokens = self.documents = self.text_bytes = 0
        self.sources: list[int] = []

    def mark(self) -> None:
        """Note that the documents of the next source begin here."""
        self.sources.append(self.tokens)

    def begin(self) -> None:
        """Start the next document."""
        self._pending[1].append(self.tokens)
        self.documents += 1
        self.add([self._end], 0)

    def add(self, ids: Sequence[int], text_bytes: int) -> None:
        """Go on with the current document."""
        self._pending[0].extend(ids)
        self.tokens += len(ids)
        self.text_bytes += text_bytes
        if len(self._pending[0]) >= _BLOCK:
            self._flush()

    def close(self) -> None:
        """Close the stream with an END and bring it to the disk."""
        if self.documents:
            self.add([self._end], 0)
        self._flush()
        for file in self._files:
            file.flush()
            os.fsync(file.fileno())
        self.abandon()

    def abandon(self) -> None:
        for file in self._files:
            file.close()

    @property
    def text_tokens(self) -> int:
        """Tokens of a closed stream that are not END."""
        return self.tokens - self.documents - 1 if self.documents else 0

    def told(self) -> dict[str, Any]:
        counts = {"tokens": self.tokens, "documents": self.documents, "text_bytes": self.text_bytes}
        return {**counts, "sources": self.sources}

    def entries(self) -> dict[str, dict[str, Any]]:
        pairs = zip(self.paths.items(), self._hashes, strict=True)
        return {name: {"size": path.stat().st_size, "sha256": hash.hexdigest()} for (name, path), hash in pairs}

    def _flush(self) -> None:
        for pending, dtype, file, hash in zip(self._pending, self._dtypes, self._files, self._hashes, strict=True):
            data = np.array(pending, dtype).tobytes()
            file.write(data)
            hash.update(data)
            pending.clear()


class Build:
    """One pass over the text, and the manifest of what came out."""

    def __init__(
        self, config: DataConfig, tokenizer: Tokenizer, folder: Path, progress: Callable[[int, int], None]
    ) -> None:
        self.config, self.tokenizer, self.folder, self.progress = config, tokenizer, folder, progress
        self.dtype = "uint16" if tokenizer.size <= 1 << 16 else "uint32"
        self.sources: list[Source] = []
        self.fraction = 0.0 if isinstance(config.valid, str) else config.valid
        # Both are looked at before any work begins: a misspelt path must not cost an hour.
        self.train_files = [files([path]) for path in config.paths] or [files([])]
        self.valid_files = files([config.valid], key="data.valid") if isinstance(config.valid, str) else []
        self.read = 0
        self.total = sum(path.stat().st_size for group in [*self.train_files, self.valid_files] for path in group)

    def run(self, say: Callable[[str], None]) -> dict[str, Any]:
        with self._writers() as (train, valid):
            for group in self.train_files:
                train.mark()
                valid.mark()
                self._encode(group, lambda piece: valid if held_out(piece.text, self.fraction) else train)
            if self.valid_files:
                self._encode(self.valid_files, lambda _: valid)
        if self.fraction and not (train.documents and valid.documents):
            train, valid = self._cut_tail(train if train.documents else valid, say)
        kept = self.fraction > 0 or bool(self.valid_files)
        for writer, name, advice in ((train, "training", ""), (valid, "validation", ", or set data.valid to 0")):
            if writer.text_tokens < 2 and (kept or writer is train):
                few = f"{writer.text_tokens} token{'s' * (writer.text_tokens != 1)}"
                raise DataError(f"data.paths: the {name} text has only {few}; name more text{advice}")
        tokenizer = {"kind": self.tokenizer.kind, "size": self.tokenizer.size, "digest": self.tokenizer.digest}
        return {
            "format": FORMAT,
            "dtype": self.dtype,
            "tokenizer": tokenizer,
            "splits": {"train": train.told(), "valid": valid.told()},
            "files": train.entries() | valid.entries(),
            "sources": [{"path": str(s.path), "size": s.size, "sha256": s.sha256} for s in self.sources],
            "config": dump(self.config),
        }

    @contextlib.contextmanager
    def _writers(self) -> Iterator[tuple[_Writer, _Writer]]:
        train = _Writer(self.folder, "train", DTYPES[self.dtype], self.tokenizer.end)
        valid = _Writer(self.folder, "valid", DTYPES[self.dtype], self.tokenizer.end)
        try:
            yield train, valid
            train.close()
            valid.close()
        finally:
            train.abandon()
            valid.abandon()

    def _encode(self, paths: Iterable[Path], choose: Callable[[Piece], _Writer]) -> None:
        stream = pieces(
            paths,
            separator=self.config.separator,
            field=self.config.field,
            exact_cut=self.tokenizer.exact_cut,
            read=self._tick,
            done=self.sources.append,
        )
        writer: _Writer | None = None
        for batch in _batches(stream):
            for piece, ids in zip(batch, self.tokenizer.encode_many([piece.text for piece in batch]), strict=True):
                if piece.first:
                    writer = choose(piece)
                    writer.begin()
                assert writer is not None
                writer.add(ids, len(piece.text.encode()))

    def _tick(self, count: int) -> None:
        self.read += count
        self.progress(self.read, self.total)

    def _cut_tail(self, whole: _Writer, say: Callable[[str], None]) -> tuple[_Writer, _Writer]:
        """Two streams from one: the last `fraction` of the tokens becomes validation."""
        cut = whole.tokens - 1 - max(2, round(self.fraction * (whole.tokens - 1)))
        sizes = np.array([len(self.tokenizer.piece_bytes(id)) for id in range(self.tokenizer.size)])
        ids_path, starts_path = (path.rename(path.with_suffix(".old")) for path in whole.paths.values())
        starts = np.append(mapped(starts_path, STARTS), whole.tokens - 1)
        borders = list(whole.sources)
        with self._writers() as (train, valid):
            for start, stop in itertools.pairwise(starts.tolist()):
                while borders and borders[0] <= start:
                    borders.pop(0)
                    train.mark()
                    valid.mark()
                for writer, first, last in ((train, start + 1, min(cut, stop)), (valid, max(start + 1, cut), stop)):
                    if first < last:
                        writer.begin()
                        for ids in _blocks(ids_path, DTYPES[self.dtype], first, last):
                            writer.add(ids.tolist(), int(sizes[ids].sum()))
        remove(ids_path)
        remove(starts_path)
        train.text_bytes = whole.text_bytes - valid.text_bytes
        how = "its" if whole.documents == 1 else "their"
        plural = "" if whole.documents == 1 else "s"
        say(
            f"The text has {whole.documents:,} document{plural}, too few to keep whole ones for validation: "
            f"the last {self.fraction:.2%} of {how} text ({valid.text_tokens:,} tokens) is kept instead."
        )
        return train, valid


def _blocks(path: Path, dtype: np.dtype[Any], start: int, stop: int) -> Iterator[Ids]:
    """The ids from `start` to `stop`; read and not mapped, since mapped pages count as memory in use."""
    for at in range(start, stop, _BLOCK):
        yield np.fromfile(path, dtype, count=min(_BLOCK, stop - at), offset=at * dtype.itemsize)


def _batches(stream: Iterable[Piece]) -> Iterator[list[Piece]]:
    batch: list[Piece] = []
    characters = 0
    for piece in stream:
        batch.append(piece)
        characters += len(piece.text)
        if characters >= _CHARACTERS or len(batch) >= _PIECES:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch
