"""What a device can do and what a side takes of it: the two ceilings, and the peak of memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from bench.table import wait

STATUS = Path("/proc/self/status")
CLEAR = Path("/proc/self/clear_refs")


class Ceilings(NamedTuple):
    """Measured in this run: operations of a large matrix product, and bytes of a large copy, read and written."""

    flops: float
    bandwidth: float


def ceilings(device: torch.device, clock: Callable[[], float], *, tiny: bool = False) -> Ceilings:
    """A product of 8192 x 8192 bf16 matrices on a GPU, elsewhere 2048 x 2048 float32 ones; a copy of 1 GiB or 1/8."""
    cuda = device.type == "cuda"
    size = 128 if tiny else 8192 if cuda else 2048
    dtype = torch.bfloat16 if cuda else torch.float32
    generator = torch.Generator(device).manual_seed(0)
    first, second = (torch.randn(size, size, dtype=dtype, device=device, generator=generator) for _ in range(2))
    many = 1 << (16 if tiny else 30 if cuda else 27)
    source = torch.empty(many, dtype=torch.uint8, device=device).random_(generator=generator)
    target = torch.empty_like(source)
    product = _fastest(lambda: torch.mm(first, second), device, clock)
    copy = _fastest(lambda: target.copy_(source), device, clock)
    return Ceilings(2 * size**3 / product, 2 * many / copy)


def _fastest(run: Callable[[], object], device: torch.device, clock: Callable[[], float]) -> float:
    """The least seconds of one run: a ceiling is what was reached, and a GPU that gets hot slows down.

    Several in a row on a GPU, since one alone is over before it has left its rest.
    """
    times, tries = (5, 12) if device.type == "cuda" else (1, 5)
    found = []
    for _ in range(tries):
        wait(device)
        start = clock()
        for _ in range(times):
            run()
        wait(device)
        found.append((clock() - start) / times)
    return min(found)


def peak(device: torch.device, others: float, run: Callable[[], object]) -> float | None:
    """The most bytes that are held at a time while a side runs, without those of `others`.

    On a GPU these are tensors, and what CUDA graphs keep for theirs between replays; `run` records none any more, or
    theirs would be counted twice. On the CPU pages, so that it says more than it should by what the allocator keeps.
    """
    if device.type == "cuda":
        wait(device)
        torch.cuda.reset_peak_memory_stats(device)
        run()
        wait(device)
        return torch.cuda.max_memory_allocated(device) + _graphs() - others
    if CLEAR.exists():
        CLEAR.write_text("5")  # the highest mark begins anew
    run()
    return _resident("VmHWM") - others if CLEAR.exists() else None


def recorded(segments: Sequence[Mapping[str, Any]]) -> int:
    """The bytes of an allocator's segments that belong to graphs and hold no tensor now: a replay writes there."""
    own = [segment for segment in segments if tuple(segment.get("segment_pool_id", (0, 0))) != (0, 0)]
    return sum(segment["total_size"] - segment["allocated_size"] for segment in own)


def held(device: torch.device) -> float:
    """The bytes that are held now."""
    if device.type == "cuda":
        wait(device)
        return torch.cuda.memory_allocated(device) + _graphs()
    return _resident("VmRSS")


def _graphs() -> int:
    return recorded(torch.cuda.memory_snapshot())  # type: ignore[no-untyped-call]


def size(model: nn.Module) -> int:
    """The bytes of a model's weights."""
    return sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())


def _resident(name: str) -> float:
    lines = STATUS.read_text().splitlines() if STATUS.is_file() else []
    return sum(float(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))
