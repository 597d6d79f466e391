"""Matrix products in float8, forward and to the inputs; the gradient of a weight stays in the precision around them.

Every row has a scale of its own, from itself (its largest magnitude becomes the largest number that the format has):
there is no state to keep, and whatever kernel makes a row can round it in passing. So a step writes one byte more for
each number that is multiplied. The gradient of a weight would want both its factors turned, which no kernel does in
passing, and scaled the other way. Micikevicius et al. 2022, "FP8 formats for deep learning".
"""

# N rows, I inputs, O outputs, H columns of a hidden layer: O, or half of them where gate and up lie side by side
# B texts, T tokens, E head size, C columns of queries, keys and values side by side

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from trivium.kernels.hardware import can_launch

# Three bits behind the point, for gradients too: a scale for each row leaves them range enough.
FORMAT = torch.float8_e4m3fn
MULTIPLE = 16  # of every side of a product, for the kernels of the library
# Whether the library's kernels add the bias: after them that is a pass of its own where none of the compiler's follows.
ADDED = True


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


def scaled_product(
    left: Scaled, right: Scaled, dtype: torch.dtype, bias_O: Tensor | None = None, *, exact: bool = False
) -> Tensor:
    """The product of each row on the left with each on the right; unless `exact`, summed in fewer bits."""
    added = None if bias_O is None else bias_O.to(dtype)
    if left.values.device.type != "cuda":  # the same numbers, multiplied in float32
        with torch.autocast("cpu", enabled=False):
            result = left.dense() @ right.dense().t()
            result = result if added is None else result + added.float()
        # Nothing where there is nothing to do: torch 2.11 loses the gradient of a compiled Function whose result is
        # also one of its steps, as what `to` gives back is then (its issue 180642).
        return result if result.dtype == dtype else result.to(dtype)
    inside = ADDED and dtype != torch.float32  # in which they have no bias
    result = torch._scaled_mm(
        left.values,
        right.values.t(),
        scale_a=left.scale,
        scale_b=right.scale.t(),
        bias=added if inside else None,
        out_dtype=dtype,
        use_fast_accum=not exact,
    )
    return result if added is None or inside else result + added


def product8(
    x: Tensor, weight_OI: Tensor, bias_O: Tensor | None, dtype: torch.dtype, rounded: Scaled | None = None
) -> Tensor:
    """`F.linear` in float8; its result has `dtype`. Whoever made `x` may have `rounded` its rows."""
    x_NI = x.flatten(0, -2).to(dtype)
    result_NO: Tensor = _Product.apply(  # type: ignore[no-untyped-call]
        _forward(x_NI, weight_OI, bias_O, rounded), x_NI, weight_OI, bias_O
    )
    return result_NO.view(*x.shape[:-1], len(weight_OI))


def hidden8(
    x: Tensor, weight_OI: Tensor, bias_O: Tensor | None, activation: str, dtype: torch.dtype, *, gated: bool = False
) -> tuple[Tensor, Scaled]:
    """The activation of `F.linear`, or of its first half times the second, and its rows rounded for another product."""
    x_NI = x.flatten(0, -2).to(dtype)
    pre_NO = _forward(x_NI, weight_OI, bias_O)
    hidden_NH, rounded = bent(pre_NO, activation, gated)
    result_NH: Tensor = _Hidden.apply(  # type: ignore[no-untyped-call]
        hidden_NH, pre_NO, x_NI, weight_OI, bias_O, activation
    )
    return result_NH.view(*x.shape[:-1], hidden_NH.shape[1]), rounded


