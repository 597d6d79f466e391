"""Loss scaling for fp16, whose smallest numbers are too large for small gradients (spec: training §4)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from trivium.parts.sharded import own_shard

START, PATIENCE = 2.0**16, 2000


class Scaler(Protocol):
    """Enlarges the loss before the backward pass and takes the factor out of the gradients after it."""

    @property
    def scale(self) -> float:
        """The factor of the next backward pass; infinite where nothing is scaled."""

    def scale_loss(self, loss: Tensor) -> Tensor: ...
    def unscale(self, parameters: Iterable[nn.Parameter]) -> None: ...

    def overflowed(self, loss: Tensor, norm: Tensor) -> bool:
        """Whether this step's gradients went past the end of fp16, which is no fault of the model."""

    def state(self) -> dict[str, Any]: ...
    def load(self, state: Mapping[str, Any]) -> None: ...


class Unscaled:
    """What fp32 and bf16 need: nothing, and no look at the device."""

    @property
    def scale(self) -> float:
        return math.inf

    def scale_loss(self, loss: Tensor) -> Tensor:
        return loss

    def unscale(self, parameters: Iterable[nn.Parameter]) -> None:
        pass

    def overflowed(self, loss: Tensor, norm: Tensor) -> bool:
        return False

    def state(self) -> dict[str, Any]:
        return {}

    def load(self, state: Mapping[str, Any]) -> None:
        pass


class Dynamic:
    """Twice the scale after `patience` clean steps, half of it after an overflow.

    The host reads one flag per step, because the schedule counts only the updates that were made. A loss that is not
    finite itself, or an overflow at a scale below 1, is trouble of another kind and not called an overflow.
    """

    def __init__(self, scale: float = START, patience: int = PATIENCE) -> None:
        self.scale = scale
        self.patience = patience
        self.clean = 0  # steps since the scale last changed

    def scale_loss(self, loss: Tensor) -> Tensor:
        return loss * self.scale

    def unscale(self, parameters: Iterable[nn.Parameter]) -> None:
        gradients = [own_shard(parameter.grad) for parameter in parameters if parameter.grad is not None]
        torch._foreach_mul_(gradients, 1 / self.scale)

    def overflowed(self, loss: Tensor, norm: Tensor) -> bool:
        sound, finite = torch.isfinite(torch.stack([loss, norm.to(loss.dtype)])).tolist()
        if finite:
            self.clean += 1
            if self.clean == self.patience:
                self.scale, self.clean = self.scale * 2, 0
            return False
        excused = sound and self.scale >= 1
        if sound:
            self.scale, self.clean = self.scale / 2, 0
        return excused

    def state(self) -> dict[str, Any]:
        return {"scale": self.scale, "clean": self.clean}

    def load(self, state: Mapping[str, Any]) -> None:
        if state:  # none, if the run was not fp16 until now
            self.scale, self.clean = float(state["scale"]), int(state["clean"])


def scaler(precision: str) -> Scaler:
    """The scaler that a precision needs."""
    return Dynamic() if precision == "fp16" else Unscaled()
