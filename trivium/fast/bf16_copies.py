"""bf16 working copies of fp32 master weights: a training step reads and writes half as much.

A bf16 matmul needs its weight in bf16 and returns the gradient in bf16. Casting the fp32 weight in every step and the
gradient back is a pass over all weights each way, and clipping is another. So matmuls use bf16 copies, which are leaves
of their own; the optimizer updates both. fp8 products quantise the copy.
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
from trivium.parts.sharded import is_sharded


class WeightCopy(NamedTuple):
    """A master weight, its copy, and the copy's gradient."""

    weight: Tensor
    copy: Tensor
    gradient: Tensor


class Bf16Copies:
    """The copies of a model; layers see them only inside `used`, so that no other backward pass fills them."""

    def __init__(self, model: nn.Module) -> None:
        self.scale = torch.ones((), device=next(model.parameters()).device)  # of the gradients, set by clipping
        self._copies: list[tuple[Tensor, tuple[FastLinear, ...]]] = []
        for module in model.modules():
            if isinstance(module, FastAttention | FastGlu | FastMlp):
                for group in module.matmul_groups:
                    layers = tuple(layer for layer in group if _is_trained(layer))
                    if len(layers) == len(group):
                        whole_OI = torch.cat([layer.weight.detach() for layer in layers])
                        self._copies.append((whole_OI.bfloat16().requires_grad_(), layers))
        self._seen, self._trusted = self._versions(), True

    def refresh(self) -> None:
        """Copy weights that were written since, as when a checkpoint is loaded.

        torch counts no version for what optimizers write. The kernel of kernels/adam.py has written the copies as well;
        for other optimizers there is `mark_stale`.
        """
        versions = self._versions()
        if self._trusted and versions == self._seen:
            return
        self._seen = versions
        with torch.no_grad():
            for copy_OI, layers in self._copies:
                for part, layer in zip(_split(copy_OI, layers), layers, strict=True):
                    part.copy_(layer.weight)

    def mark_stale(self) -> None:
        """Weights that have a gradient of their own are about to be updated without their copies.

        From then on every step copies them: a captured step updates them again and does not say so.
        """
        if any(layer.weight.grad is not None for _, layers in self._copies for layer in layers):
            self._trusted = False

    @contextmanager
    def used(self) -> Iterator[None]:
        """Let the matmuls inside use the copies."""
        self._attach(there=True)
        try:
            yield
        finally:
            self._attach(there=False)

    def _attach(self, *, there: bool) -> None:
        for copy_OI, layers in self._copies:
            # a layer may have been parametrised since, and a hook sees the gradient of its own weight
            usable = all(_is_trained(layer) and not _has_hooks(layer.weight) for layer in layers)
            for layer in layers:
                layer.bf16_copy = copy_OI if there and usable else None

    def gradients(self) -> list[Tensor]:
        """Of all copies that have one."""
        return [copy_OI.grad for copy_OI, _ in self._copies if copy_OI.grad is not None]

    def pairs(self) -> Iterator[WeightCopy]:
        """The weights whose gradients are with their copies."""
        for copy_OI, layers in self._copies:
            if copy_OI.grad is not None:
                parts = zip(layers, _split(copy_OI.detach(), layers), _split(copy_OI.grad, layers), strict=True)
                for layer, copy, gradient in parts:
                    yield WeightCopy(layer.weight, copy, gradient)

    def clear(self) -> None:
        """Drop the gradients."""
        for copy_OI, _ in self._copies:
            copy_OI.grad = None

    def drop(self) -> None:
        """Free the memory of all copies; training goes on without them, until a job is made anew."""
        self._copies, self._seen = [], []

    def _versions(self) -> list[int]:
        return [layer.weight._version for _, layers in self._copies for layer in layers]


def _is_trained(layer: nn.Module) -> TypeGuard[FastLinear]:
    if type(layer) is not FastLinear or is_sharded(layer.weight):
        return False
    return layer.weight.requires_grad and layer.weight.dtype == torch.float32


def _has_hooks(weight: Tensor) -> bool:
    return bool(weight._backward_hooks or weight._post_accumulate_grad_hooks)


def _split(whole_OI: Tensor, layers: tuple[FastLinear, ...]) -> tuple[Tensor, ...]:
    return torch.split(whole_OI, [layer.out_features for layer in layers])
