"""What stands between a run and trouble: numbers that are not finite, memory that ran out."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import torch
from torch import Tensor, nn

from trivium.errors import OutOfMemory
from trivium.fast.twins import Twins
from trivium.training.recipe import Recipe


class Soundness:
    """Decides on the device, without waiting for it, whether an update may move the weights.

    With the policy `stop` nothing moves after the first bad step; with `skip` and `rollback` only the bad steps
    themselves are lost, and what `rollback` makes of them is decided when the numbers are read.
    """

    def __init__(self, policy: str, device: torch.device) -> None:
        self.policy = policy
        self.sound = torch.ones((), dtype=torch.bool, device=device)

    def allow(self, loss: Tensor, norm: Tensor) -> Tensor:
        """True on the device if loss and gradient norm are finite (and, to `stop`, always were)."""
        finite = torch.isfinite(loss) & torch.isfinite(norm)
        if self.policy == "stop":
            finite = finite & self.sound
            self.sound.copy_(finite)  # in place: a recorded step finds it where it was
        return finite


def clip(parameters: Iterable[nn.Parameter], limit: float, twins: Twins | None = None) -> Tensor:
    """The global gradient norm in float32 before clipping; gradients are scaled down to `limit` (0: left alone).

    Those of `twins` are left as they are, and whoever moves these scales them in passing.
    """
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    norm = torch.nn.utils.get_total_norm(gradients)
    halves = [] if twins is None else twins.gradients()
    if halves:
        norms = torch._foreach_norm(halves, 2, torch.float32)  # in their own precision a norm would have two digits
        norm = torch.linalg.vector_norm(torch.stack([norm, *norms]))
    if limit:
        # a non-finite norm makes the gradients useless, but then the update is not allowed anyway
        scale = (limit / (norm + 1e-6)).clamp(max=1.0)
        torch._foreach_mul_(gradients, scale)
        if twins is not None:
            twins.scale = scale
    return norm


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an exception means that the device or the host has no memory left."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    signs = ("can't allocate memory", "CUDA error: out of memory", "CUBLAS_STATUS_ALLOC_FAILED")
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in signs)


@contextlib.contextmanager
def enough_memory(recipe: Recipe, folder: Path | None = None) -> Iterator[None]:
    """Turn running out of memory into a sentence that names the setting to change."""
    try:
        yield
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        micro = recipe.micro
        what = "tokens" if recipe.batch.tokens else f"rows of {recipe.data.length or recipe.model.context} tokens"
        used = f"out of memory on {recipe.device} with {micro} {what} at a time; "
        again = f" and go on with `trivium train {folder}`" if folder is not None else ""
        if micro > 1:
            raise OutOfMemory(f"{used}set batch.micro={micro // 2}{again}") from error
        raise OutOfMemory(f"{used}start a new run with a smaller {recipe.data.limit} or model.width") from error


_SMALL = 2 << 20  # KiB of a process that need not give anything back


def give_back() -> None:
    """Return what was freed to the system, in a large process on Linux.

    The C library keeps it in holes between what is still there; bert-large took 14.9 GB with it and 13.9 without, and
    no longer.
    """
    if sys.platform == "linux":
        import resource

        if resource.getrusage(resource.RUSAGE_SELF).ru_maxrss > _SMALL:
            _trim()(0)


@functools.cache
def _trim() -> Callable[[int], object]:
    """glibc's malloc_trim; another C library has none."""
    trim: Callable[[int], object] | None = getattr(ctypes.CDLL(None), "malloc_trim", None)
    return trim or (lambda padding: None)
