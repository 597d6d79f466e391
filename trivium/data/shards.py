"""Token ids on disk: one memory-mapped file per split, where its documents begin, and a manifest of sizes and hashes.

A split's stream is `END doc1 END doc2 ... docN END`. Each END belongs to the document behind it and acts as its
beginning; the last one closes the stream. So every text token and every closing END is predicted exactly once.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import itertools
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from trivium.config import dump
from trivium.data.config import DataConfig
from trivium.data.sources import Piece, Source, files, held_out, pieces
from trivium.errors import BusyError, DataError
from trivium.files import remove, sha256, sync_folder, temporary, write_synced
from trivium.text.tokenizer import Tokenizer

FORMAT = 1
MANIFEST = "manifest.json"
Split = Literal["train", "valid"]
Ids = npt.NDArray[np.unsignedinteger[Any]]
_DTYPES: dict[str, np.dtype[Any]] = {"uint16": np.dtype("<u2"), "uint32": np.dtype("<u4")}
_STARTS = np.dtype("<i8")
_PIECES, _CHARACTERS = 4096, 1 << 20  # a batch for the tokenizer: many small documents, or 16 pieces of a large one
_BLOCK = 1 << 18  # ids in memory at a time


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Stream:
    """The token ids of one split, where each document's leading END is, and the UTF-8 bytes of the text."""

    ids: Ids
    starts: npt.NDArray[np.int64]
    text_bytes: int

    def __len__(self) -> int:
        return len(self.ids)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Shards:
    """A training and a validation stream; `digest` is equal exactly when ids and tokenizer are."""

    train: Stream
    valid: Stream
    manifest: Mapping[str, Any]

    @property
    def digest(self) -> str:
        hashes = {name: entry["sha256"] for name, entry in self.manifest["files"].items()}
        return _hash({"files": hashes, "tokenizer": self.manifest["tokenizer"]["digest"]})


def built_shards(config: DataConfig) -> Path | None:
    """The folder of built shards, if `paths` names one and nothing else."""
    only = Path(config.paths[0]) if len(config.paths) == 1 else None
    return only if only is not None and (only / MANIFEST).is_file() and (only / "train.bin").is_file() else None


def build(
    config: DataConfig,
    tokenizer: Tokenizer,
    folder: Path,
    *,
    progress: Callable[[int, int], None],
    say: Callable[[str], None],
) -> Shards:
    """Encode the text that `config` names into `folder`, which appears whole or not at all."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise DataError(f"{folder} exists already; remove it or name another folder")
    if built_shards(config):
        raise DataError(f"data.paths: {config.paths[0]} is a folder of built shards already; name the text itself")
    with _scratch(folder) as scratch:
        manifest = _Build(config, tokenizer, scratch, progress).run(say)
        tokenizer.save(scratch / "tokenizer.json")
        write_synced(scratch / MANIFEST, json.dumps(_sealed(manifest), ensure_ascii=False, indent=1).encode())
        sync_folder(scratch)
        os.rename(scratch, folder)
        sync_folder(folder.parent)
    return open_shards(folder, tokenizer_digest=tokenizer.digest)


def open_shards(folder: Path, *, tokenizer_digest: str | None = None, verify: bool = False) -> Shards:
    """The shards in `folder`; with `verify` every byte is checked against the manifest."""
    manifest = _manifest(folder)
    tokenizer = manifest["tokenizer"]
    if tokenizer_digest is not None and tokenizer_digest != tokenizer["digest"]:
        raise DataError(
            f"{folder} was built with another tokenizer ({tokenizer['kind']}, {tokenizer['size']} ids); "
            "build it again with this one, or train with the tokenizer it was built with"
        )
    for name, entry in manifest["files"].items():
        path = folder / name
        if not path.is_file():
            raise DataError(f"{path} is missing; build the shards again")
        if path.stat().st_size != entry["size"] or (verify and sha256(path) != entry["sha256"]):
            raise DataError(f"{path} has changed since it was built; build the shards again")
    train, valid = (_stream(folder, split, manifest) for split in ("train", "valid"))
    return Shards(train=train, valid=valid, manifest=manifest)


def changed_sources(shards: Shards) -> list[Path]:
    """The text files that differ from what the shards were built from; files that are gone do not count."""
    entries = [(Path(entry["path"]), entry) for entry in shards.manifest["sources"]]
    return [
        path
        for path, entry in entries
        if path.is_file() and (path.stat().st_size != entry["size"] or sha256(path) != entry["sha256"])
    ]


def _stream(folder: Path, split: str, manifest: Mapping[str, Any]) -> Stream:
    ids: Ids = _mapped(folder / f"{split}.bin", _DTYPES[manifest["dtype"]])
    starts: npt.NDArray[np.int64] = _mapped(folder / f"{split}.docs.bin", _STARTS)
    return Stream(ids=ids, starts=starts, text_bytes=manifest["splits"][split]["text_bytes"])


def _mapped(path: Path, dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    # An empty file cannot be mapped.
    return np.memmap(path, dtype, mode="r") if path.stat().st_size else np.empty(0, dtype)


def _hash(value: object) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, ensure_ascii=False).encode()).hexdigest()


def _sealed(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """The manifest with its own hash, so that a flipped byte in it is found too."""
    return {**manifest, "sha256": _hash(manifest)}


def _manifest(folder: Path) -> dict[str, Any]:
    path = folder / MANIFEST
    if not path.is_file():
        raise DataError(f"{folder} is not a folder of built shards; make one with `trivium data build`")
    damaged = DataError(f"{path} is damaged; build the shards again")
    try:
        manifest = json.loads(path.read_bytes())
    except (ValueError, RecursionError):
        raise damaged from None
    if not isinstance(manifest, dict):
        raise damaged
    version = manifest.get("format")
    if isinstance(version, int) and version > FORMAT:
        raise DataError(f"{path} was written by a newer trivium; update trivium or build the shards again")
    seal = manifest.pop("sha256", None)
    if seal != _hash(manifest) or version != FORMAT or not _well_formed(manifest):
        raise damaged
    return manifest


def _well_formed(manifest: Mapping[str, Any]) -> bool:
    """Has a manifest everything that is used of it, with sizes that fit together? The seal is no secret."""
    try:
        files, tokenizer = manifest["files"], manifest["tokenizer"]
        entries = [*files.values(), *manifest["sources"]]
        words = [tokenizer["kind"], tokenizer["digest"], *(entry["sha256"] for entry in entries)]
        words += [source["path"] for source in manifest["sources"]]
        numbers = [manifest["format"], tokenizer["size"], *(entry["size"] for entry in entries)]
        wanted: dict[str, int] = {}
        for split in ("train", "valid"):
            told = manifest["splits"][split]
            numbers += [told["tokens"], told["documents"], told["text_bytes"]]
            wanted[f"{split}.bin"] = told["tokens"] * _DTYPES[manifest["dtype"]].itemsize
            wanted[f"{split}.docs.bin"] = told["documents"] * _STARTS.itemsize
        typed = all(type(word) is str for word in words) and all(type(n) is int and n >= 0 for n in numbers)
        return typed and {name: entry["size"] for name, entry in files.items()} == wanted
    except (KeyError, TypeError, AttributeError):
        return False


@contextlib.contextmanager
def _scratch(folder: Path) -> Iterator[Path]:
    """A hidden folder beside `folder`, locked while in use and gone afterwards; dead ones are cleared away first."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    ours = re.compile(rf"\.tmp-{re.escape(folder.name)}-\d+")
    for left in (path for path in folder.parent.iterdir() if ours.fullmatch(path.name)):
        with _locked(left) as free:
            if not free:
                raise BusyError(f"{folder} is being built by another process; wait for it or name another folder")
            remove(left)
    scratch = temporary(folder)
    scratch.mkdir()
    with _locked(scratch):
        try:
            yield scratch
        except BaseException:
            remove(scratch)
            raise


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[bool]:
    """Whether a folder could be locked; the kernel lets go when the holder dies."""
    descriptor = os.open(folder, os.O_RDONLY)
    free = True
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            free = False
        yield free
    finally:
        os.close(descriptor)