def cut8(
    x_BTI: Tensor, weight_CI: Tensor, bias_C: Tensor | None, heads: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values by heads out of one product, whose gradients are laid together and rounded at once."""
    x_NI = x_BTI.flatten(0, 1).to(dtype)
    packed_BTC = _forward(x_NI, weight_CI, bias_C).view(*x_BTI.shape[:2], len(weight_CI))
    parts: tuple[Tensor, Tensor, Tensor] = _Cut.apply(  # type: ignore[no-untyped-call]
        packed_BTC, x_NI, weight_CI, bias_C, heads
    )
    return parts


def _forward(x_NI: Tensor, weight_OI: Tensor, bias_O: Tensor | None, rounded: Scaled | None = None) -> Tensor:
    """The product alone: its gradients are those of the Functions below."""
    rounded = quantized(x_NI.detach()) if rounded is None else rounded
    bias_O = None if bias_O is None else bias_O.detach()
    return scaled_product(rounded, quantized(weight_OI.detach()), x_NI.dtype, bias_O)


# The ways back alone, of what was computed before: the compiler sees all that leads there, and what is rounded in
# passing is no result that could want a gradient. Each gives views of its first argument, which has none, as
# kernels/parted.py does, and no argument is given twice: other Functions torch 2.11 gets wrong when compiled (its
# issues 180642, 181146).


class _Product(Function):
    @staticmethod
    def forward(ctx: Any, result_NO: Tensor, x_NI: Tensor, weight_OI: Tensor, bias_O: Tensor | None) -> Tensor:
        ctx.save_for_backward(x_NI, weight_OI)
        ctx.kind = None if bias_O is None else bias_O.dtype
        return result_NO.view(result_NO.shape)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor | None, ...]:
        (gradient_NO,) = gradients
        x_NI, weight_OI = ctx.saved_tensors
        _result, *wanted, summed = ctx.needs_input_grad
        grads = _gradients(gradient_NO, None, x_NI, weight_OI, wanted)
        return None, *grads, gradient_NO.sum(0, dtype=torch.float32).to(ctx.kind) if summed else None


class _Hidden(Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_NH: Tensor,
        pre_NO: Tensor,
        x_NI: Tensor,
        weight_OI: Tensor,
        bias_O: Tensor | None,
        activation: str,
    ) -> Tensor:
        ctx.save_for_backward(pre_NO, x_NI, weight_OI)
        ctx.activation, ctx.kind = activation, None if bias_O is None else bias_O.dtype
        return hidden_NH.view(hidden_NH.shape)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor | None, ...]:
        (gradient_NH,) = gradients
        pre_NO, x_NI, weight_OI = ctx.saved_tensors
        _hidden, _pre, *wanted, summed, _activation = ctx.needs_input_grad
        grad_NO, rounded, sums_O = unbent(gradient_NH, pre_NO, ctx.activation, summed)
        grads = _gradients(grad_NO, rounded, x_NI, weight_OI, wanted)
        return None, None, *grads, sums_O.to(ctx.kind) if summed else None, None


class _Cut(Function):
    @staticmethod
    def forward(
        ctx: Any, packed_BTC: Tensor, x_NI: Tensor, weight_CI: Tensor, bias_C: Tensor | None, heads: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        ctx.save_for_backward(x_NI, weight_CI)
        ctx.kind = None if bias_C is None else bias_C.dtype
        rows, length, columns = packed_BTC.shape
        query, key, value = torch.split(packed_BTC.view(rows, length, 3 * heads, columns // (3 * heads)), heads, 2)
        return query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor | None, ...]:
        query_BHTE, key_BHTE, value_BHTE = gradients
        x_NI, weight_CI = ctx.saved_tensors
        _packed, *wanted, summed, _heads = ctx.needs_input_grad
        grad_NC, rounded, sums_C = laid(query_BHTE, key_BHTE, value_BHTE, summed)
        grads = _gradients(grad_NC, rounded, x_NI, weight_CI, wanted)
        return None, *grads, sums_C.to(ctx.kind) if summed else None, None


def _gradients(
    gradient_NO: Tensor, rounded: Scaled | None, x_NI: Tensor, weight_OI: Tensor, wanted: Sequence[bool]
) -> tuple[Tensor | None, Tensor | None]:
    """Those of a product's inputs and weight, if they are wanted; the rows on the way back may be `rounded` already."""
    grad_x, grad_weight = None, None
    inputs, weights = wanted
    if inputs:
        rounded = quantized(gradient_NO) if rounded is None else rounded
        grad_x = scaled_product(rounded, quantized(weight_OI.t().contiguous()), x_NI.dtype, exact=True)
    if weights:
        grad_weight = (gradient_NO.t() @ x_NI).to(weight_OI.dtype)
    return grad_x, grad_weight


# What makes rows that are multiplied next, and rounds them in passing: by a kernel, or in torch.

VALUES: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu-tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
    "relu2": lambda x: F.relu(x).square(),
}
# Of a gradient and of what the value was taken of.
SLOPES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "gelu": torch.ops.aten.gelu_backward,
    "gelu-tanh": lambda grad, x: torch.ops.aten.gelu_backward(grad, x, approximate="tanh"),
    "silu": torch.ops.aten.silu_backward,
    "relu2": lambda grad, x: 2 * (grad * F.relu(x)),
}


