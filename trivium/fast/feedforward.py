"""Feed-forward networks: bias, activation and the bias gradient in one kernel, in training on a GPU."""

# B batch, T tokens, D width, F hidden size

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import final

import torch
from torch import Tensor

from trivium.fast.linear import FastLinear, bias_of, fast_layers, fused_linear, in_float8, linear, weight_of
from trivium.kernels import fp8, rectify
from trivium.kernels.eager import SquaredRelu, use_cpu_kernels
from trivium.kernels.hardware import can_launch, working
from trivium.parts.activations import ACTIVATIONS, squared_relu
from trivium.parts.dropout import dropout
from trivium.parts.feedforward import GluFeedForward, MlpFeedForward
from trivium.parts.linear import Linear
from trivium.parts.mixers import Context

# The activations of kernels/bend.py; a ReLU is better off inside the product before it (kernels/rectify.py).
_FUSED = {ACTIVATIONS[name]: name for name in ("gelu", "gelu-tanh", "silu", "relu2")}
_RELU = ACTIVATIONS["relu"]

Hidden = tuple[Tensor, fp8.Scaled | None]  # the hidden layer, and its rows in float8 where the kernel has made them


@final
class FastMlp(MlpFeedForward):
    """`MlpFeedForward` by fused kernels."""

    @property
    def matmul_groups(self) -> list[tuple[Linear, ...]]:
        """The layers by the products that compute them in training."""
        return [(self.up,), (self.down,)]

    def forward(self, x_BTD: Tensor, ctx: Context | None = None, bias_grad: bool = True) -> Tensor:
        """Without `bias_grad` the bias of the last layer is a constant: a fused block computes its gradient."""
        return _down(self, *self._hidden(x_BTD), bias_grad=bias_grad)

    def _hidden(self, x: Tensor) -> Hidden:
        name, layers = _FUSED.get(self.activation), fast_layers(self.up)
        if name and _fp8_fits(x, layers):
            return fp8.hidden8(x, weight_of(x, *layers), bias_of(*layers), name, working(x))
        if name and _kernel_fits(x, layers):
            return _bias_activation(x, weight_of(x, *layers), bias_of(*layers), name), None
        if self.activation is _RELU and rectify.ABLE and _kernel_fits(x, layers):
            return rectify.rectified(x, weight_of(x, *layers), bias_of(*layers), torch.bfloat16), None
        return _activation(self.activation, x)(self.up(x)), None


@final
class FastGlu(GluFeedForward):
    """`GluFeedForward` with one product for gate and up, and fused kernels behind it."""

    @property
    def matmul_groups(self) -> list[tuple[Linear, ...]]:
        """The layers by the products that compute them in training."""
        return [(self.gate, self.up), (self.down,)]

    def forward(self, x_BTD: Tensor, ctx: Context | None = None, bias_grad: bool = True) -> Tensor:
        """Without `bias_grad` the bias of the last layer is a constant: a fused block computes its gradient."""
        return _down(self, *self._hidden(x_BTD), bias_grad=bias_grad)

    def _hidden(self, x: Tensor) -> Hidden:
        name, layers = _FUSED.get(self.activation), fast_layers(self.gate, self.up)
        if name and _fp8_fits(x, layers):
            return fp8.hidden8(x, weight_of(x, *layers), bias_of(*layers), name, working(x), gated=True)
        if name and _kernel_fits(x, layers):
            return _bias_activation(x, weight_of(x, *layers), bias_of(*layers), name, gated=True), None
        gate, up = fused_linear(x, self.gate, self.up)
        return _activation(self.activation, x)(gate) * up, None


def _down(
    part: FastMlp | FastGlu, hidden_BTF: Tensor, rounded: fp8.Scaled | None = None, *, bias_grad: bool = True
) -> Tensor:
    """The output of a network from its hidden layer, the rows of which may be `rounded` already for float8."""
    layers = fast_layers(part.down)
    dropping = part.training and (part.dropout or part.variational_dropout)
    if rounded is not None and not dropping and _fp8_fits(hidden_BTF, layers):
        bias = part.down.bias if bias_grad else part.down.bias.detach()
        return fp8.product8(hidden_BTF, weight_of(hidden_BTF, *layers), bias, hidden_BTF.dtype, rounded)
    kept = dropout(hidden_BTF, part.dropout, part.training, variational=part.variational_dropout)
    if bias_grad or not layers:
        result: Tensor = part.down(kept)
        return result
    return linear(kept, weight_of(kept, *layers), layers[0].bias.detach(), narrow=layers[0].fp8)


def _activation(function: Callable[[Tensor], Tensor], x: Tensor) -> Callable[[Tensor], Tensor]:
    """The same activation; on a CPU the squared ReLU keeps only what its gradient needs."""
    if function is squared_relu and use_cpu_kernels(x):
        return SquaredRelu.apply
    return function


def _fp8_fits(x: Tensor, layers: Sequence[FastLinear]) -> bool:
    """Whether one product in float8 does for these layers."""
    if not layers or not all(layer.fp8 for layer in layers):
        return False
    return in_float8(x, sum(layer.out_features for layer in layers))


def _kernel_fits(x: Tensor, layers: Sequence[FastLinear]) -> bool:
    """Whether these layers go by the kernels: in training on a GPU in bfloat16, by their own weights."""
    if not layers or not can_launch(x) or not torch.is_grad_enabled():
        return False
    return working(x) == torch.bfloat16 and not any(layer.fp8 for layer in layers)


def _bias_activation(x: Tensor, weight: Tensor, bias: Tensor | None, name: str, *, gated: bool = False) -> Tensor:
    """The hidden layer: the bias is a constant of the product, and its gradient is the kernel's."""
    from trivium.kernels import bend  # not above: without a GPU there is no Triton

    return bend.bent(linear(x, weight, None if bias is None else bias.detach()), bias, name, gated=gated)
