"""Matrices in bfloat16 beside those that learn in float32: a training step reads and writes half as much.

A product in bfloat16 needs its matrix in that precision, and gives the gradient of it in that precision too. Made from
the matrix in float32 in every step, and turned back, that is a pass over all weights each way, and clipping is another.
So the products of a step go with twins, which are leaves of their own; whoever moves the weights writes them anew.
Those in float8 are rounded from the twin.
"""

# O outputs of all layers of a product, I inputs

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple, TypeGuard

import torch
from torch import Tensor, nn

from trivium.fast.attention import FastAttention
from trivium.fast.feedforward import FastGlu, FastMlp
from trivium.fast.linear import FastLinear

Multiplying = FastAttention | FastGlu | FastMlp


class Pair(NamedTuple):
    """A weight that learns, its twin, and the gradient, which is the twin's."""

    weight: Tensor
    twin: Tensor
    gradient: Tensor


class Twins:
    """Those of a model; layers know of them only inside `used`, so that nobody else's gradient goes astray."""

    def __init__(self, model: nn.Module) -> None:
        self.scale = torch.ones((), device=next(model.parameters()).device)  # what gradients are to be multiplied by
        self._twins: list[tuple[Tensor, tuple[FastLinear, ...]]] = []
        for module in model.modules():
            if isinstance(module, Multiplying):
                for product in module.products:
                    layers = tuple(layer for layer in product if _learns(layer))
                    if len(layers) == len(product):
                        whole_OI = torch.cat([layer.weight.detach() for layer in layers])
                        self._twins.append((whole_OI.bfloat16().requires_grad_(), layers))
        self._seen, self._trusted = self._versions(), True

    def refresh(self) -> None:
        """Take over what others have written into the weights since, as when a checkpoint is loaded.

        What optimizers write torch does not count. The kernel of kernels/adam.py has written the twins as well; for
        the others there is `outdate`.
        """
        versions = self._versions()
        if self._trusted and versions == self._seen:
            return
        self._seen = versions
        with torch.no_grad():
            for twin_OI, layers in self._twins:
                for part, layer in zip(_parts(twin_OI, layers), layers, strict=True):
                    part.copy_(layer.weight)

    def outdate(self) -> None:
        """Weights that have a gradient of their own are about to be moved without their twins.

        From then on every step takes them over: a recorded step moves them again, and does not say so.
        """
        if any(layer.weight.grad is not None for _, layers in self._twins for layer in layers):
            self._trusted = False

    @contextmanager
    def used(self) -> Iterator[None]:
        """Let the products that are made inside go with the twins."""
        self._tell(there=True)
        try:
            yield
        finally:
            self._tell(there=False)

    def _tell(self, *, there: bool) -> None:
        for twin_OI, layers in self._twins:
            own = any(_hooked(layer.weight) for layer in layers)  # a hook on a weight sees the gradient of that weight
            for layer in layers:
                layer.twin = twin_OI if there and not own else None

    def gradients(self) -> list[Tensor]:
        """Of all twins that have one."""
        return [twin_OI.grad for twin_OI, _ in self._twins if twin_OI.grad is not None]

    def pairs(self) -> Iterator[Pair]:
        """The weights whose gradients are with their twins."""
        for twin_OI, layers in self._twins:
            if twin_OI.grad is not None:
                parts = zip(layers, _parts(twin_OI.detach(), layers), _parts(twin_OI.grad, layers), strict=True)
                for layer, twin, gradient in parts:
                    yield Pair(layer.weight, twin, gradient)

    def clear(self) -> None:
        """Forget the gradients."""
        for twin_OI, _ in self._twins:
            twin_OI.grad = None

    def drop(self) -> None:
        """Give their memory back; all goes on without them, until a job is made anew."""
        self._twins, self._seen = [], []

    def _versions(self) -> list[int]:
        return [layer.weight._version for _, layers in self._twins for layer in layers]


def _learns(layer: nn.Module) -> TypeGuard[FastLinear]:
    return type(layer) is FastLinear and layer.weight.requires_grad and layer.weight.dtype == torch.float32


def _hooked(weight: Tensor) -> bool:
    return bool(weight._backward_hooks or weight._post_accumulate_grad_hooks)


def _parts(whole_OI: Tensor, layers: tuple[FastLinear, ...]) -> tuple[Tensor, ...]:
    return torch.split(whole_OI, [layer.out_features for layer in layers])
