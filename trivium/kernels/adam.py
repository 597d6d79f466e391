"""Adam in one pass over memory, for a weight whose gradient and working copy are in bfloat16; only for a GPU.

Clipping, both moments, the decay, the weight and its twin: 14 bytes are read and 14 written for each number.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK, WARPS = 1024, 4  # 8 numbers for each thread


class Rule(NamedTuple):
    """The numbers of Adam; a decay that is not `decoupled` is added to the gradient."""

    rate: float
    beta1: float
    beta2: float
    eps: float
    decay: float
    decoupled: bool


@triton.jit
def adam_kernel(
    weight, moment, square, twin, gradient, count, healthy, factor, scale, size, rate, decay, eps,
    keep1, keep2, new1, new2, log1, log2, DECOUPLED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    if tl.load(healthy) != 0:
        at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        inside = at < size
        steps = tl.load(count).to(tl.float64)  # of float32, 1 - beta^steps would keep four digits at the beginning
        first = (1.0 - tl.exp(steps * log1)).to(tl.float32)
        second = tl.sqrt((1.0 - tl.exp(steps * log2)).to(tl.float32))
        rate *= tl.load(factor)
        w = tl.load(weight + at, mask=inside, other=0.0)
        g = tl.load(gradient + at, mask=inside, other=0.0).to(tl.float32) * tl.load(scale)
        m = tl.load(moment + at, mask=inside, other=0.0)
        v = tl.load(square + at, mask=inside, other=0.0)
        if DECOUPLED:
            w -= rate * decay * w
        else:
            g += decay * w
        m = keep1 * m + new1 * g
        v = keep2 * v + new2 * g * g
        w -= (rate / first) * m / (tl.sqrt(v) / second + eps)
        tl.store(moment + at, m, mask=inside)
        tl.store(square + at, v, mask=inside)
        tl.store(weight + at, w, mask=inside)
        tl.store(twin + at, w.to(twin.dtype.element_ty), mask=inside)


def adam(
    rule: Rule,
    weight: Tensor,
    moments: tuple[Tensor, Tensor],
    twin: Tensor,
    gradient: Tensor,
    *,
    count: Tensor,
    healthy: Tensor,
    factor: Tensor,
    scale: Tensor,
) -> None:
    """Move a weight and its twin, all in place, `count` being the steps with this one; nothing if not `healthy`.

    The rate is multiplied by `factor`, the gradient by `scale`; these and the last two are numbers on the device.
    """
    size = weight.numel()
    assert all(one.is_contiguous() for one in (weight, *moments, twin, gradient))
    with torch.cuda.device_of(weight):  # Triton would start it on the current GPU
        adam_kernel[(triton.cdiv(size, BLOCK),)](
            weight, *moments, twin, gradient, count, healthy, factor, scale, size, rule.rate, rule.decay, rule.eps,
            rule.beta1, rule.beta2, 1 - rule.beta1, 1 - rule.beta2, _log(rule.beta1), _log(rule.beta2),
            DECOUPLED=rule.decoupled, BLOCK=BLOCK, num_warps=WARPS,
        )  # fmt: skip


def _log(beta: float) -> float:
    return math.log(beta) if beta else -1e4  # then nothing of the old remains after a step
