"""Where a run computes: `auto` settings become definite ones, once, and are written down."""

from __future__ import annotations

import contextlib
import os
import platform
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch

from trivium.kernels.hardware import native_bf16
from trivium.training.machine import Gpu, Machine
from trivium.training.recipe import Recipe


def torch_machine() -> Machine:
    """The machine as torch sees it."""
    gpus: list[Gpu] = []
    if torch.cuda.is_available():
        for number in range(torch.cuda.device_count()):
            gpus.append(Gpu(torch.cuda.get_device_name(number), torch.cuda.get_device_capability(number)))
    return Machine(
        gpus=tuple(gpus),
        mps=torch.backends.mps.is_available(),
        bf16=native_bf16(torch.device("cpu")),
        cores=os.cpu_count() or 1,
    )


def choose(name: str) -> torch.device:
    """The device that `name` means; `auto` is cuda, then mps, then cpu."""
    name = str(name) if isinstance(name, torch.device) else name
    kind, _ = torch_machine().device(name)
    return torch.device(kind if name == "auto" else name)


def settle(recipe: Recipe) -> Recipe:
    """The recipe with everything decided that depends on this machine."""
    return torch_machine().settle(recipe, torch.get_num_threads())


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
