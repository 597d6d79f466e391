"""What this machine computes with, and what a recipe's `auto` settings mean on it; found out without torch.

Importing torch takes seconds, and a recipe that cannot run here shall be refused at once.
"""

from __future__ import annotations

import ctypes
import os
import platform
import re
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from trivium.errors import ConfigError, shown
from trivium.training.recipe import Recipe

_CPUINFO = Path("/proc/cpuinfo")
_DEVICE = re.compile(r"(cpu|cuda|mps)(?::(0|[1-9][0-9]{0,8}))?")  # no digits that torch does not read
_PER_CORE = 4  # threads: a run from a larger machine may go on here with its own number, for the same bits
_MAJOR, _MINOR = 75, 76  # attributes of a GPU: its compute capability


class Gpu(NamedTuple):
    """A GPU that torch can use."""

    name: str
    capability: tuple[int, int]


class Machine(NamedTuple):
    """What there is to compute with."""

    gpus: tuple[Gpu, ...] = ()
    mps: bool = False
    bf16: bool = False  # whether the CPU has instructions for bfloat16
    cores: int = 1

    def device(self, name: str) -> tuple[str, int]:
        """The kind and the number of the device that `name` means; `auto` is cuda, then mps, then cpu."""
        if isinstance(name, str) and name == "auto":
            name = "cuda" if self.gpus else "mps" if self.mps else "cpu"
        found = _DEVICE.fullmatch(name) if isinstance(name, str) else None
        if found is None:
            raise ConfigError(f"device: {shown(name)} is not a device; try auto, cpu, cuda or mps")
        kind, number = found[1], int(found[2] or 0)
        count = {"cuda": len(self.gpus), "mps": int(self.mps), "cpu": 1}[kind]
        if not count:
            raise ConfigError(f"device: there is no {kind} here; try device=auto or device=cpu")
        if number >= count:
            raise ConfigError(f"device: there is no {name} here, only {count} of them; count from {kind}:0")
        return kind, number

    def settle(self, recipe: Recipe, threads: int = 0) -> Recipe:
        """The recipe with everything decided that depends on the machine; `threads` are those that torch would use."""
        kind, number = self.device(recipe.device)
        name = recipe.device if recipe.device != "auto" else kind
        capability = self.gpus[number].capability if kind == "cuda" else (0, 0)
        native = capability >= (8, 0) or (kind == "cpu" and self.bf16)
        errors: list[str] = []
        if recipe.precision == "fp8" and capability < (8, 9):
            errors.append("precision: this device has no fp8 products (a GPU of compute capability 8.9); try bf16")
        if recipe.precision == "fp8" and recipe.fast == "off":
            errors.append("fast: fp8 products are fast modules' alone; set fast=on, or precision=bf16")
        if recipe.compile == "graphs" and kind != "cuda":
            errors.append("compile: graphs are recorded on a GPU; try compile=off")
        if recipe.precision == "bf16" and kind == "cuda" and not native:
            errors.append("precision: this GPU has no bf16 instructions (compute capability 8.0); try fp16")
        precision = recipe.precision if recipe.precision != "auto" else "bf16" if native else "fp32"
        mixed = precision in ("bf16", "fp8")
        if recipe.residual_dtype == "bf16" and not mixed:
            errors.append(
                f"residual_dtype: bf16 goes with precision bf16 or fp8, not {precision}; try residual_dtype=fp32"
            )
        if recipe.residual_dtype == "bf16" and recipe.fast == "off":
            errors.append(
                "residual_dtype: a bf16 residual stream is fast modules' alone; set fast=on, or residual_dtype=fp32"
            )
        if recipe.threads > _PER_CORE * self.cores:
            errors.append(
                f"threads: {recipe.threads} is too many for the {self.cores} cores of this machine; "
                f"set threads={self.cores}, or 0 for the usual number"
            )
        if errors:
            raise ConfigError(*errors)
        cuda = kind == "cuda"
        residual_dtype = (
            recipe.residual_dtype
            if recipe.residual_dtype != "auto"
            else "bf16"
            if cuda and mixed and recipe.fast == "on"
            else "fp32"
        )
        compiled = recipe.compile if recipe.compile != "auto" else "on" if cuda else "off"
        threads = recipe.threads or threads
        return replace(
            recipe, device=name, precision=precision, residual_dtype=residual_dtype, compile=compiled, threads=threads
        )


@cache
def this_machine() -> Machine:
    """The machine that this process runs on."""
    return Machine(
        gpus=tuple(_gpus()) if _has_cuda() else (),
        mps=platform.system() == "Darwin" and platform.machine() == "arm64",
        bf16=bool({"avx512_bf16", "amx_tile"} & _flags()),
        cores=os.cpu_count() or 1,
    )


def _has_cuda() -> bool:
    """Whether the installed torch was built for CUDA."""
    spec = find_spec("torch")
    folder = Path(spec.origin).parent / "lib" if spec is not None and spec.origin else None
    return folder is not None and any((folder / name).exists() for name in ("libtorch_cuda.so", "torch_cuda.dll"))


def _gpus() -> Iterator[Gpu]:
    """The GPUs that the driver shows to this process."""
    try:
        driver = ctypes.CDLL("nvcuda.dll" if platform.system() == "Windows" else "libcuda.so.1")
    except OSError:
        return
    count = ctypes.c_int()
    if driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count)):
        return
    for number in range(count.value):
        name, values = ctypes.create_string_buffer(256), (ctypes.c_int(), ctypes.c_int())
        failed = driver.cuDeviceGetName(name, len(name), number)
        for value, attribute in zip(values, (_MAJOR, _MINOR), strict=True):
            failed |= driver.cuDeviceGetAttribute(ctypes.byref(value), attribute, number)
        if not failed:
            yield Gpu(name.value.decode(errors="replace"), (values[0].value, values[1].value))


def _flags() -> set[str]:
    """What the first CPU can do, as Linux says it."""
    try:
        lines = _CPUINFO.read_text(errors="replace").splitlines()
    except OSError:
        return set()
    return next((set(line.split(":", 1)[1].split()) for line in lines if line.startswith("flags")), set())
