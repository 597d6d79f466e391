"""Where a run computes: `auto` settings become definite ones, once, and are written down."""

from __future__ import annotations

import contextlib
import os
import platform
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import torch

from trivium.errors import ConfigError
from trivium.parts.hardware import native_bf16
from trivium.parts.kernels import fp8
from trivium.training.recipe import Recipe

_PER_CORE = 4  # threads: a run from a larger machine may go on here with its own number, for the same bits


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
    cores = os.cpu_count() or 1
    if threads > _PER_CORE * cores:
        raise ConfigError(
            f"threads: {threads} is too many for the {cores} cores of this machine; "
            f"set threads={cores}, or 0 for the usual number"
        )
    return replace(recipe, device=str(device), precision=precision, stream=stream, compile=compiled, threads=threads)


def autocast(recipe: Recipe) -> Callable[[], AbstractContextManager[object]]:
    """The context of a forward pass: weights stay float32, products run in the recipe's precision."""
    if recipe.precision == "fp32":
        return contextlib.nullcontext
    kind = torch.device(recipe.device).type
    dtype = torch.float16 if recipe.precision == "fp16" else torch.bfloat16
    return lambda: torch.autocast(kind, dtype=dtype)


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
