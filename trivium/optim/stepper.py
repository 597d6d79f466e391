"""What every optimizer is, and what it keeps beside the weights.

`step` takes a `healthy` flag as a tensor: where it is 0 nothing moves, neither weights nor state, and the host need
not wait to know. State goes in and out as plain named tensors, so that a checkpoint needs no pickle.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import torch
from torch import Tensor

from trivium.errors import CheckpointError


class Optimizer(Protocol):
    """Moves the weights; `factor` is the schedule's share of each group's peak rate, a number or on the device."""

    def step(self, factor: float | Tensor, healthy: Tensor) -> None: ...

    def compile(self) -> None:
        """Let the compiler make one program of what is not fused already."""

    def tensors(self) -> dict[str, Tensor]: ...
    def load(self, tensors: dict[str, Tensor]) -> None: ...


class State:
    """What an optimizer remembers of each weight: named tensors, changed in place."""

    def __init__(self, tensors: dict[str, dict[str, Tensor]]) -> None:
        self.of = tensors  # the name of a weight -> what is kept -> the tensor

    def tensors(self) -> dict[str, Tensor]:
        return {f"{name}.{key}": tensor for name, key, tensor in self._each()}

    @torch.no_grad()
    def load(self, tensors: dict[str, Tensor]) -> None:
        """Copy `tensors` in; if one is missing or has another shape, none."""
        for name, key, tensor in self._each():
            given = tensors.get(f"{name}.{key}")
            if given is None:
                raise CheckpointError(
                    f"the checkpoint has no optimizer state {key} for {name}: another optimizer wrote it"
                )
            if given.shape != tensor.shape:
                raise CheckpointError(
                    f"the checkpoint's optimizer state {key} for {name} has shape {list(given.shape)}, "
                    f"not {list(tensor.shape)}: it belongs to another model"
                )
        for name, key, tensor in self._each():
            tensor.copy_(tensors[f"{name}.{key}"])

    def _each(self) -> Iterator[tuple[str, str, Tensor]]:
        return ((name, key, tensor) for name, kept in self.of.items() for key, tensor in kept.items())


class Both:
    """Two optimizers over disjoint weights, as one."""

    def __init__(self, first: Optimizer, second: Optimizer) -> None:
        self.pair = (first, second)

    def step(self, factor: float | Tensor, healthy: Tensor) -> None:
        for optimizer in self.pair:
            optimizer.step(factor, healthy)

    def compile(self) -> None:
        for optimizer in self.pair:
            optimizer.compile()

    def tensors(self) -> dict[str, Tensor]:
        return {name: tensor for optimizer in self.pair for name, tensor in optimizer.tensors().items()}

    def load(self, tensors: dict[str, Tensor]) -> None:
        for optimizer in self.pair:
            optimizer.load(tensors)
