"""The norm behind a part of a post-norm layer: all its gradients in one pass over the tokens, by a kernel of Triton.

The compiler makes the gradient of what is normed in one kernel, adds up its 2,048 parts of those of scale and shift in
two others, and reads the gradient again for the bias of the layer before: 165 us for 65,536 tokens of width 768 on an
H200, where reading and writing what must be read and written takes 95. Here every column is summed on the way: 99.
Imported only where there is a GPU: Triton is not needed elsewhere.
"""

# N tokens, D width
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor


class Launch(NamedTuple):
    """How the tokens are gone over: tiles of so many numbers, one after another in so many parts."""

    numbers: int = 4096
    warps: int = 4
    stages: int = 3
    parts: int = 264  # two for each processor of an H200; fixed, so that the order of the sums is


LAUNCH = Launch()


@triton.jit
def unnorm_kernel(
    past, into, total, mean, rstd, weight, out, sums, tokens, parts,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, TOKENS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    part, at = tl.program_id(0), tl.arange(0, BLOCK)
    inside = at < WIDTH
    scale = tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)[None, :]
    # Added up at the end only: in every round the threads would have to wait for each other.
    scales = tl.zeros([TOKENS, BLOCK], tl.float32)
    shifts = tl.zeros([TOKENS, BLOCK], tl.float32)
    biases = tl.zeros([TOKENS, BLOCK], tl.float32)
    for tile in tl.range(part, tl.cdiv(tokens, TOKENS), parts, num_stages=STAGES):
        token = tile * TOKENS + tl.arange(0, TOKENS)
        real = token < tokens
        mask = real[:, None] & inside[None, :]
        here = token.to(tl.int64)[:, None] * WIDTH + at[None, :]
        grad = tl.load(past + here, mask=mask, other=0.0).to(tl.float32)
        grad += tl.load(into + here, mask=mask, other=0.0).to(tl.float32)
        centre = tl.load(mean + token, mask=real, other=0.0)[:, None]
        spread = tl.load(rstd + token, mask=real, other=0.0)[:, None]
        normed = (tl.load(total + here, mask=mask, other=0.0).to(tl.float32) - centre) * spread
        slope = grad * scale
        straight = tl.sum(slope, 1)[:, None] / WIDTH
        along = tl.sum(slope * normed, 1)[:, None] / WIDTH
        found = (slope - straight - normed * along) * spread
        tl.store(out + here, found.to(out.dtype.element_ty), mask=mask)
        scales += grad * normed
        shifts += grad
        biases += found
    sums += part.to(tl.int64) * (3 * WIDTH) + at
    tl.store(sums, tl.sum(scales, 0), mask=inside)
    tl.store(sums + WIDTH, tl.sum(shifts, 0), mask=inside)
    tl.store(sums + 2 * WIDTH, tl.sum(biases, 0), mask=inside)


def normed(
    x: Tensor, y: Tensor, bias: Tensor | None, weight: Tensor, shift: Tensor | None, eps: float
) -> tuple[Tensor, Tensor]:
    """The norm of `x + y`, twice, so that the gradients of two readers come apart.

    `y` holds `bias` as a constant: its gradient comes from here.
    """
    found: tuple[Tensor, Tensor] = Normed.apply(x, y, bias, weight, shift, eps)
    return found


# Besides what parted.py tells of compiled Functions, torch 2.11 gets one wrong that makes an output from another one,
# whose gradient then counts twice. Here both are views of what is not returned itself.


class Normed(torch.autograd.Function):
    """Two views of one norm; the bias is not added, since the part had it."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, y: Tensor, bias: Tensor | None, weight: Tensor, shift: Tensor | None, eps: float
    ) -> tuple[Tensor, Tensor]:
        total = (x + y).contiguous()
        wide, mean, rstd = torch.native_layer_norm(total.float(), weight.shape, weight, shift, eps)
        ctx.save_for_backward(total, mean, rstd, weight)
        ctx.bias, ctx.shift = (None if one is None else one.dtype for one in (bias, shift))
        result = wide.to(x.dtype)
        return result.view_as(result), result.view_as(result)

    @staticmethod
    def backward(ctx: Any, past: Tensor, into: Tensor) -> tuple[Tensor | None, ...]:
        total, mean, rstd, weight = ctx.saved_tensors
        grad, sums = unnormed(past, into, total, mean, rstd, weight, LAUNCH.parts)
        scale, shift, bias = sums.sum(0)
        return (
            grad,
            grad,
            None if ctx.bias is None else bias.to(ctx.bias),
            scale.to(weight.dtype),
            None if ctx.shift is None else shift.to(ctx.shift),
            None,
        )


# An operator, so that the compiler takes it as it is: it could not see which of its arguments the kernel writes.
# All that the shapes depend on is an argument: the compiler's cache knows nothing else of it than its name.


@torch.library.custom_op(
    "trivium::unnormed",
    mutates_args=(),
    schema="(Tensor past, Tensor into, Tensor total, Tensor mean, Tensor rstd, Tensor weight, int parts) "
    "-> (Tensor, Tensor)",
)
def unnormed(
    past: Tensor, into: Tensor, total: Tensor, mean: Tensor, rstd: Tensor, weight: Tensor, parts: int
) -> tuple[Tensor, Tensor]:
    """The gradient of what was normed, and the sums [parts, 3, D] of those of the scale, the shift and itself."""
    grad, sums = _shapes(past, into, total, mean, rstd, weight, parts)
    launch(past.contiguous(), into.contiguous(), total, mean, rstd, weight, grad, sums, LAUNCH)
    return grad, sums


@unnormed.register_fake
def _shapes(
    past: Tensor, into: Tensor, total: Tensor, mean: Tensor, rstd: Tensor, weight: Tensor, parts: int
) -> tuple[Tensor, Tensor]:
    return torch.empty_like(total), total.new_empty(parts, 3, total.shape[-1], dtype=torch.float32)


def launch(
    past: Tensor, into: Tensor, total: Tensor, mean: Tensor, rstd: Tensor, weight: Tensor, grad: Tensor, sums: Tensor,
    how: Launch,
) -> None:  # fmt: skip
    """Run the kernel over all tokens, in as many parts as there are sums for; everything lies row after row."""
    width, parts = total.shape[-1], len(sums)
    block = int(triton.next_power_of_2(width))
    with torch.cuda.device_of(total):  # Triton would start it on the current GPU
        unnorm_kernel[(parts,)](
            past, into, total, mean, rstd, weight, grad, sums, total.numel() // width, parts,
            WIDTH=width, BLOCK=block, TOKENS=max(1, how.numbers // block), STAGES=how.stages, num_warps=how.warps,
        )  # fmt: skip
