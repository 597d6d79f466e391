"""What a device can do, and computes in, that decides which of two ways is taken."""

from __future__ import annotations

import contextlib
import ctypes
import os
from importlib.util import find_spec

import torch
from torch import Tensor

TRITON = find_spec("triton") is not None  # it comes with torch for CUDA, on Linux
INTERPRETED = TRITON and os.environ.get("TRITON_INTERPRET") == "1"  # its own switch: kernels run on the CPU, for tests


def can_launch(x: Tensor) -> bool:
    """Whether Triton's kernels run where `x` is."""
    return TRITON and (x.device.type == "cuda" or INTERPRETED)


def native_bf16(device: torch.device) -> bool:
    """Whether products in bfloat16 have instructions of their own here; emulated they are 30 times slower."""
    if device.type == "cuda":
        return torch.cuda.get_device_capability(device) >= (8, 0)  # before, not even a cast has one
    if device.type != "cpu":
        return False
    checks = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
    return any(getattr(torch.cpu, name, lambda: False)() for name in checks)


def working(x: Tensor) -> torch.dtype:
    """What a product with `x` is computed in: autocast's precision where it is on."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype


_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # parameters of glibc's mallopt


def set_allocator(*, keep: bool) -> None:
    """Whether glibc's allocator keeps freed pages; `keep=False` sets its own thresholds, as high as they rise."""
    mmap, trim = (2**30, 2**31 - 1) if keep else (2**25, 2**26)
    with contextlib.suppress(OSError, AttributeError, TypeError):  # another C library
        library = ctypes.CDLL(None)
        library.mallopt(_MMAP_THRESHOLD, mmap)
        library.mallopt(_TRIM_THRESHOLD, trim)


def trim_heap() -> None:
    """Return freed memory to the system: malloc keeps the holes between blocks."""
    with contextlib.suppress(OSError, AttributeError, TypeError):  # another C library
        ctypes.CDLL(None).malloc_trim(0)
