"""The memory of a model in use and in training: a sum of what its parts say of themselves, beside what is free.

The sums are lower bounds: temporaries, the allocator's holes and the libraries' own memory come on top.
"""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from trivium.errors import RequestError
from trivium.models.config import ModelConfig

FLOAT = 4  # bytes of a float32 number
_REFUSED = re.compile(r"can't allocate memory: you tried to allocate (\d+) bytes")  # torch's allocator of the host
_MEMINFO = Path("/proc/meminfo")
_CGROUPS = (  # of a container, in the second and the first version of control groups: folder, limit, use, cache in it
    (Path("/sys/fs/cgroup"), "memory.max", "memory.current", "inactive_file"),
    (Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)


class Memory(NamedTuple):
    """Bytes of a model in training, by what they hold."""

    weights: int
    gradients: int
    optimizer: int
    activations: int

    @property
    def fixed(self) -> int:
        """All that does not depend on the batch."""
        return self.weights + self.gradients + self.optimizer

    @property
    def total(self) -> int:
        return self.fixed + self.activations

    def __str__(self) -> str:
        parts = zip(self._fields, self, strict=True)
        return f"{gigabytes(self.total)} (" + ", ".join(f"{name} {gigabytes(size)}" for name, size in parts) + ")"


def model_memory(model: ModelConfig) -> int:
    """The bytes of a model's float32 weights."""
    return FLOAT * model.parameters()


def training_memory(
    model: ModelConfig,
    *,
    tokens: int,
    states: float,
    element: int = FLOAT,
    recompute: bool = False,
    length: int = 0,
    target: float = 1.0,
    copies: float = 0.0,
) -> Memory:
    """The least memory of training on `tokens` at a time, in rows of `length` (0: of the model's context).

    The optimizer keeps `states` float32 numbers for each parameter, an activation has `element` bytes, with `recompute`
    a block keeps its input alone, beside a source a decoder reads `target` tokens for each of its tokens, and `copies`
    is the size of other copies of the weights.
    """
    weights = FLOAT * model.parameters()
    short = replace(model, context=min(length, model.context)) if length else model
    kept = short.kept(target)
    if recompute:
        kept = min(kept, model.layers * model.width + kept // max(1, model.layers))
    return Memory(round(weights * (1 + copies)), weights, round(weights * states), tokens * kept * element)


def free_host_memory() -> int:
    """The bytes that this process can still take without swapping; 0 if the system does not say."""
    found = []
    try:
        rows = dict(line.split(":", 1) for line in _MEMINFO.read_text().splitlines() if ":" in line)
        found.append(int(rows["MemAvailable"].split()[0]) * 1024)
    except (OSError, KeyError, ValueError, IndexError):
        pass  # not Linux
    for folder, limit, use, cache in _CGROUPS:
        try:
            taken = int((folder / use).read_text())
            statistics = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
            taken -= min(taken, int(statistics.get(cache, 0)))  # files that were read, which make room when it is asked
            found.append(max(0, int((folder / limit).read_text()) - taken))
        except (OSError, ValueError):  # no such file, or "max"
            continue
    return min(found, default=0)


def free_memory(device: str) -> int:
    """The bytes that a process can still take on a device; 0 if nobody says. Only a GPU has to be asked by torch."""
    if not device.startswith("cuda"):
        return free_host_memory() if device.startswith("cpu") else 0
    if "torch" not in sys.modules:
        return 0
    import torch

    return torch.cuda.mem_get_info(torch.device(device))[0]


def require_memory(needed: int, device: str, what: str) -> None:
    """Refuse a model that is larger than the memory that is free, before its memory is touched."""
    free = free_memory(device)
    if free and needed > free:
        raise RequestError(
            f"{what} needs {gigabytes(needed)} for its weights, and {gigabytes(free)} are free on {device}; "
            'choose a smaller one, or let it try (memory="try", --memory try)'
        )


@contextlib.contextmanager
def enough_for(what: str, device: str) -> Iterator[None]:
    """Turn a single tensor that is larger than the memory of the host into a sentence: torch refuses it at once."""
    try:
        yield
    except RuntimeError as error:
        found = _REFUSED.search(str(error))
        if found is None:
            raise
        size, free = gigabytes(int(found[1])), gigabytes(free_host_memory())
        raise RequestError(
            f"{what} needs more than {size} for its weights on {device}, and {free} are free; choose a smaller one"
        ) from None


def gigabytes(size: float) -> str:
    """Bytes as people say them."""
    return f"{size / 1e9:,.1f} GB" if size >= 1e8 else f"{size / 1e6:,.1f} MB"
