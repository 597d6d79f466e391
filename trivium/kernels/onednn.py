"""Products of float32 matrices by oneDNN, which torch has but uses for half precision only.

One core of an AMD EPYC does 95 to 105 billion operations a second this way and 88 to 97 by torch's usual library; with
rows of 50,257 outputs 100 and 60. The gradient of a weight is not faster, and stays.
"""

# N rows, I inputs, O outputs

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

_LEAST = 1 << 24  # multiplications: below that the call itself is what costs


def fits(x: Tensor, weight_OI: Tensor) -> bool:
    """Whether a product pays here: many float32 rows on a CPU, in eager mode."""
    return (
        x.device.type == "cpu"
        and x.dtype == weight_OI.dtype == torch.float32
        and x.numel() * len(weight_OI) >= _LEAST
        and x.numel() >= 16 * x.shape[-1]
        and not torch.compiler.is_compiling()
        and not torch.is_autocast_enabled("cpu")
        and _operation() is not None
    )


def linear(x: Tensor, weight_OI: Tensor, bias_O: Tensor | None) -> Tensor:
    """`F.linear` with its gradients."""
    if not torch.is_grad_enabled():
        return _call(x, weight_OI, bias_O)
    result: Tensor = _Linear.apply(x, weight_OI, bias_O)  # type: ignore[no-untyped-call]
    return result


def matmul(left: Tensor, right: Tensor) -> Tensor:
    """The product of two matrices, without gradients."""
    return _call(left, right.mT, None)


class _Linear(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_OI: Tensor, bias_O: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight_OI)
        return _call(x, weight_OI, bias_O)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        (grad,) = gradients
        x, weight_OI = ctx.saved_tensors
        wanted_x, wanted_weight, wanted_bias = ctx.needs_input_grad
        grad_NO = grad.reshape(-1, grad.shape[-1])
        return (
            _back(grad, weight_OI) if wanted_x else None,
            grad_NO.mT @ x.reshape(-1, x.shape[-1]) if wanted_weight else None,
            grad_NO.sum(0) if wanted_bias else None,
        )


def _back(grad: Tensor, weight_OI: Tensor) -> Tensor:
    """The gradient of the input; where a gradient of this one is wanted too, by what has one."""
    return grad @ weight_OI if torch.is_grad_enabled() else _call(grad, weight_OI.mT, None)


def _call(x: Tensor, weight_OI: Tensor, bias_O: Tensor | None) -> Tensor:
    operation = _operation()
    assert operation is not None
    return operation(x, weight_OI, bias_O, "none", [], "")


@functools.cache
def _operation() -> Callable[..., Tensor] | None:
    """torch's own way to it, meant for its compiler; None where a build has none or it does something else."""
    try:
        operation: Callable[..., Tensor] = torch.ops.mkldnn._linear_pointwise.default
        with torch.no_grad():
            x, weight = torch.arange(12.0).view(3, 4), torch.arange(20.0).view(4, 5).mT
            right = torch.equal(operation(x, weight, torch.ones(5), "none", [], ""), x @ weight.mT + 1)
    except (AttributeError, RuntimeError, TypeError):
        return None
    return operation if right else None
