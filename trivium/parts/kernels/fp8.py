"""Matrix products in float8: e4m3 for inputs and weights, e5m2 for gradients, one scale for each tensor.

Scales come from the tensors themselves in the same step (the largest magnitude becomes the largest number that the
format has), so there is no state to keep. Micikevicius et al. 2022, "FP8 formats for deep learning".
"""

# N rows, I inputs, O outputs

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function

INPUT, GRADIENT = torch.float8_e4m3fn, torch.float8_e5m2
MULTIPLE = 16  # of every side of a product, for the kernels of the library


class Scaled(NamedTuple):
    """A tensor of 8-bit numbers, and what they have to be multiplied by."""

    values: Tensor
    scale: Tensor

    def dense(self) -> Tensor:
        return self.values.float() * self.scale

    def turned(self) -> Scaled:
        """The same matrix, stored column by column."""
        return Scaled(self.values.t().contiguous().t(), self.scale)


def available(device: torch.device) -> bool:
    """Whether the device multiplies such matrices."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9)


def fits(x: Tensor, outputs: int = MULTIPLE) -> bool:
    """Whether a product with so many outputs is one that the kernels can do; of no rows at all there is no scale."""
    inputs = x.shape[-1]
    rows = x.numel() // inputs
    return rows > 0 and not (rows % MULTIPLE or inputs % MULTIPLE or outputs % MULTIPLE)


def quantized(x: Tensor, dtype: torch.dtype) -> Scaled:
    """The nearest 8-bit numbers, scaled so that the largest magnitude just fits."""
    most = torch.finfo(dtype).max
    scale = x.abs().amax().float().clamp(min=1e-30) / most
    return Scaled((x.float() / scale).clamp(-most, most).to(dtype), scale)


def scaled_product(left: Scaled, right: Scaled, dtype: torch.dtype, *, fast: bool = False) -> Tensor:
    """The product of a matrix stored by rows and one stored by columns; `fast` sums in fewer bits, for activations."""
    if left.values.device.type != "cuda":  # the same numbers, multiplied in float32
        return (left.dense() @ right.dense()).to(dtype)
    return torch._scaled_mm(
        left.values, right.values, scale_a=left.scale, scale_b=right.scale, out_dtype=dtype, use_fast_accum=fast
    )


def product8(x: Tensor, weight_OI: Tensor, bias_O: Tensor | None, dtype: torch.dtype) -> Tensor:
    """`F.linear` in float8, forward and back; its result has `dtype`."""
    result_NO: Tensor = _Product.apply(x.flatten(0, -2), weight_OI, dtype)  # type: ignore[no-untyped-call]
    result = result_NO.view(*x.shape[:-1], len(weight_OI))
    return result if bias_O is None else result + bias_O.to(dtype)


class _Product(Function):
    @staticmethod
    def forward(ctx: Any, x_NI: Tensor, weight_OI: Tensor, dtype: torch.dtype) -> Tensor:
        x, weight = quantized(x_NI, INPUT), quantized(weight_OI, INPUT)
        ctx.save_for_backward(*x, *weight)
        ctx.dtypes = (x_NI.dtype, weight_OI.dtype, dtype)
        return scaled_product(x, Scaled(weight.values.t(), weight.scale), dtype, fast=True)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor, Tensor, None]:
        x_values, x_scale, weight_values, weight_scale = ctx.saved_tensors
        x_dtype, weight_dtype, dtype = ctx.dtypes
        gradient = quantized(gradients[0], GRADIENT)
        grad_x = scaled_product(gradient, Scaled(weight_values, weight_scale).turned(), dtype)
        turned = Scaled(gradient.values.t().contiguous(), gradient.scale)
        grad_weight = scaled_product(turned, Scaled(x_values, x_scale).turned(), dtype)
        return grad_x.to(x_dtype), grad_weight.to(weight_dtype), None
