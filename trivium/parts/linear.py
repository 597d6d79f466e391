"""The one linear layer of the package: it knows its role, so that init, decay and adapters need no name patterns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeGuard

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trivium.kernels import fp8, onednn
from trivium.kernels.hardware import working
from trivium.parts.hooks import has_hooks
from trivium.parts.roles import NARROW, Role


class Linear(nn.Linear):
    """`nn.Linear` with a role and without a draw of its own: the model's init part fills every weight."""

    def __init__(self, inputs: int, outputs: int, *, bias: bool, role: Role, head: int = 0) -> None:
        super().__init__(inputs, outputs, bias=bias)
        self.role: Role = role
        self.head = head  # the size of one head where the outputs are queries: T5 folds its scale into their init
        self.narrow = False  # products in float8 while training
        self.twin: Tensor | None = None  # while gradients are made, see `twins`

    def reset_parameters(self) -> None:
        """Nothing: `init` decides, once, for the whole model."""

    def forward(self, input: Tensor) -> Tensor:
        return product(input, matrix_of(input, self), self.bias, narrow=self.narrow)


def give_bias(layer: nn.Module, bias: Tensor | None) -> None:
    """Let a layer add this bias: a parameter is a parameter of it, any other tensor a buffer, which is not trained."""
    if hasattr(layer, "bias"):
        del layer.bias
    if bias is None or isinstance(bias, nn.Parameter):
        layer.register_parameter("bias", bias)
    else:
        layer.register_buffer("bias", bias)


def is_plain(layer: nn.Module | None) -> TypeGuard[Linear]:
    """Whether a product with the layer's weights does the same as calling it: no wrapper, parametrisation or hook."""
    return type(layer) is Linear and not has_hooks(layer)


def lent(layer: nn.Module | None) -> Tensor | None:
    """The bias of a layer, if it has one that learns and whose gradient may be made by others."""
    if not is_plain(layer) or layer.bias is None or not layer.bias.requires_grad:
        return None
    return layer.bias


def lending(layer: Linear, x: Tensor) -> Tensor:
    """What the layer makes of `x`, its bias as a constant: the gradient of that is left to whoever takes the result."""
    return product(x, matrix_of(x, layer), layer.bias.detach(), narrow=layer.narrow)


def narrowed(model: nn.Module, narrow: bool) -> None:
    """Let a model train with products in float8, or not; those of sizes that the kernels lack stay as they are."""
    for module in model.modules():
        if isinstance(module, Linear) and module.role in NARROW:
            module.narrow = narrow


def in_float8(x: Tensor, outputs: int) -> bool:
    """Whether a narrow product with so many outputs is one in float8 now: in training under autocast, if it fits."""
    return torch.is_grad_enabled() and torch.is_autocast_enabled(x.device.type) and fp8.fits(x, outputs)


def matrix_of(x: Tensor, *layers: Linear) -> Tensor:
    """The matrices of these layers side by side, as `x` is multiplied by them: their twin if they have one."""
    twin = layers[0].twin
    # one with more outputs is that of these layers and others
    whole = twin is not None and len(twin) == sum(layer.out_features for layer in layers)
    if twin is not None and whole and torch.is_grad_enabled() and working(x) == twin.dtype:
        return twin
    # in a compiled step the cast to bfloat16 lays them side by side
    return layers[0].weight if len(layers) == 1 else torch.cat([layer.weight for layer in layers])


def product(x: Tensor, weight: Tensor, bias: Tensor | None, *, narrow: bool = False) -> Tensor:
    """`F.linear`, except that the product with a single row, as in decoding, is shared by the threads of the CPU.

    The library behind torch gives such a product to one thread, which reads memory at half the speed of two. A
    `narrow` one is done in float8 where a gradient is wanted, a large one of float32 on a CPU by its fastest library.
    """
    if narrow and in_float8(x, weight.shape[0]):
        return fp8.product8(x, weight, bias, working(x))
    if onednn.fits(x, weight):
        return onednn.linear(x, weight, bias)
    outputs, inputs = weight.shape
    if x.numel() != inputs or x.device.type != "cpu" or torch.is_grad_enabled() or torch.compiler.is_compiling():
        return F.linear(x, weight, bias)
    threads = torch.get_num_threads()
    if threads == 1 or weight.numel() < 100_000:
        return F.linear(x, weight, bias)
    even = outputs - outputs % threads
    # views in both layouts: nothing is copied
    shares = weight[:even].view(threads, even // threads, inputs).mT
    result = torch.bmm(x.view(1, 1, inputs).expand(threads, 1, inputs), shares).view(*x.shape[:-1], even)
    if even < outputs:
        result = torch.cat((result, F.linear(x, weight[even:])), -1)
    return result if bias is None else result.add_(bias)


def together(x: Tensor, *layers: nn.Module) -> Sequence[Tensor]:
    """What several layers make of `x`; on a GPU in training by one product."""
    plain = [layer for layer in layers if is_plain(layer)]
    if x.device.type != "cuda" or not torch.is_grad_enabled() or len(plain) < len(layers):
        return [layer(x) for layer in layers]
    return side_by_side(x, plain)


def side_by_side(x: Tensor, layers: Sequence[Linear]) -> Sequence[Tensor]:
    """What several layers make of `x`, by one product."""
    biases: list[Tensor] = [layer.bias for layer in layers if layer.bias is not None]
    assert len(biases) in (0, len(layers)), "either all layers have a bias or none"
    whole = product(x, matrix_of(x, *layers), torch.cat(biases) if biases else None, narrow=layers[0].narrow)
    return torch.split(whole, [layer.out_features for layer in layers], dim=-1)


def columns(weight: Tensor) -> Tensor:
    """The same matrix; if it has more outputs than inputs, stored column by column.

    A product with a single row, as in decoding, then runs through contiguous memory: on the CPU two to three times
    faster for wide matrices. Training prefers rows.
    """
    outputs, inputs = weight.shape
    return weight.t().contiguous().t() if outputs > inputs else weight.contiguous()
