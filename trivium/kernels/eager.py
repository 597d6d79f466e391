"""Autograd functions for eager mode on the CPU, where torch has no fused kernel and every pass over memory counts."""

# N rows, D width

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function


def use_cpu_kernels(x: Tensor) -> bool:
    """Whether these pay: the compiler fuses the plain version itself, and so do a GPU's kernels."""
    return x.device.type == "cpu" and torch.is_grad_enabled() and not torch.compiler.is_compiling()


class RootMeanSquare(Function):
    """`x / sqrt(mean(x²) + eps) * weight` in five passes forward and back instead of fifteen."""

    @staticmethod
    def forward(ctx: Any, x_ND: Tensor, weight_D: Tensor, eps: float) -> Tensor:
        mean = torch.linalg.vector_norm(x_ND, dim=-1, keepdim=True).square_().div_(x_ND.shape[-1])
        scale_N1 = mean.add_(eps).rsqrt_()
        ctx.save_for_backward(x_ND, weight_D, scale_N1)
        result: Tensor = (x_ND * scale_N1).mul_(weight_D)
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor, Tensor, None]:
        (grad_ND,) = gradients
        x_ND, weight_D, scale_N1 = ctx.saved_tensors
        product_ND = grad_ND * x_ND
        along_N1 = (product_ND @ weight_D).unsqueeze(-1).mul_(scale_N1.pow(3)).div_(-x_ND.shape[-1])
        grad_weight_D = torch.mv(product_ND.reshape(-1, len(weight_D)).t(), scale_N1.flatten())
        return (grad_ND * weight_D).mul_(scale_N1).addcmul_(x_ND, along_N1), grad_weight_D, None


class SquaredRelu(Function):
    """`relu(x)²`, keeping only what the gradient needs."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        positive = x.clamp_min(0)
        ctx.save_for_backward(positive)
        return positive.square()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Tensor:
        (positive,) = ctx.saved_tensors
        result: Tensor = (gradients[0] * positive).mul_(2)
        return result


class Turned(Function):
    """Rotary positions in the layout of halves: each pair (i, i + E/2) turned by its angle."""

    @staticmethod
    def forward(ctx: Any, x_BHTE: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _turn(x_BHTE, cos, sin)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _turn(gradients[0], cos, -sin), None, None  # the inverse of a turn is the turn back


def _turn(x_BHTE: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x_BHTE.chunk(2, dim=-1)
    result = torch.empty_like(x_BHTE)
    left, right = result.chunk(2, dim=-1)
    torch.mul(first, cos, out=left).addcmul_(second, sin, value=-1)
    torch.mul(second, cos, out=right).addcmul_(first, sin)
    return result
