"""One pass over text into the files of a folder of shards: ids and document starts per split, hashed on the way."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from trivium.config import dump
from trivium.data.config import DataConfig
from trivium.data.sources import Piece, Source, cut_for, encoded, files, held_out, pieces
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
_NAMED = 4  # paths in a sentence


def mapped(path: Path, dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    """A file of numbers without reading it."""
    # An empty file cannot be mapped.
    return np.memmap(path, dtype, mode="r") if path.stat().st_size else np.empty(0, dtype)


class Stretch(NamedTuple):
    """The documents of one source in one split: where each begins and the last one ends, and the text's bytes."""

    edges: npt.NDArray[np.int64]
    text_bytes: int

    @property
    def documents(self) -> int:
        return len(self.edges) - 1


class Writer:
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
        self._bytes: list[int] = []  # of the text before each source

    def mark(self) -> None:
        """Note that the documents of the next source begin here."""
        self.sources.append(self.tokens)
        self._bytes.append(self.text_bytes)

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

    def stretches(self) -> list[Stretch]:
        """What a closed stream holds of each source."""
        last = max(0, self.tokens - 1)  # the END that closes the stream
        edges = np.append(mapped(list(self.paths.values())[1], STARTS), last)
        places = itertools.pairwise([*self.sources, last])
        counts = itertools.pairwise([*self._bytes, self.text_bytes])
        found = []
        for (first, stop), (before, after) in zip(places, counts, strict=True):
            inside = slice(np.searchsorted(edges, first), np.searchsorted(edges, stop, side="right"))
            found.append(Stretch(edges[inside], after - before))
        return found

    def set_aside(self) -> Path:
        """Make room for another stream of this name; where the ids of this one are now."""
        ids, starts = self.paths.values()
        remove(starts)
        return ids.rename(ids.with_suffix(".old"))

    def _flush(self) -> None:
        for pending, dtype, file, hash in zip(self._pending, self._dtypes, self._files, self._hashes, strict=True):
            data = np.array(pending, dtype).tobytes()
            file.write(data)
            hash.update(data)
            pending.clear()


@contextlib.contextmanager
def writers(folder: Path, tokenizer: Tokenizer) -> Iterator[tuple[Writer, Writer]]:
    """The training and the validation split, which are on the disk when the context ends well."""
    train = Writer(folder, "train", DTYPES[width(tokenizer)], tokenizer.end)
    valid = Writer(folder, "valid", DTYPES[width(tokenizer)], tokenizer.end)
    try:
        yield train, valid
        train.close()
        valid.close()
    finally:
        train.abandon()
        valid.abandon()


def width(tokenizer: Tokenizer) -> str:
    """The smallest of DTYPES that holds every id."""
    return "uint16" if tokenizer.size <= 1 << 16 else "uint32"


def manifest(
    config: DataConfig, tokenizer: Tokenizer, sources: Iterable[Source], train: Writer, valid: Writer
) -> dict[str, Any]:
    """What is told of two closed splits and where they come from."""
    return {
        "format": FORMAT,
        "dtype": width(tokenizer),
        "tokenizer": {"kind": tokenizer.kind, "size": tokenizer.size, "digest": tokenizer.digest},
        "splits": {"train": train.told(), "valid": valid.told()},
        "files": train.entries() | valid.entries(),
        "sources": [{"path": str(s.path), "size": s.size, "sha256": s.sha256} for s in sources],
        "config": dump(config),
    }


