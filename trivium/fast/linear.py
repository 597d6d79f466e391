"""Linear layers: bf16 copies and fp8 products in training on a GPU, oneDNN and all threads on a CPU."""

# O outputs of all layers of a product, I inputs

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeGuard, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trivium.fast.hooks import has_hooks
from trivium.kernels import fp8, onednn
from trivium.kernels.hardware import can_launch, working
from trivium.parts.linear import Linear
from trivium.parts.roles import NARROW
from trivium.parts.sharded import is_sharded

_SHARED = 100_000  # weights from which on threads share the product with one row


@final
class FastLinear(Linear):
    """`Linear` by the fastest matmul of its device."""

    fp8 = False  # products in float8 while training
    bf16_copy: Tensor | None = (
        None  # the bf16 copy of its weight, or of those of several layers, while gradients are made
    )

    def forward(self, input: Tensor) -> Tensor:
        if is_sharded(self.weight):
            return super().forward(input)
        return linear(input, weight_of(input, self), self.bias, narrow=self.fp8)


def is_fast(layer: nn.Module | None) -> TypeGuard[FastLinear]:
    """Whether calling the layer is a product with its weights: no wrapper, parametrisation, hook, and no shard."""
    return type(layer) is FastLinear and not has_hooks(layer) and not is_sharded(layer.weight)


def fast_layers(*layers: nn.Module) -> tuple[FastLinear, ...]:
    """These layers if products with their weights are all that calling them does, else none."""
    fast = tuple(layer for layer in layers if is_fast(layer))
    return fast if len(fast) == len(layers) else ()


def use_fp8(model: nn.Module, on: bool) -> None:
    """Let a model train with products in float8, or not; those of sizes that the kernels lack stay as they are."""
    for module in model.modules():
        if isinstance(module, FastLinear) and module.role in NARROW:
            module.fp8 = on


def in_float8(x: Tensor, outputs: int) -> bool:
    """Whether a product of a layer with `fp8` is in float8 now: in training under autocast, if its sizes fit."""
    return torch.is_grad_enabled() and torch.is_autocast_enabled(x.device.type) and fp8.fits(x, outputs)


def weight_of(x: Tensor, *layers: FastLinear) -> Tensor:
    """The matrices of these layers side by side, [O, I]: their bf16 copy if there is one and `x` is computed in it."""
    copy = layers[0].bf16_copy
    # one with more outputs is that of these layers and others
    whole = copy is not None and len(copy) == sum(layer.out_features for layer in layers)
    if copy is not None and whole and torch.is_grad_enabled() and working(x) == copy.dtype:
        return copy
    # in a compiled step the cast to bfloat16 lays them side by side
    return layers[0].weight if len(layers) == 1 else torch.cat([layer.weight for layer in layers])


def linear(x: Tensor, weight_OI: Tensor, bias: Tensor | None, *, narrow: bool = False) -> Tensor:
    """`F.linear`: in float8 where a gradient is wanted and `narrow` says so, by oneDNN for many float32 rows on a CPU.

    The product with a single row, as in decoding, is shared by the threads of the CPU: the library behind torch gives
    it to one thread, which reads memory at half the speed of two.
    """
    if narrow and in_float8(x, weight_OI.shape[0]):
        return fp8.product8(x, weight_OI, bias, working(x))
    if onednn.fits(x, weight_OI):
        return onednn.linear(x, weight_OI, bias)
    outputs, inputs = weight_OI.shape
    if x.numel() != inputs or x.device.type != "cpu" or torch.is_grad_enabled() or torch.compiler.is_compiling():
        return F.linear(x, weight_OI, bias)
    threads = torch.get_num_threads()
    if threads == 1 or weight_OI.numel() < _SHARED:
        return F.linear(x, weight_OI, bias)
    even = outputs - outputs % threads
    # views in both layouts: nothing is copied
    shares = weight_OI[:even].view(threads, even // threads, inputs).mT
    result = torch.bmm(x.view(1, 1, inputs).expand(threads, 1, inputs), shares).view(*x.shape[:-1], even)
    if even < outputs:
        result = torch.cat((result, F.linear(x, weight_OI[even:])), -1)
    return result if bias is None else result.add_(bias)


def bias_of(*layers: FastLinear) -> Tensor | None:
    """The biases of these layers side by side, [O]; either all have one or none."""
    biases: list[Tensor] = [layer.bias for layer in layers if layer.bias is not None]
    assert len(biases) in (0, len(layers)), "either all layers have a bias or none"
    return None if not biases else biases[0] if len(biases) == 1 else torch.cat(biases)


def one_product_pays(x: Tensor) -> bool:
    """Whether one product of several layers is faster than one each: in training on a GPU."""
    return torch.is_grad_enabled() and (x.device.type == "cuda" or can_launch(x))


def fused_linear(x: Tensor, *layers: nn.Module) -> Sequence[Tensor]:
    """The outputs of several layers of one input; on a GPU in training by one product."""
    fast = fast_layers(*layers)
    if not fast or not one_product_pays(x):
        return [layer(x) for layer in layers]
    whole = linear(x, weight_of(x, *fast), bias_of(*fast), narrow=fast[0].fp8)
    return torch.split(whole, [layer.out_features for layer in fast], dim=-1)


def column_major(weight_OI: Tensor) -> Tensor:
    """The same matrix; if it has more outputs than inputs, stored column by column.

    A product with a single row, as in decoding, then runs through contiguous memory: on the CPU two to three times
    faster for wide matrices. Training prefers rows.
    """
    outputs, inputs = weight_OI.shape
    return weight_OI.t().contiguous().t() if outputs > inputs else weight_OI.contiguous()
