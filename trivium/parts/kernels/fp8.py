"""Matrix products in float8, forward and to the inputs; the gradient of a weight stays in the precision around them.

Every row has a scale of its own, from itself (its largest magnitude becomes the largest number that the format has):
there is no state to keep, and whatever kernel makes a row can round it in passing. So a step writes one byte more for
each number that is multiplied. The gradient of a weight would want both its factors turned, which no kernel does in
passing, and scaled the other way. Micikevicius et al. 2022, "FP8 formats for deep learning".
"""

# N rows, I inputs, O outputs

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function

# Three bits behind the point, for gradients too: a scale for each row leaves them range enough.
FORMAT = torch.float8_e4m3fn
MULTIPLE = 16  # of every side of a product, for the kernels of the library


class Scaled(NamedTuple):
    """A matrix of 8-bit numbers, and what each row has to be multiplied by."""

    values: Tensor
    scale: Tensor

    def dense(self) -> Tensor:
        return self.values.float() * self.scale


def available(device: torch.device) -> bool:
    """Whether the device multiplies such matrices."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9)


def fits(x: Tensor, outputs: int = MULTIPLE) -> bool:
    """Whether a product with so many outputs is one that the kernels can do; of no rows at all there is nothing."""
    inputs = x.shape[-1]
    rows = x.numel() // inputs
    return rows > 0 and not (rows % MULTIPLE or inputs % MULTIPLE or outputs % MULTIPLE)


def quantized(x: Tensor) -> Scaled:
    """The nearest 8-bit numbers, each row scaled so that its largest magnitude just fits."""
    most = torch.finfo(FORMAT).max
    scale = x.abs().amax(-1, keepdim=True).float().clamp(min=1e-30) / most
    return Scaled((x.float() / scale).clamp(-most, most).to(FORMAT).contiguous(), scale)


def scaled_product(left: Scaled, right: Scaled, dtype: torch.dtype, *, exact: bool = False) -> Tensor:
    """The product of each row on the left with each on the right; unless `exact`, summed in fewer bits."""
    if left.values.device.type != "cuda":  # the same numbers, multiplied in float32
        result = left.dense() @ right.dense().t()
        # Nothing where there is nothing to do: torch 2.11 loses the gradient of a compiled Function whose result is
        # also one of its steps, as what `to` gives back is then (its issue 180642).
        return result if result.dtype == dtype else result.to(dtype)
    return torch._scaled_mm(
        left.values,
        right.values.t(),
        scale_a=left.scale,
        scale_b=right.scale.t(),
        out_dtype=dtype,
        use_fast_accum=not exact,
    )


def product8(x: Tensor, weight_OI: Tensor, bias_O: Tensor | None, dtype: torch.dtype) -> Tensor:
    """`F.linear` in float8; its result has `dtype`."""
    result_NO: Tensor = _Product.apply(x.flatten(0, -2).to(dtype), weight_OI)  # type: ignore[no-untyped-call]
    result = result_NO.view(*x.shape[:-1], len(weight_OI))
    return result if bias_O is None else result + bias_O.to(dtype)


class _Product(Function):
    @staticmethod
    def forward(ctx: Any, x_NI: Tensor, weight_OI: Tensor) -> Tensor:
        ctx.save_for_backward(x_NI, weight_OI)
        return scaled_product(quantized(x_NI), quantized(weight_OI), x_NI.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor | None, Tensor | None]:
        (gradient_NO,) = gradients
        x_NI, weight_OI = ctx.saved_tensors
        grad_x, grad_weight = None, None
        if ctx.needs_input_grad[0]:
            turned = quantized(weight_OI.t().contiguous())
            grad_x = scaled_product(quantized(gradient_NO), turned, x_NI.dtype, exact=True)
        if ctx.needs_input_grad[1]:
            grad_weight = (gradient_NO.t() @ x_NI).to(weight_OI.dtype)
        return grad_x, grad_weight
