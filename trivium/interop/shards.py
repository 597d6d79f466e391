"""The safetensors files of a folder: what they hold, one tensor at a time, and a writer that holds nothing twice."""

from __future__ import annotations

import errno
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor

from trivium.checkpoints.format import Stored, header
from trivium.errors import CheckpointError, printable, shown
from trivium.files import inside, read_inside

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
_PICKLED = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")  # no separator and no leading dot
_LONGEST = 64 << 20  # bytes of JSON: a model of a thousand layers needs a tenth of that
_FLOATS = ("F32", "F16", "BF16", "F64")


def json_table(path: Path) -> dict[str, Any]:
    """The JSON object in a file of bounded size."""
    try:
        table = json.loads(read_inside(path.parent, path.name, _LONGEST))
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}; fetch it again") from None
    except (ValueError, RecursionError):
        raise CheckpointError(f"{path} is not JSON; fetch it again") from None
    if not isinstance(table, dict):
        raise CheckpointError(f"{path} does not hold a JSON object; fetch it again")
    return table


def within(folder: Path, name: str) -> Path:
    """The file `name` of a folder; a link that leads out of it, or nowhere, is refused."""
    try:
        inside(folder, name)
    except OSError as error:
        lost = "is a link that leads nowhere; fetch the file"
        why = "leads out of its folder; copy the file there" if error.errno == errno.EXDEV else lost
        raise CheckpointError(f"{folder / name} {why}") from None
    return folder / name


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
            raise CheckpointError(f"{index} names the file {shown(name)}, which is not one beside it; fetch it again")
        if not name.endswith(".safetensors"):
            raise CheckpointError(
                f"{index} names {printable(name, 80)}, which is not a safetensors file; fetch those instead"
            )
        for tensor, entry in _header(within(folder, name)).items():
            if places.get(tensor) != name:
                raise CheckpointError(
                    f"{folder / name} holds {printable(tensor, 100)}, which {INDEX} does not place there"
                )
            result[tensor] = entry
    missing = places.keys() - result.keys()
    if missing:
        lost = min(missing)
        raise CheckpointError(f"{index} places {printable(lost, 100)} in {places[lost]}, which does not hold it")
    return result


def _header(path: Path) -> dict[str, Stored]:
    """What one file says it holds."""
    try:
        if not path.is_file():
            raise CheckpointError(f"{path} is missing; fetch the whole checkpoint")
        return header(path)
    except SafetensorError as error:
        raise CheckpointError(
            f"{path} is not a whole safetensors file ({printable(str(error), 200)}); fetch it again"
        ) from None
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from None


def check(name: str, entry: Stored) -> None:
    """Refuse a tensor that holds no plain numbers."""
    if entry.kind not in _FLOATS:
        raise CheckpointError(
            f"{entry.path}: {printable(name, 100)} is stored as {printable(entry.kind, 40)}, not as floating-point "
            "numbers; fetch those"
        )


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