class _Writer:
    """One split on its way to disk, hashed as it is written."""

    def __init__(self, folder: Path, split: Split, dtype: np.dtype[Any], end: int) -> None:
        self.paths = {name: folder / name for name in (f"{split}.bin", f"{split}.docs.bin")}
        self._files = [path.open("wb") for path in self.paths.values()]
        self._hashes = [hashlib.sha256() for _ in self.paths]
        self._pending: tuple[list[int], list[int]] = ([], [])
        self._dtypes = (dtype, _STARTS)
        self._end = end
        self.tokens = self.documents = self.text_bytes = 0

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

    def told(self) -> dict[str, int]:
        return {"tokens": self.tokens, "documents": self.documents, "text_bytes": self.text_bytes}

    def entries(self) -> dict[str, dict[str, Any]]:
        pairs = zip(self.paths.items(), self._hashes, strict=True)
        return {name: {"size": path.stat().st_size, "sha256": hash.hexdigest()} for (name, path), hash in pairs}

    def _flush(self) -> None:
        for pending, dtype, file, hash in zip(self._pending, self._dtypes, self._files, self._hashes, strict=True):
            data = np.array(pending, dtype).tobytes()
            file.write(data)
            hash.update(data)
            pending.clear()


class _Build:
    """One pass over the text, and the manifest of what came out."""

    def __init__(
        self, config: DataConfig, tokenizer: Tokenizer, folder: Path, progress: Callable[[int, int], None]
    ) -> None:
        self.config, self.tokenizer, self.folder, self.progress = config, tokenizer, folder, progress
        self.dtype = "uint16" if tokenizer.size <= 1 << 16 else "uint32"
        self.sources: list[Source] = []
        self.fraction = 0.0 if isinstance(config.valid, str) else config.valid
        # Both are looked at before any work begins: a misspelt path must not cost an hour.
        self.train_files = files(config.paths)
        self.valid_files = files([config.valid], key="data.valid") if isinstance(config.valid, str) else []
        self.read = 0
        self.total = sum(path.stat().st_size for path in self.train_files + self.valid_files)

    def run(self, say: Callable[[str], None]) -> dict[str, Any]:
        with self._writers() as (train, valid):
            self._encode(self.train_files, lambda piece: valid if held_out(piece.text, self.fraction) else train)
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
        train = _Writer(self.folder, "train", _DTYPES[self.dtype], self.tokenizer.end)
        valid = _Writer(self.folder, "valid", _DTYPES[self.dtype], self.tokenizer.end)
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
        starts = np.append(_mapped(starts_path, _STARTS), whole.tokens - 1)
        with self._writers() as (train, valid):
            for start, stop in itertools.pairwise(starts.tolist()):
                for writer, first, last in ((train, start + 1, min(cut, stop)), (valid, max(start + 1, cut), stop)):
                    if first < last:
                        writer.begin()
                        for ids in _blocks(ids_path, _DTYPES[self.dtype], first, last):
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
