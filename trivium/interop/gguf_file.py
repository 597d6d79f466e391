"""The container of GGUF, versions 2 and 3: settings and tensors, every length checked against the file first."""

from __future__ import annotations

import contextlib
import mmap
import os
import struct
from collections.abc import Mapping
from math import prod
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, NoReturn

import numpy as np

from trivium.errors import CheckpointError
from trivium.interop.quants import FORMATS, OTHERS, Bytes, Floats, Format, dequantise

MAGIC = b"GGUF"
ALIGNMENT = "general.alignment"
_STRING, _ARRAY = 8, 9
_CHUNK = 1 << 20  # numbers at a time: what is computed on the way stays a few megabytes

# By the number that the file gives the type of a value: how struct reads one.
SCALARS: dict[int, str] = {
    0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d",
}  # fmt: skip


class Info(NamedTuple):
    """Where a tensor lies; its shape as numpy has it, the fastest axis last."""

    format: Format
    shape: tuple[int, ...]
    start: int
    stop: int


class GgufFile:
    """`with GgufFile(path) as file:` maps it; a CheckpointError if it is not whole and sound."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.settings: Mapping[str, Any] = {}
        self.tensors: Mapping[str, Info] = {}
        try:
            with path.open("rb") as file:
                size = os.fstat(file.fileno()).st_size
                if size < 24:  # and nothing cannot be mapped
                    raise CheckpointError(f"{path} is too short to be a GGUF file; fetch it again")
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error.strerror}") from None
        try:
            reader = _Reader(path, self._map)
            self.settings, self.tensors = reader.all()
        except BaseException:
            self._map.close()
            raise

    def __enter__(self) -> GgufFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with contextlib.suppress(BufferError):  # an interruption may leave somebody who looks at it, until that is over
            self._map.close()

    def read(self, name: str, into: Floats) -> None:
        """Fill `into`, which has the shape of the tensor, with its numbers, some blocks at a time."""
        info = self.tensors[name]
        format, flat = info.format, into.reshape(-1)
        step = max(1, _CHUNK // format.numbers)
        for first in range(0, flat.size // format.numbers, step):
            part = flat[first * format.numbers : (first + step) * format.numbers]
            start, size = info.start + format.bytes(first * format.numbers), format.bytes(part.size)
            raw: Bytes = np.frombuffer(self._map, np.uint8, size, start)
            dequantise(format, raw, part)
            del raw  # a mapping that is looked at cannot be closed
            self._forget(start, size)

    def _forget(self, start: int, size: int) -> None:
        """Give pages back: else those of the file lie beside the weights, and both count as ours."""
        if hasattr(mmap, "MADV_DONTNEED"):
            page = start - start % mmap.PAGESIZE
            self._map.madvise(mmap.MADV_DONTNEED, page, start + size - page)


class _Reader:
    """Reads from the front; whatever would go beyond the end of the file is refused before it is looked at."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path, self.data, self.at = path, data, 0

    def all(self) -> tuple[dict[str, Any], dict[str, Info]]:
        if self.take(4) != MAGIC:
            self.refuse("is not a GGUF file: it does not begin with GGUF; name another file")
        version = self.number("I")
        if version not in (2, 3):
            older = f"version {version}" if version < 2**16 else "the byte order of another machine"
            self.refuse(f"has {older}; trivium reads versions 2 and 3, little endian: convert it again")
        tensors, settings = self.count(32), self.count(13)  # the least that one of each takes
        table: dict[str, Any] = {}
        for _ in range(settings):
            key = self.text()
            if key in table:
                self.refuse(f"is damaged: it sets {key[:100]!r} twice; fetch it again")
            table[key] = self.value(self.number("I"))
        alignment = table.get(ALIGNMENT, 32)
        if type(alignment) is not int or not 1 <= alignment <= 1 << 20 or alignment & (alignment - 1):
            self.refuse(f"is damaged: {ALIGNMENT} is {str(alignment)[:100]}, not a power of 2; fetch it again")
        infos: dict[str, Info] = {}
        for _ in range(tensors):
            name = self.text()
            if name in infos:
                self.refuse(f"is damaged: it holds {name[:100]!r} twice; fetch it again")
            infos[name] = self.info(name, alignment)
        return table, self.placed(infos, alignment)

    def refuse(self, reason: str) -> NoReturn:
        raise CheckpointError(f"{self.path} {reason}")

    def take(self, size: int) -> bytes:
        if size > len(self.data) - self.at:
            self.refuse(f"is cut off or damaged: it ends within what byte {self.at} begins; fetch it again")
        self.at += size
        return self.data[self.at - size : self.at]

    def number(self, code: str) -> Any:
        return struct.unpack(f"<{code}", self.take(struct.calcsize(f"<{code}")))[0]

    def count(self, least: int) -> int:
        """How many things follow, each of which takes at least so many bytes."""
        number: int = self.number("Q")
        if number * least > len(self.data) - self.at:
            self.refuse(f"is damaged: {number} entries do not fit into its {len(self.data)} bytes; fetch it again")
        return number

    def text(self) -> str:
        start = self.at
        try:
            return self.take(self.count(1)).decode()
        except UnicodeDecodeError:
            self.refuse(f"is damaged: the text at byte {start} is not UTF-8; fetch it again")

    def value(self, kind: int) -> Any:
        """A number, a text, a list of texts, or an array of numbers."""
        if kind == _STRING:
            return self.text()
        if kind in SCALARS:
            return self.number(SCALARS[kind])
        if kind != _ARRAY:
            self.refuse(f"is damaged: a value at byte {self.at} is of the unknown type {kind}; fetch it again")
        kind = self.number("I")
        if kind == _STRING:
            return [self.text() for _ in range(self.count(8))]
        if kind not in SCALARS:
            self.refuse(f"has an array of arrays or of an unknown type at byte {self.at}; convert it again")
        dtype = np.dtype(SCALARS[kind]).newbyteorder("<")
        return np.frombuffer(self.take(self.count(dtype.itemsize) * dtype.itemsize), dtype)

    def info(self, name: str, alignment: int) -> Info:
        """One entry of the table of tensors, its place still counted from where the data begins."""
        axes = self.number("I")
        if not 1 <= axes <= 4:
            self.refuse(f"is damaged: {name[:100]!r} has {axes} axes; fetch it again")
        shape = tuple(self.number("Q") for _ in range(axes))[::-1]
        kind, start = self.number("I"), self.number("Q")
        if kind not in FORMATS:
            known = ", ".join(format.name for format in FORMATS.values())
            other = OTHERS.get(kind, f"the unknown type {kind}")
            self.refuse(f"holds {name[:100]!r} as {other}; trivium reads {known}: convert it to one of these")
        format, numbers = FORMATS[kind], prod(shape)
        if not numbers or shape[-1] % format.numbers or start % alignment:
            self.refuse(f"is damaged: {name[:100]!r} has a shape or a place that {format.name} cannot have")
        return Info(format, shape, start, start + format.bytes(numbers))

    def placed(self, infos: dict[str, Info], alignment: int) -> dict[str, Info]:
        """The tensors where they lie in the file, apart from each other and within it."""
        base = -(-self.at // alignment) * alignment
        end = 0
        for name, info in sorted(infos.items(), key=lambda item: item[1].start):
            if info.start < end:
                self.refuse(f"is damaged: {name[:100]!r} overlaps another tensor; fetch it again")
            end = info.stop
            if base + end > len(self.data):
                self.refuse(
                    f"is cut off: {name[:100]!r} ends {base + end - len(self.data)} bytes after it; fetch it again"
                )
        return {name: info._replace(start=base + info.start, stop=base + info.stop) for name, info in infos.items()}
