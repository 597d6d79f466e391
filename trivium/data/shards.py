"""Token ids on disk: one memory-mapped file per split, where its documents begin, and a manifest of sizes and hashes.

A split's stream is `END doc1 END doc2 ... docN END`. Each END belongs to the document behind it and acts as its
beginning; the last one closes the stream. So every text token and every closing END is predicted exactly once.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from trivium.data.config import DataConfig
from trivium.data.writing import DTYPES, FORMAT, STARTS, Build, Ids, mapped
from trivium.data.writing import Split as Split
from trivium.errors import BusyError, DataError
from trivium.files import (
    exists_already,
    is_file,
    naming,
    read_inside,
    regular_inside,
    remove,
    sha256,
    sync_folder,
    temporary,
    write_synced,
)
from trivium.text.tokenizer import Tokenizer

MANIFEST = "manifest.json"
_LARGEST = 256 << 20  # bytes of a manifest: it names every text file


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Stream:
    """The token ids of one split, where each document's leading END is, and the UTF-8 bytes of the text.

    `sources` says where the documents of each of `data.paths` begin.
    """

    ids: Ids
    starts: npt.NDArray[np.int64]
    text_bytes: int
    sources: tuple[int, ...] = (0,)

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
    return only if only is not None and is_file(only / MANIFEST) and is_file(only / "train.bin") else None


def build(
    config: DataConfig,
    tokenizer: Tokenizer,
    folder: Path,
    *,
    progress: Callable[[int, int], None],
    say: Callable[[str], None],
) -> Shards:
    """Encode the text that `config` names into `folder`, which appears whole or not at all."""
    if built_shards(config):
        raise DataError(f"data.paths: {config.paths[0]} is a folder of built shards already; name the text itself")
    return publish(folder, tokenizer, lambda scratch: Build(config, tokenizer, scratch, progress).run(say))


def publish(folder: Path, tokenizer: Tokenizer, write: Callable[[Path], Mapping[str, Any]]) -> Shards:
    """The shards that `write` makes in a folder it is given and tells the manifest of; whole in `folder` or nowhere."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise DataError(exists_already(folder))
    with _scratch(folder) as scratch:
        manifest = write(scratch)
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
        try:
            regular_inside(folder, name)
        except FileNotFoundError:
            raise DataError(f"{path} is missing; build the shards again") from None
        except OSError as error:
            raise DataError(f"{path} cannot be read: {error.strerror}; build the shards again") from None
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
    ids: Ids = mapped(folder / f"{split}.bin", DTYPES[manifest["dtype"]])
    starts: npt.NDArray[np.int64] = mapped(folder / f"{split}.docs.bin", STARTS)
    told = manifest["splits"][split]
    return Stream(ids=ids, starts=starts, text_bytes=told["text_bytes"], sources=tuple(told.get("sources", (0,))))


def _hash(value: object) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, ensure_ascii=False).encode()).hexdigest()


def _sealed(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """The manifest with its own hash, so that a flipped byte in it is found too."""
    return {**manifest, "sha256": _hash(manifest)}


def _manifest(folder: Path) -> dict[str, Any]:
    path = folder / MANIFEST
    damaged = DataError(f"{path} is damaged; build the shards again")
    try:
        manifest = json.loads(read_inside(folder, MANIFEST, _LARGEST))
    except (FileNotFoundError, NotADirectoryError):
        raise DataError(f"{folder} is not a folder of built shards; make one with `trivium data build`") from None
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}; build the shards again") from None
    except (ValueError, RecursionError):
        raise damaged from None
    if not isinstance(manifest, dict):
        raise damaged
    version = manifest.get("format")
    if isinstance(version, int) and version > FORMAT:
        raise DataError(f"{path} was written by a newer trivium; update trivium or build the shards again")
    seal = manifest.pop("sha256", None)
    try:
        sealed = seal == _hash(manifest)
    except UnicodeEncodeError:  # half a surrogate pair, which no text has
        raise damaged from None
    if not sealed or version != FORMAT or not _well_formed(manifest):
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
        ordered = True
        for split in ("train", "valid"):
            told = manifest["splits"][split]
            numbers += [told["tokens"], told["documents"], told["text_bytes"]]
            borders = [0, *told.get("sources", ()), told["tokens"]]
            numbers += borders
            ordered = ordered and borders == sorted(borders)
            wanted[f"{split}.bin"] = told["tokens"] * DTYPES[manifest["dtype"]].itemsize
            wanted[f"{split}.docs.bin"] = told["documents"] * STARTS.itemsize
        typed = all(type(n) is int and 0 <= n < 2**63 for n in numbers)
        typed = typed and all(type(word) is str and len(word) < 4096 for word in words)  # no path is longer
        return typed and ordered and {name: entry["size"] for name, entry in files.items()} == wanted
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
            with naming(folder):
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
