"""What every optimizer is, and what it keeps beside the weights.

`step` takes a `finite` flag as a tensor: where it is 0 nothing moves, neither weights nor state, and the host need
not wait to know. State goes in and out as plain named tensors, so that a checkpoint needs no pickle.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn

from trivium.errors import CheckpointError
from trivium.parts.sharded import fill, is_sharded, own_shard, whole


class Optimizer(ABC):
    """Owns the gradients of the weights it was given: clears them, clips them, moves the weights by them.

    The matrices that a step multiplies by need not be the weights themselves: `working_weights` is around forward and
    backward pass, and only an optimizer with copies of the weights does something there.
    """

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self.parameters = parameters  # in the model's order, which the bits of a norm depend on
        self.sharded = any(is_sharded(parameter) for parameter in parameters)  # among processes, all or some of them

    @abstractmethod
    def step(self, factor: float | Tensor, finite: Tensor) -> None:
        """Move the weights; `factor` is the schedule's share of each group's peak rate, a number or on the device."""

    @abstractmethod
    def tensors(self) -> dict[str, Tensor]: ...

    @abstractmethod
    def load(self, tensors: dict[str, Tensor]) -> None: ...

    def gradients(self) -> list[Tensor]:
        return [parameter.grad for parameter in self.parameters if parameter.grad is not None]

    def zero_grad(self) -> None:
        for parameter in self.parameters:
            parameter.grad = None

    def clip(self, limit: float) -> Tensor:
        """The global gradient norm before clipping; gradients are scaled down to `limit` (0: left alone)."""
        gradients = self.gradients()
        norm = global_norm(gradients, sharded=self.sharded)
        if limit:
            scaled = [own_shard(gradient) for gradient in gradients] if self.sharded else gradients
            torch._foreach_mul_(scaled, clip_factor(norm, limit))
        return norm

    def working_weights(self, micro_batches: int) -> AbstractContextManager[None]:
        """The model multiplies by copies of its weights inside, if this optimizer keeps some for so many batches."""
        return nullcontext()

    def refresh(self) -> None:  # noqa: B027 - few have something to do
        """Bring copies of the weights up to date, as after loading; `working_weights` does so too."""

    def free_working_weights(self) -> None:  # noqa: B027 - few have something to do
        """Give back the memory of such copies for good."""

    def compile(self) -> None:  # noqa: B027 - few have something to do
        """Let the compiler make one program of what is not fused already."""


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
            fill(tensor, tensors[f"{name}.{key}"])

    def _each(self) -> Iterator[tuple[str, str, Tensor]]:
        return ((name, key, tensor) for name, kept in self.of.items() for key, tensor in kept.items())


class Both(Optimizer):
    """Two optimizers over disjoint weights, as one; `parameters` are those of both in the model's order."""

    def __init__(self, parameters: Sequence[nn.Parameter], first: Optimizer, second: Optimizer) -> None:
        super().__init__(parameters)
        self.pair = (first, second)

    def step(self, factor: float | Tensor, finite: Tensor) -> None:
        for optimizer in self.pair:
            optimizer.step(factor, finite)

    def compile(self) -> None:
        for optimizer in self.pair:
            optimizer.compile()

    def tensors(self) -> dict[str, Tensor]:
        return {name: tensor for optimizer in self.pair for name, tensor in optimizer.tensors().items()}

    def load(self, tensors: dict[str, Tensor]) -> None:
        for optimizer in self.pair:
            optimizer.load(tensors)


def global_norm(gradients: Sequence[Tensor], *, sharded: bool = False) -> Tensor:
    """The norm over all gradients; where some are `sharded` that of the whole ones, the same in every process."""
    return _gathered_norm(gradients) if sharded else torch.nn.utils.get_total_norm(gradients)


def _gathered_norm(gradients: Sequence[Tensor]) -> Tensor:
    """The same of DTensors and other tensors together, which torch adds up only apart."""
    parts = [[one for one in gradients if is_sharded(one) == apart] for apart in (False, True)]
    norms = [whole(torch.nn.utils.get_total_norm(part)) for part in parts if part]
    return torch.linalg.vector_norm(torch.stack(norms)) if len(norms) > 1 else torch.nn.utils.get_total_norm(norms)


def clip_factor(norm: Tensor, limit: float) -> Tensor:
    """What gradients of this norm are multiplied by, so that it is at most `limit`."""
    # a norm that is not finite makes the gradients useless, but then the guard allows no update
    return (limit / (norm + 1e-6)).clamp(max=1.0)