def by_kernel(x: Tensor) -> bool:
    """Whether the kernels of kernels/rounding.py do it."""
    return can_launch(x) and x.dtype == torch.bfloat16


def _parts(wide: int, summed: bool) -> int:
    """Into how many the rows of a gradient are parted for its sums."""
    power = 1024
    while power < wide:  # a constant then, even where the compiler takes the width for none
        power *= 2
    if not summed:
        return 0
    from trivium.kernels import rounding

    return int(rounding.constant_parts(power))


def bent(pre_NO: Tensor, activation: str, gated: bool) -> tuple[Tensor, Scaled]:
    """The activation of each row, or of its first half times the second; and that rounded."""
    if by_kernel(pre_NO):
        from trivium.kernels import rounding  # not above: there is no Triton for a CPU

        hidden_NH, *rounded = rounding.bent8(pre_NO, activation, gated)
        return hidden_NH, Scaled(*rounded)
    if gated:
        gate_NH, up_NH = pre_NO.float().chunk(2, -1)
        hidden_NH = VALUES[activation](gate_NH) * up_NH
    else:
        hidden_NH = VALUES[activation](pre_NO.float())
    hidden_NH = hidden_NH.to(pre_NO.dtype)
    return hidden_NH, quantized(hidden_NH)


def unbent(grad_NH: Tensor, pre_NO: Tensor, activation: str, summed: bool) -> tuple[Tensor, Scaled, Tensor]:
    """The gradient of `pre`; that rounded; and the sums of its columns if they are wanted."""
    if by_kernel(pre_NO):
        from trivium.kernels import rounding

        grad_NO, *rounded, sums = rounding.unbent8(grad_NH, pre_NO, activation, _parts(pre_NO.shape[-1], summed))
        return grad_NO, Scaled(*rounded), sums.sum(0)
    grad_NH = grad_NH.float()
    if grad_NH.shape == pre_NO.shape:
        wide_NO = SLOPES[activation](grad_NH, pre_NO.float())
    else:
        gate_NH, up_NH = pre_NO.float().chunk(2, -1)
        halves = SLOPES[activation](grad_NH * up_NH, gate_NH), grad_NH * VALUES[activation](gate_NH)
        wide_NO = torch.cat(halves, -1)
    grad_NO = wide_NO.to(pre_NO.dtype)
    return grad_NO, quantized(grad_NO), wide_NO.sum(0) if summed else wide_NO.new_zeros(())


def laid(query_BHTE: Tensor, key_BHTE: Tensor, value_BHTE: Tensor, summed: bool) -> tuple[Tensor, Scaled, Tensor]:
    """The three gradients side by side; that rounded; and the sums of its columns if they are wanted."""
    if by_kernel(query_BHTE):
        from trivium.kernels import rounding

        _, heads, _, size = query_BHTE.shape
        grad_NC, *rounded, sums = rounding.laid8(query_BHTE, key_BHTE, value_BHTE, _parts(3 * heads * size, summed))
        return grad_NC, Scaled(*rounded), sums.sum(0)
    grad_NC = torch.cat((query_BHTE, key_BHTE, value_BHTE), 1).transpose(1, 2).flatten(2).flatten(0, 1)
    return grad_NC, quantized(grad_NC), grad_NC.sum(0, dtype=torch.float32) if summed else grad_NC.new_zeros(())
