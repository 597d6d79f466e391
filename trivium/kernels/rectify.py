"""A linear layer with its ReLU as one product, for training on a GPU.

The library behind torch sets what is negative to zero while it writes the product. The compiler makes a pass of its own
of it, over the widest states of a block, and keeps a mask for the way back; here the result itself is that mask.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

# One product of cuBLASLt that torch has no public name for.
ABLE = hasattr(torch, "_addmm_activation")


def rectified(x: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """`relu(x W + b)`, computed in `dtype` as autocast would."""
    result: Tensor = forward(x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype))
    return result


# An operator, so that the compiler takes the product as it is; of its gradients see kernels/bend.py.
@torch.library.custom_op(
    "trivium::rectified", mutates_args=(), schema="(Tensor x, Tensor weight, Tensor? bias) -> Tensor"
)
def forward(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    # without a bias the library has no such product
    added = x.new_zeros(len(weight)) if bias is None else bias.contiguous()
    out: Tensor = torch._addmm_activation(added, x.reshape(-1, x.shape[-1]), weight.t())
    return out.view(*x.shape[:-1], len(weight))


@forward.register_fake
def _shape(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return x.new_empty(*x.shape[:-1], len(weight))


def _remember(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weight, bias = inputs
    ctx.save_for_backward(x, weight, output)
    ctx.biased = bias is not None


def _gradients(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    x, weight, out = ctx.saved_tensors
    grad = torch.where(out > 0, grad, 0).flatten(0, -2)
    wanted = ctx.needs_input_grad
    grad_x = (grad @ weight).view(x.shape) if wanted[0] else None
    grad_weight = grad.t() @ x.flatten(0, -2) if wanted[1] else None
    grad_bias = grad.sum(0, dtype=torch.promote_types(grad.dtype, torch.float32)).to(grad.dtype) if wanted[2] else None
    return grad_x, grad_weight, grad_bias


forward.register_autograd(_gradients, setup_context=_remember)
