"""What stands between a run and trouble: signals, numbers that are not finite, memory that ran out."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterable
from types import FrameType, TracebackType
from typing import Any

import torch
from torch import Tensor, nn


class Signals:
    """`with Signals() as signals:` — the first Ctrl-C or SIGTERM is noted for the loop, a second one exits at once."""

    def __init__(self) -> None:
        self.received = 0
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Signals:
        if threading.current_thread() is threading.main_thread():  # only there may handlers be set
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.received:
            os._exit(128 + number)
        self.received = number


class Soundness:
    """Decides on the device, without waiting for it, whether an update may move the weights.

    With the policy `stop` nothing moves after the first bad step; with `skip` only the bad steps themselves are lost.
    """

    def __init__(self, policy: str, device: torch.device) -> None:
        self.policy = policy
        self.sound = torch.ones((), dtype=torch.bool, device=device)

    def allow(self, loss: Tensor, norm: Tensor) -> Tensor:
        """True on the device if loss and gradient norm are finite (and, to `stop`, always were)."""
        finite = torch.isfinite(loss) & torch.isfinite(norm)
        if self.policy == "stop":
            finite = finite & self.sound
            self.sound = finite
        return finite


def clip(parameters: Iterable[nn.Parameter], limit: float) -> Tensor:
    """The global gradient norm in float32 before clipping; gradients are scaled down to `limit` (0: left alone)."""
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    norm = torch.nn.utils.get_total_norm(gradients)
    if limit:
        # a non-finite norm makes the gradients useless, but then the update is not allowed anyway
        scale = (limit / (norm + 1e-6)).clamp(max=1.0)
        torch._foreach_mul_(gradients, scale)
    return norm


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an exception means that the device or the host has no memory left."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and "can't allocate memory" in str(error)
