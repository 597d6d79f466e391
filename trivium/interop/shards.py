"""The safetensors files of a folder: what they hold, one tensor at a time, and a writer that holds nothing twice."""

from __future__ import annotations

import json
import mmap
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from trivium.errors import CheckpointError

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
_PICKLED = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")  # no separator and no leading dot
_LONGEST = 64 << 20  # bytes of JSON: a model of a thousand layers needs a tenth of that
_CHUNK = 1 << 20
_FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "F64": torch.float64}


class Stored(NamedTuple):
    """Where a tensor lies."""

    path: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    size: int


def json_table(path: Path) -> dict[str, Any]:
    """The JSON object in a file of bounded size."""
    try:
        if path.stat().st_size > _LONGEST:
            raise CheckpointError(f"{path} is larger than any such file; fetch it again")
        table = json.loads(path.read_bytes())
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError):
        raise CheckpointError(f"{path} is not JSON; fetch it again") from None
    if not isinstance(table, dict):
        raise CheckpointError(f"{path} does not hold a JSON object; fetch it again")
    return table


def within(folder: Path, name: str) -> Path:
    """The file `name` of a folder; a link that leads out of it is refused.

    The cache of the Hugging Face Hub keeps its files as links from `snapshots/ID/` to `blobs/`, which are its own.
    """
    path, home = folder / name, folder.resolve()
    homes = [home] + ([home.parent.parent / "blobs"] if home.parent.name == "snapshots" else [])
    try:
        real = path.resolve()
    except (OSError, RuntimeError):
        raise CheckpointError(f"{path} is a link that leads nowhere; fetch the file") from None
    if not any(real.is_relative_to(one) for one in homes):
        raise CheckpointError(f"{path} leads out of its folder; copy the file there")
    return path


def stored(folder: Path) -> dict[str, Stored]:
    """Every tensor of a folder by name, without reading any."""
    if (folder / WEIGHTS).exists():
        return _header(within(folder, WEIGHTS))
    if (folder / INDEX).exists():
        return _sharded(folder)
    pickled = sorted(path.name for pattern in _PICKLED for path in folder.glob(pattern))
    if pickled:
        raise CheckpointError(
            f"{folder} holds its weights only as {pickled[0]}, a pickle that could run any code; fetch {WEIGHTS}"
        )
    raise CheckpointError(f"{folder} has no {WEIGHTS}; fetch the whole checkpoint")


def _sharded(folder: Path) -> dict[str, Stored]:
    index = folder / INDEX
    places = json_table(within(folder, INDEX)).get("weight_map")
    if not isinstance(places, dict) or not all(isinstance(name, str) for name in places.values()):
        raise CheckpointError(f"{index} has no weight_map from tensors to files; fetch it again")
    result: dict[str, Stored] = {}
    for name in sorted(set(places.values())):
        if not _NAME.fullmatch(name):
            raise CheckpointError(f"{index} names the file {name[:80]!r}, which is not one beside it; fetch it again")
        if not name.endswith(".safetensors"):
            raise CheckpointError(f"{index} names {name}, which is not a safetensors file; fetch those instead")
        for tensor, entry in _header(within(folder, name)).items():
            if places.get(tensor) != name:
                raise CheckpointError(f"{folder / name} holds {tensor}, which {INDEX} does not place there")
            result[tensor] = entry
    missing = places.keys() - result.keys()
    if missing:
        raise CheckpointError(f"{index} places {min(missing)} in {places[min(missing)]}, which does not hold it")
    return result


def _header(path: Path) -> dict[str, Stored]:
    """What one file says it holds, after the library has checked that offsets, shapes and the file's size agree."""
    try:
        if not path.is_file():
            raise CheckpointError(f"{path} is missing; fetch the whole checkpoint")
        with safe_open(path, framework="pt"):
            pass
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            table = json.loads(file.read(length))
        result = {}
        for name, entry in table.items():
            if name != "__metadata__":
                first, last = entry["data_offsets"]
                shape = tuple(int(size) for size in entry["shape"])
                result[name] = Stored(path, str(entry["dtype"]), shape, 8 + length + first, last - first)
        return result
    except (SafetensorError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{path} is not a whole safetensors file ({error}); fetch it again") from None
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from None


class Reader:
    """Tensors of some files as float32 on the CPU."""

    def __init__(self, entries: Mapping[str, Stored]) -> None:
        self.entries = entries

    def check(self, name: str) -> None:
        """Refuse a tensor that holds no plain numbers."""
        entry = self.entries[name]
        if entry.dtype not in _FLOATS:
            raise CheckpointError(
                f"{entry.path}: {name} is stored as {entry.dtype}, not as floating-point numbers; fetch those"
            )

    def mapped(self, name: str) -> Tensor:
        """The tensor, mapped from its file where that is float32: changing it changes nothing on the disk."""
        entry = self.entries[name]
        if entry.dtype != "F32" or entry.start % 4 or not entry.size:
            return self.read(name)
        before = entry.start % mmap.ALLOCATIONGRANULARITY
        try:
            with entry.path.open("rb") as file:  # a mapping for each: whoever replaces a weight gives its pages back
                room = mmap.mmap(
                    file.fileno(), before + entry.size, access=mmap.ACCESS_COPY, offset=entry.start - before
                )
            flat = torch.frombuffer(room, dtype=torch.float32, count=entry.size // 4, offset=before)
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{entry.path} cannot be read: {error}") from None
        return flat.view(entry.shape)

    def read(self, name: str) -> Tensor:
        """The tensor in memory of its own, converted a megabyte at a time."""
        entry, done = self.entries[name], 0
        flat = _fresh(torch.Size(entry.shape).numel())
        for piece in self.pieces(name):
            part = torch.frombuffer(piece, dtype=_FLOATS[entry.dtype])
            flat[done : done + len(part)] = part
            done += len(part)
        return flat.view(entry.shape)

    def pieces(self, name: str) -> Iterator[bytearray]:
        """The bytes of a tensor in order, a bounded number at a time and never mapped."""
        entry = self.entries[name]
        try:
            with entry.path.open("rb", buffering=0) as file:
                file.seek(entry.start)
                for start in range(0, entry.size, _CHUNK):
                    piece = bytearray(min(_CHUNK, entry.size - start))
                    if file.readinto(piece) != len(piece):
                        raise CheckpointError(f"{entry.path} became shorter while it was read; fetch it again")
                    yield piece
        except OSError as error:
            raise CheckpointError(f"{entry.path} cannot be read: {error.strerror}") from None


def _fresh(count: int) -> Tensor:
    """Room for so many float32 numbers that goes back to the system when it is not needed any more.

    What malloc gives may stay with the process when it is freed: up to 64 MB where large blocks come and go.
    """
    if not count:
        return torch.empty(0)
    room = mmap.mmap(-1, 4 * count, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(room, dtype=torch.float32)


def write(
    path: Path, shapes: Mapping[str, Sequence[int]], tensors: Iterator[tuple[str, Tensor]], tick: Callable[[int], None]
) -> None:
    """A safetensors file of float32 tensors, which are asked for one by one in the order of `shapes`."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape in shapes.items():
        start, end = end, end + 4 * torch.Size(shape).numel()
        header[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # so that the numbers are aligned when mapped
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for expected, (name, tensor) in zip(shapes, tensors, strict=True):
            assert expected == name
            plain = tensor.detach().to("cpu", torch.float32).contiguous()
            file.write(plain.numpy().data)
            tick(plain.nbytes)
        file.flush()
        os.fsync(file.fileno())