class Build:
    """One pass over the text, and the manifest of what came out."""

    def __init__(
        self, config: DataConfig, tokenizer: Tokenizer, folder: Path, progress: Callable[[int, int], None]
    ) -> None:
        self.config, self.tokenizer, self.folder, self.progress = config, tokenizer, folder, progress
        self.sources: list[Source] = []
        self.fraction = config.valid_share
        # Both are looked at before any work begins: a misspelt path must not cost an hour.
        self.train_files = [files([path]) for path in config.paths] or [files([])]
        self.valid_files = files([config.valid_path], key="data.valid") if config.valid_path else []
        self.read = 0
        self.total = sum(path.stat().st_size for group in [*self.train_files, self.valid_files] for path in group)

    def run(self, say: Callable[[str], None]) -> dict[str, Any]:
        with writers(self.folder, self.tokenizer) as (train, valid):
            for group in self.train_files:
                train.mark()
                valid.mark()
                self._encode(group, lambda piece: valid if held_out(piece.text, self.fraction) else train)
            if self.valid_files:
                self._encode(self.valid_files, lambda _: valid)
        if self.fraction:
            train, valid = self._with_tails(train, valid, say)
        kept = self.fraction > 0 or bool(self.valid_files)
        for writer, name, advice in ((train, "training", ""), (valid, "validation", ", or set data.valid to 0")):
            if writer.text_tokens < 2 and (kept or writer is train):
                few = f"{writer.text_tokens} token{'s' * (writer.text_tokens != 1)}"
                raise DataError(f"data.paths: the {name} text has only {few}; name more text{advice}")
        return manifest(self.config, self.tokenizer, self.sources, train, valid)

    def _encode(self, paths: Iterable[Path], choose: Callable[[Piece], Writer]) -> None:
        cut = cut_for(self.tokenizer)
        stream = pieces(
            paths,
            separator=self.config.separator,
            field=self.config.field,
            cut=cut,
            read=self._tick,
            done=self.sources.append,
        )
        writer: Writer | None = None
        for batch in _batches(stream):
            for piece, ids in zip(batch, encoded(self.tokenizer, batch, cut), strict=True):
                if piece.first:
                    writer = choose(piece)
                    writer.begin()
                assert writer is not None
                writer.add(ids, len(piece.text.encode()))

    def _tick(self, count: int) -> None:
        self.read += count
        self.progress(self.read, self.total)

    def _with_tails(self, train: Writer, valid: Writer, say: Callable[[str], None]) -> tuple[Writer, Writer]:
        """Both splits, each source that has documents in only one of them cut in two.

        Unless it is one of many: without weights a source is left whole that is less than what is kept of the text.
        """
        sources = list(zip(train.stretches(), valid.stretches(), strict=True))
        many = not self.config.weights and train.documents and valid.documents
        least = self.fraction * (train.tokens + valid.tokens) if many else 0
        tails = _tails([size if size > least else 0 for size in map(_lone, sources)], self.fraction)
        cut = [number for number, tail in enumerate(tails) if tail is not None]
        if not cut:
            return train, valid
        paths, held = [train.set_aside(), valid.set_aside()], 0
        with writers(self.folder, self.tokenizer) as new:
            for pair, tail in zip(sources, tails, strict=True):
                for writer in new:
                    writer.mark()
                borders = (pair[0].edges[-1], pair[1].edges[0])  # training and validation stay what they were
                for path, stretch, border in zip(paths, pair, borders, strict=True):
                    tokens = self._copy(path, stretch, border if tail is None else stretch.edges[-1] - tail, new)
                    held += 0 if tail is None else tokens
        for path in paths:
            remove(path)
        say(self._told(cut, train.documents + valid.documents, held))
        return new

    def _copy(self, path: Path, stretch: Stretch, cut: int, new: tuple[Writer, Writer]) -> int:
        """Write what lies before `cut` as training and the rest as validation; how many tokens of text that has."""
        train, valid = new
        tokens = text_bytes = 0
        for start, stop in itertools.pairwise(stretch.edges.tolist()):
            for writer, first, last in ((train, start + 1, min(cut, stop)), (valid, max(start + 1, cut), stop)):
                if first >= last:
                    continue
                writer.begin()
                for ids in _blocks(path, DTYPES[width(self.tokenizer)], first, last):
                    writer.add(ids.tolist(), 0)
                    if writer is valid:
                        tokens += len(ids)
                        text_bytes += int(self._sizes[ids].sum())
        # The bytes of a whole stretch are known; inside of one the pieces must do, which some kinds spell longer.
        text_bytes = stretch.text_bytes if cut <= stretch.edges[0] else min(text_bytes, stretch.text_bytes)
        valid.text_bytes += text_bytes
        train.text_bytes += stretch.text_bytes - text_bytes
        return tokens

    @cached_property
    def _sizes(self) -> npt.NDArray[np.int64]:
        """The bytes of every id."""
        return np.array([len(self.tokenizer.piece_bytes(id)) for id in range(self.tokenizer.size)], np.int64)

    def _told(self, lone: Sequence[int], documents: int, held: int) -> str:
        """The sentence about the sources that were cut in two."""
        share = f"the last {self.fraction:.2%} of"
        if len(self.train_files) == 1:
            many = f"{documents:,} document{'s' * (documents != 1)}"
            return (
                f"The text has {many}, too few to keep whole ones for validation: "
                f"{share} {'its' if documents == 1 else 'their'} text ({held:,} tokens) is kept instead."
            )
        names = [self.config.paths[number] for number in lone]
        listed = ", ".join(names[:_NAMED]) + (f" and {len(names) - _NAMED:,} more paths" if names[_NAMED:] else "")
        return (
            f"Too few documents to keep whole ones for validation in {listed}: "
            f"{share} each path's text ({held:,} tokens in all) is kept instead."
        )


def _lone(pair: tuple[Stretch, Stretch]) -> int:
    """The tokens of a source that has documents in one split only; 0 for the others."""
    one, other = pair
    if bool(one.documents) == bool(other.documents):
        return 0
    return int(one.edges[-1] - one.edges[0] + other.edges[-1] - other.edges[0])


def _tails(sizes: Sequence[int], fraction: float) -> list[int | None]:
    """How many tokens are cut off each source, None where a size is 0: their share, and at least two in all."""
    total = sum(sizes)
    tail = max(2, round(fraction * total))
    # sums and not sizes are rounded: many small sources together give as much as one of their size
    sums = [tail * size // max(1, total) for size in itertools.accumulate(sizes, initial=0)]
    return [stop - start if size else None for size, (start, stop) in zip(sizes, itertools.pairwise(sums), strict=True)]


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
