"""The manifest of a checkpoint: what its files must be, sealed with its own sha256; read without torch."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trivium.errors import CheckpointError, shown
from trivium.files import read_inside

FORMAT = 1
MANIFEST = "manifest.json"
NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")  # no separator and no leading dot: nothing outside the folder
_DIGEST = re.compile(r"[0-9a-f]{64}")
_JSON_BYTES = 64 << 20  # the most that is read of a manifest or a document


class NewerFormat(CheckpointError):
    """The checkpoint is not damaged: this version of trivium is too old to read it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """What a file of a checkpoint must be."""

    size: int
    sha256: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    """What a checkpoint says of itself."""

    format: int
    step: int
    files: Mapping[str, Entry]
    notes: Mapping[str, Any]


def manifest(folder: Path) -> Manifest:
    """The manifest of a checkpoint, its seal checked but not the files that it lists."""
    path = folder / MANIFEST
    raw = read_bytes(path)
    head = raw[: -len(_tail(b""))]
    if raw != head + _tail(head):
        raise CheckpointError(damaged(path, "its own sha256 does not match"))
    try:
        fields = json.loads(raw)
        version = fields["format"]
        if type(version) is int and version > FORMAT:
            raise NewerFormat(
                f"{path} was written by a newer trivium (format {shown(version)}, this one reads {FORMAT}); "
                "upgrade trivium"
            )
        files = {name: Entry(size=entry["size"], sha256=entry["sha256"]) for name, entry in fields["files"].items()}
        result = Manifest(format=version, step=fields["step"], files=files, notes=fields["notes"])
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise CheckpointError(damaged(path, "it is not the manifest of a checkpoint")) from None
    if not _sound(result):
        raise CheckpointError(damaged(path, "it is not the manifest of a checkpoint"))
    return result


def _sound(manifest: Manifest) -> bool:
    """Whether a sealed manifest, perhaps a stranger's, says what a manifest may say."""
    numbers = [manifest.format, manifest.step, *(entry.size for entry in manifest.files.values())]
    return (
        all(type(number) is int and number >= 0 for number in numbers)
        and manifest.format == FORMAT
        and isinstance(manifest.notes, dict)
        and all(NAME.fullmatch(name) and name != MANIFEST for name in manifest.files)
        and all(isinstance(e.sha256, str) and _DIGEST.fullmatch(e.sha256) for e in manifest.files.values())
    )


def seal(body: bytes) -> bytes:
    """A JSON object with its own sha256 as the last field."""
    head = body.removesuffix(b"\n}\n") + b",\n"
    return head + _tail(head)


def _tail(head: bytes) -> bytes:
    return f'  "sha256": "{hashlib.sha256(head).hexdigest()}"\n}}\n'.encode()


def damaged(path: Path, reason: str) -> str:
    return f"{path} is damaged: {reason}; restore it from a copy or use another checkpoint"


def unreadable(path: Path, error: OSError) -> CheckpointError:
    if isinstance(error, FileNotFoundError):
        return CheckpointError(damaged(path, "it is missing"))
    return CheckpointError(f"{path} cannot be read: {error.strerror or error}; use another checkpoint")


def read_bytes(path: Path) -> bytes:
    try:
        return read_inside(path.parent, path.name, _JSON_BYTES)
    except OSError as error:
        raise unreadable(path, error) from None
