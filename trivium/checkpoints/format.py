"""One checkpoint: a folder of safetensors and JSON files that is whole or does not exist.

`manifest.json` lists every file with its size and sha256. Its last field is the sha256 of all bytes before that field,
so a changed byte is found anywhere, in the manifest too. Every later format keeps this seal.
"""

from __future__ import annotations

import errno
import json
import math
import mmap
import os
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from trivium.checkpoints.manifest import (
    FORMAT,
    MANIFEST,
    NAME,
    Entry,
    Manifest,
    damaged,
    manifest,
    read_bytes,
    seal,
    unreadable,
)
from trivium.errors import CheckpointError, printable, shown
from trivium.files import regular_inside, sha256, sync_file, sync_folder, temporary, write_synced
from trivium.parts.sharded import fill, is_sharded

_ERRNO = re.compile(r"\(os error (\d+)\)")
_CHUNK = 1 << 20  # bytes of a tensor that are read at a time
_LONGEST = 100_000_000  # bytes of a header: the limit of the safetensors library
_KINDS = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip
_BITS = {
    "BOOL": 8, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "U8": 8, "I8": 8, "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8,
    "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8, "I16": 16, "U16": 16, "F16": 16, "BF16": 16, "I32": 32, "U32": 32, "F32": 32,
    "C64": 64, "F64": 64, "I64": 64, "U64": 64,
}  # fmt: skip


def write(
    folder: Path,
    *,
    step: int,
    tensors: Mapping[str, Mapping[str, Tensor]],
    documents: Mapping[str, Mapping[str, Any]],
    notes: Mapping[str, Any],
) -> Manifest:
    """A new checkpoint at `folder`: it appears there whole and on the disk, or an error is raised and nothing is left.

    `tensors` become STEM.safetensors, `documents` become STEM.json. A full disk is the plain OSError.
    """
    if folder.exists():
        raise CheckpointError(f"{folder} already exists; delete it or name another folder")
    texts = {f"{stem}.json": _json(document) for stem, document in documents.items()}
    names = [*texts, *(f"{stem}.safetensors" for stem in tensors)]
    assert all(NAME.fullmatch(name) and name != MANIFEST for name in names), names
    hidden = temporary(folder)
    shutil.rmtree(hidden, ignore_errors=True)
    hidden.mkdir()
    try:
        for stem, group in tensors.items():
            write_tensors(hidden / f"{stem}.safetensors", group)
        for name, text in texts.items():
            write_synced(hidden / name, text)
        files = {n: Entry(size=(hidden / n).stat().st_size, sha256=sha256(hidden / n)) for n in sorted(names)}
        result = Manifest(format=FORMAT, step=step, files=files, notes=notes)
        write_synced(hidden / MANIFEST, seal(_json(asdict(result))))
        sync_folder(hidden)
        os.rename(hidden, folder)
    except BaseException:
        shutil.rmtree(hidden, ignore_errors=True)
        raise
    sync_folder(folder.parent)
    return result


def _json(value: Mapping[str, Any]) -> bytes:
    return (json.dumps(value, indent=2) + "\n").encode()


def write_tensors(path: Path, group: Mapping[str, Tensor]) -> None:
    """A safetensors file on the disk; a full disk is the plain OSError."""
    # A copy of each: safetensors refuses shared storages (tied weights) and strides.
    plain = {
        name: tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
        for name, tensor in group.items()
    }
    try:
        save_file(plain, path)
    except SafetensorError as error:
        # The library hides a full disk in its own exception; the caller must be able to tell it from a bug.
        if found := _ERRNO.search(str(error)):
            number = int(found[1])
            raise OSError(number, os.strerror(number), str(path)) from error
        raise
    path.chmod(path.parent.stat().st_mode & 0o666)  # safetensors makes it private; the umask is the user's choice
    sync_file(path)


def verify(folder: Path) -> Manifest:
    """The manifest of a checkpoint of which every byte is as it was written, or a CheckpointError naming the file."""
    result = manifest(folder)
    try:
        found = {path.name for path in folder.iterdir()}
    except OSError as error:
        raise CheckpointError(f"{folder} cannot be read: {error.strerror}") from None
    for name in sorted(found - result.files.keys() - {MANIFEST}):
        raise CheckpointError(f"{folder / name} does not belong to the checkpoint; move it elsewhere")
    for name, entry in result.files.items():
        _verify_file(folder / name, entry)
    return result


def _verify_file(path: Path, entry: Entry) -> None:
    try:
        size = regular_inside(path.parent, path.name).stat().st_size
        if size != entry.size:
            raise CheckpointError(damaged(path, f"it has {size} bytes instead of {shown(entry.size)}"))
        if sha256(path) != entry.sha256:
            raise CheckpointError(damaged(path, "its sha256 does not match"))
    except OSError as error:
        raise unreadable(path, error) from None


def tensors(folder: Path, stem: str) -> dict[str, Tensor]:
    """The tensors of STEM.safetensors on the CPU; `verify` the folder first."""
    return read_tensors(folder / f"{stem}.safetensors")


def read_tensors(path: Path) -> dict[str, Tensor]:
    """The tensors of a safetensors file, on the CPU."""
    try:
        regular_inside(path.parent, path.name)
        return load_file(path)
    except OSError as error:
        raise unreadable(path, error) from None
    except (SafetensorError, RuntimeError) as error:
        if os.strerror(errno.ENOMEM) in str(error):  # the library maps the whole file
            raise CheckpointError(f"{path} is larger than the memory that is free; choose a smaller model") from None
        raise CheckpointError(damaged(path, printable(str(error), 200))) from None


