"""Where a run computes: `auto` settings become definite ones, once, and are written down."""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from trivium.errors import ConfigError
from trivium.parts.hardware import native_bf16
from trivium.parts.kernels import fp8
from trivium.training.recipe import Recipe

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # of glibc's mallopt


def choose(name: str) -> torch.device:
    """The device that `name` means; `auto` is cuda, then mps, then cpu."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ConfigError(f"device: {name!r} is not a device; try auto, cpu, cuda or mps") from None
    there = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    if not there.get(device.type, False):
        raise ConfigError(f"device: there is no {device.type} here; try device=auto or device=cpu")
    return device


def current(device: torch.device) -> None:
    """Let this thread work on the GPU that is named: graphs, events and pinned memory go by what is current."""
    if device.type == "cuda" and device.index is not None:
        torch.cuda.set_device(device)


def settle(recipe: Recipe) -> Recipe:
    """The recipe with everything decided that depends on this machine."""
    device = choose(recipe.device)
    cuda = device.type == "cuda"
    errors: list[str] = []
    if recipe.precision == "fp8" and not fp8.available(device):
        errors.append("precision: this device has no fp8 products (a GPU of compute capability 8.9); try bf16")
    if recipe.compile == "graphs" and not cuda:
        errors.append("compile: graphs are recorded on a GPU; try compile=off")
    native = native_bf16(device)
    if recipe.precision == "bf16" and cuda and not native:
        errors.append("precision: this GPU has no bf16 instructions (compute capability 8.0); try fp16")
    precision = recipe.precision if recipe.precision != "auto" else "bf16" if native else "fp32"
    mixed = precision in ("bf16", "fp8")
    if recipe.stream == "bf16" and not mixed:
        errors.append(f"stream: bf16 goes with precision bf16 or fp8, not {precision}; try stream=fp32")
    if errors:
        raise ConfigError(*errors)
    stream = recipe.stream if recipe.stream != "auto" else "bf16" if cuda and mixed else "fp32"
    compiled = recipe.compile if recipe.compile != "auto" else "on" if cuda else "off"
    threads = recipe.threads or torch.get_num_threads()
    return replace(recipe, device=str(device), precision=precision, stream=stream, compile=compiled, threads=threads)


def autocast(recipe: Recipe) -> Callable[[], AbstractContextManager[object]]:
    """The context of a forward pass: weights stay float32, products run in the recipe's precision."""
    if recipe.precision == "fp32":
        return contextlib.nullcontext
    kind = torch.device(recipe.device).type
    dtype = torch.float16 if recipe.precision == "fp16" else torch.bfloat16
    return lambda: torch.autocast(kind, dtype=dtype)


def keep_memory(device: torch.device) -> None:
    """Let the allocator keep what it has: giving pages back after every step costs a CPU run 7 % of its time."""
    if device.type == "cpu" and platform.system() == "Linux":
        with contextlib.suppress(OSError, AttributeError):  # a C library without mallopt does as it always did
            library = ctypes.CDLL(None)
            library.mallopt(_MMAP_THRESHOLD, 2**30)
            library.mallopt(_TRIM_THRESHOLD, 2**31 - 1)


def repeatable(recipe: Recipe) -> None:
    """Let a GPU compute the same bits every time, if the recipe asks for it; a CPU does so anyway."""
    if recipe.deterministic == "on":
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # without it cuBLAS sums in any order
        torch.use_deterministic_algorithms(True)


def keep_compiled(runs: Path) -> None:
    """Let the compiler keep its results beside the runs, unless the user has chosen another place."""
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str((runs / ".compile").resolve()))
    # Or else it differentiates a step with a function of our own anew each time. The graphs of both its passes are part
    # of the key, so another version of it is another entry.
    from torch._functorch import config

    with contextlib.suppress(AttributeError):  # a torch that has another name for it is slower to start
        config.autograd_cache_allow_custom_autograd_functions = True


def environment(recipe: Recipe) -> dict[str, Any]:
    """What the numbers of a run depend on beside its recipe."""
    device = torch.device(recipe.device)
    return {
        "trivium": _version(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "platform": platform.platform(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or device.type,
        "cores": os.cpu_count(),
        "threads": recipe.threads,
    }


def _version() -> str:
    from trivium import __version__

    return __version__
