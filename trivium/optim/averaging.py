"""Averaged weights: a second set that follows the trained one and is often the better model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Protocol

import torch
from torch import Tensor, nn

from trivium.errors import CheckpointError
from trivium.optim.groups import trainable
from trivium.optim.options import Ema
from trivium.parts.sharded import fill, is_sharded, own_shard


class Average(Protocol):
    """Follows the weights of one model; `tensors` are the averaged weights under the names of the trained ones."""

    def share(self, step: int) -> float:
        """How much of the weights goes into the average after update `step`: a function of that alone."""

    def follow(self, share: float | Tensor, finite: Tensor) -> None:
        """Take in a share of the weights as they are, unless the update was not finite."""

    def compile(self) -> None:
        """Let the compiler make one pass over memory of it."""

    def reset(self) -> None:
        """Begin again from the weights as they are now: they were loaded, and no average came with them."""

    def swapped(self, model: nn.Module) -> AbstractContextManager[None]:
        """The averaged weights in `model` for as long as the context lasts, then its own again bit for bit."""

    def tensors(self) -> dict[str, Tensor]: ...
    def load(self, tensors: dict[str, Tensor]) -> None: ...


class Unaveraged:
    def share(self, step: int) -> float:
        return 0.0

    def follow(self, share: float | Tensor, finite: Tensor) -> None:
        """Nothing: there is no average."""

    def compile(self) -> None:
        """Nothing: there is no average."""

    def reset(self) -> None:
        """Nothing: there is no average."""

    def swapped(self, model: nn.Module) -> AbstractContextManager[None]:
        return nullcontext()

    def tensors(self) -> dict[str, Tensor]:
        return {}

    def load(self, tensors: dict[str, Tensor]) -> None:
        """Nothing: a run may go on without the average that it had."""


class MovingAverage:
    """A float32 copy of every trainable weight, tied ones once."""

    def __init__(self, options: Ema, model: nn.Module) -> None:
        self.options = options
        self.names = {weight.name: weight.parameter for weight in trainable(model)}
        self.shadow = {name: parameter.detach().to(torch.float32, copy=True) for name, parameter in self.names.items()}
        self.sharded = any(is_sharded(parameter) for parameter in self.names.values())
        self.compiled, self._follow = False, _follow

    def share(self, step: int) -> float:
        return 1 - self.options.remains(step)

    @torch.no_grad()
    def follow(self, share: float | Tensor, finite: Tensor) -> None:
        if isinstance(share, float) and not share:
            return
        if self.compiled and not isinstance(share, Tensor):  # a number would be a constant of the program
            share = torch.full((), share, device=finite.device)
        averaged: list[Tensor] = [*self.shadow.values()]
        weights: list[Tensor] = [*self.names.values()]
        if self.sharded:
            averaged, weights = [own_shard(one) for one in averaged], [own_shard(one) for one in weights]
        self._follow(averaged, weights, share, finite)

    def compile(self) -> None:
        self.compiled, self._follow = True, torch.compile(_follow, dynamic=False)

    @torch.no_grad()
    def reset(self) -> None:
        for name, parameter in self.names.items():
            self.shadow[name].copy_(parameter)

    @contextmanager
    def swapped(self, model: nn.Module) -> Iterator[None]:
        own = {name: parameter for name, parameter in self.names.items() if name in self.shadow}
        if self.sharded:  # FSDP2 may hold gathered copies of what is exchanged here
            getattr(model, "reshard", lambda: None)()
        # copied, not exchanged: compiled code and the optimizer hold on to the memory of the weights
        held = {name: parameter.detach().clone() for name, parameter in own.items()}
        try:
            _fill(own, self.shadow)
            yield
        finally:
            _fill(own, held)

    def tensors(self) -> dict[str, Tensor]:
        return dict(self.shadow)

    def load(self, tensors: dict[str, Tensor]) -> None:
        for name, tensor in self.shadow.items():
            if name not in tensors:
                raise CheckpointError(
                    f"the checkpoint has no averaged weight {name}: it was written without average=ema"
                )
            if tensors[name].shape != tensor.shape:
                raise CheckpointError(
                    f"the checkpoint's averaged weight {name} has shape {list(tensors[name].shape)}, "
                    f"not {list(tensor.shape)}"
                )
        for name, tensor in self.shadow.items():
            fill(tensor, tensors[name])


def _follow(shadow: list[Tensor], weights: list[Tensor], share: float | Tensor, finite: Tensor) -> None:
    # not a lerp: its weight would be a number of the host, and `finite` is known on the device alone
    moves = torch._foreach_sub([weight.float() for weight in weights], shadow)
    torch._foreach_mul_(moves, finite.float() * share)
    torch._foreach_add_(shadow, moves)


@torch.no_grad()
def _fill(parameters: dict[str, nn.Parameter], values: dict[str, Tensor]) -> None:
    for name, parameter in parameters.items():
        parameter.copy_(values[name])