class Stored(NamedTuple):
    """A tensor that still lies in its file. It is read and never mapped: pages of a file count as ours while they are.

    `kind` is what the file calls the dtype.
    """

    path: Path
    kind: str
    shape: tuple[int, ...]
    start: int
    size: int

    @property
    def dtype(self) -> torch.dtype | None:
        """None for kinds that no tensor of ours has."""
        return _KINDS.get(self.kind)

    def pour(self, target: Tensor) -> None:
        """Fill a tensor of this shape, whatever its dtype, its layout and its device, a megabyte at a time.

        A sharded one is filled at once.
        """
        assert self.dtype is not None
        if is_sharded(target):
            fill(target, self.read())
            return
        rows, done = target if target.ndim else target[None], 0
        for piece in self.pieces():
            part = torch.frombuffer(piece, dtype=self.dtype).view(-1, *self.shape[1:])
            rows[done : done + len(part)].copy_(part)
            done += len(part)

    def read(self) -> Tensor:
        """The whole tensor, for a while."""
        assert self.dtype is not None
        result = fresh(self.shape, self.dtype)
        self.pour(result)
        return result

    def pieces(self) -> Iterator[bytearray]:
        """The bytes of whole rows in order."""
        rows = self.shape[0] if self.shape else 1
        row = self.size // max(1, rows)
        step = max(1, _CHUNK // max(1, row))
        try:
            with self.path.open("rb", buffering=0) as file:
                file.seek(self.start)
                for first in range(0, rows if row else 0, step):
                    piece = bytearray(min(step, rows - first) * row)
                    if file.readinto(piece) != len(piece):
                        raise CheckpointError(f"{self.path} became shorter while it was read; restore it")
                    yield piece
        except OSError as error:
            raise CheckpointError(f"{self.path} cannot be read: {error.strerror}") from None


def header(path: Path) -> dict[str, Stored]:
    """What a safetensors file holds, once offsets, shapes and the file's size agree; a SafetensorError if they do not.

    The file is read and not mapped, as the library does: one that is larger than the memory is not damaged.
    """
    with path.open("rb") as file:
        size, length = os.fstat(file.fileno()).st_size, int.from_bytes(file.read(8), "little")
        if size < 8 or length > min(_LONGEST, size - 8):
            raise SafetensorError("the header is longer than the file")
        text = file.read(length)
    try:
        return _entries(path, json.loads(text.decode()), 8 + length, size)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise SafetensorError("the header is not a table of tensors") from None


def _entries(path: Path, table: dict[str, Any], start: int, size: int) -> dict[str, Stored]:
    """The tensors of a header, which fill the file from `start` to `size` without a gap and without an overlap."""
    result = {name: _entry(path, entry, start) for name, entry in table.items() if name != "__metadata__"}
    for name in result:
        name.encode()  # half of a surrogate pair is no text
    at = start
    for name, entry in sorted(result.items(), key=lambda item: (item[1].start, item[1].size)):
        bits = _BITS[entry.kind] * math.prod(entry.shape)
        if entry.start != at or bits != 8 * entry.size:
            raise SafetensorError(f"the place of {printable(name, 100)} does not fit its shape or the tensor before it")
        at += entry.size
    if at != size:
        raise SafetensorError(f"it has {size:,} bytes instead of the {at:,} of its header")
    return result


def _entry(path: Path, entry: dict[str, Any], start: int) -> Stored:
    (first, last), shape = entry["data_offsets"], tuple(entry["shape"])
    if not all(type(number) is int and 0 <= number < 1 << 63 for number in (first, last, *shape)):
        raise ValueError
    return Stored(path, entry["dtype"], shape, start + first, last - first)


def fresh(shape: Sequence[int], dtype: torch.dtype = torch.float32) -> Tensor:
    """Room for a tensor for a while, which goes back to the system at its end.

    What malloc gives may stay with the process when it is freed: up to 64 MB where large blocks come and go.
    """
    size = torch.Size(shape).numel() * dtype.itemsize
    if not size:
        return torch.empty(shape, dtype=dtype)
    room = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(room, dtype=dtype).view(shape)


def stored(path: Path) -> dict[str, Stored]:
    """The tensors of a safetensors file, none of them read yet."""
    try:
        regular_inside(path.parent, path.name)
        result = header(path)
    except OSError as error:
        raise unreadable(path, error) from None
    except SafetensorError as error:
        raise CheckpointError(damaged(path, printable(str(error), 200))) from None
    for name, entry in result.items():
        if entry.dtype is None:
            what = f"{shown(name)} is stored as {shown(entry.kind)}"
            raise CheckpointError(damaged(path, f"{what}, which no tensor here is"))
    return result


def document(folder: Path, stem: str) -> dict[str, Any]:
    """The content of STEM.json; `verify` the folder first."""
    path = folder / f"{stem}.json"
    raw = read_bytes(path)
    try:
        value = json.loads(raw)
    except (ValueError, RecursionError):
        raise CheckpointError(damaged(path, "it is not JSON")) from None
    if not isinstance(value, dict):
        raise CheckpointError(damaged(path, "it is not a JSON object"))
    return value
