"""Activations in training by one kernel each way, the gradient of the bias before them included; only for a GPU.

Going back, what torch's compiler makes reads the gradient once more for the bias, and evaluates both halves of a gated
network for each of them. Here a program has some columns and walks down the rows, so that their sums stay in
registers. There are no atomics: bits repeat.
"""

# H columns of the hidden layer; of a gated one, gate and up lie side by side in rows of 2 H
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from trivium.kernels.step import ACTIVATIONS


class Launch(NamedTuple):
    """A tile of rows and columns, its warps, the tiles whose loads are under way, and the programs that walk."""

    rows: int
    columns: int
    warps: int
    stages: int = 1
    programs: int = 4096  # some waves of an H200's multiprocessors: the last one is then short


# Two loads of 16 bytes for each thread, and a warp beside a row.
FORWARD = Launch(8, 256, 4)
BACKWARD = Launch(8, 256, 4)

# exp(x) is exp2(x * BASE), which is what the unit for it computes.
BASE = tl.constexpr(1.4426950408889634)
ROOT = tl.constexpr(0.7071067811865476)  # of 1/2
DENSITY = tl.constexpr(0.3989422804014327)  # of the normal distribution at 0: 1 / sqrt(2 pi)
SLOPE = tl.constexpr(1.5957691216057308)  # 2 sqrt(2 / pi): 0.5 (1 + tanh z) = sigmoid(2 z)
CUBE = tl.constexpr(0.044715)
# Whether the units for powers and quotients are called by name: what Triton puts around them for the smallest and the
# largest numbers, which do not matter here, is a quarter of all instructions. Its interpreter knows no such names.
BARE = tl.constexpr(torch.version.cuda is not None and not triton.knobs.runtime.interpret)


@triton.jit
def power(x):
    """2 to the x; less than 2^-126 is 0."""
    if BARE:
        return tl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, is_pure=True, pack=1)
    else:
        return tl.exp2(x)


@triton.jit
def inverse(x):
    """1 / x; of more than 2^126 it is 0."""
    if BARE:
        return tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, is_pure=True, pack=1)
    else:
        return 1 / x


@triton.jit
def normal(x):
    """The normal distribution's share below x, and its density there.

    By a series in a quotient, as erf in Abramowitz and Stegun 7.1.26, but in 1 - t, which float32 does not cancel
    out, and fitted anew: in erf the fit is good to 3e-8, where theirs is to 1.5e-7, and rounding in float32 leaves
    2e-7; bfloat16 could show none of these. The library's erf takes twice the instructions, more than fit into the
    time of the bytes.
    """
    bell = power(x * x * (-0.5 * BASE))
    far = tl.abs(x) * (0.44 * ROOT)
    u = far * inverse(1 + far)
    tail = (
        0.5 + u * (-1.2822493715 + u * (1.300375512 + u * (-0.531753372 + u * (-0.1170905805 + u * 0.139752736))))
    ) * bell
    return tl.where(x < 0, tail, 1 - tail), DENSITY * bell


@triton.jit
def bend(x, ACT: tl.constexpr):
    """What the activation makes of x, and its slope there; what is not a number stays none."""
    if ACT == 2:  # gelu
        share, density = normal(x)
        value = x * share
        slope = share + x * density
    elif ACT == 3:  # gelu-tanh
        square = x * x
        share = inverse(1 + power(x * (-SLOPE * BASE - (SLOPE * CUBE * BASE) * square)))
        value = x * share
        slope = share + value * (1 - share) * (SLOPE + (3 * SLOPE * CUBE) * square)
    elif ACT == 4:  # silu
        share = inverse(1 + power(x * -BASE))
        value = x * share
        slope = share + value * (1 - share)
    else:  # relu2
        tl.static_assert(ACT == 5)
        value = tl.where(x < 0, 0.0, x * x)
        slope = tl.where(x < 0, 0.0, 2 * x)
    return value, slope


@triton.jit
def bend_kernel(
    pre, out, rows, columns, blocks,
    ACT: tl.constexpr, GATED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)  # one axis: the others are short
    row = (program // blocks) * ROWS + tl.arange(0, ROWS)
    at = (program % blocks) * COLUMNS + tl.arange(0, COLUMNS)
    inside = (row < rows)[:, None] & (at < columns)[None, :]
    row = row.to(tl.int64)[:, None]  # there may be more than 2^31 numbers
    pre += row * (2 * columns if GATED else columns) + at[None, :]
    value, _slope = bend(tl.load(pre, mask=inside, other=0.0).to(tl.float32), ACT)
    if GATED:
        value *= tl.load(pre + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * columns + at[None, :], value.to(out.dtype.element_ty), mask=inside)


@triton.jit
def unbend_kernel(
    grad, pre, out, sums, rows, columns, parts,
    ACT: tl.constexpr, GATED: tl.constexpr, SUMS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    part, wide = tl.program_id(1), 2 * columns if GATED else columns
    at = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    # Added up at the end only: in every round the threads would have to wait for each other.
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    beside = tl.zeros([ROWS, COLUMNS], tl.float32)
    for tile in tl.range(part, tl.cdiv(rows, ROWS), parts, num_stages=STAGES):
        row = tile * ROWS + tl.arange(0, ROWS)
        inside = (row < rows)[:, None] & (at < columns)[None, :]
        row = row.to(tl.int64)[:, None]
        here = row * wide + at[None, :]
        given = tl.load(grad + row * columns + at[None, :], mask=inside, other=0.0).to(tl.float32)
        value, slope = bend(tl.load(pre + here, mask=inside, other=0.0).to(tl.float32), ACT)
        if GATED:
            slope *= tl.load(pre + columns + here, mask=inside, other=0.0).to(tl.float32)
            value *= given
            tl.store(out + columns + here, value.to(out.dtype.element_ty), mask=inside)
            if SUMS:
                beside += value
        slope *= given
        tl.store(out + here, slope.to(out.dtype.element_ty), mask=inside)
        if SUMS:
            total += slope
    if SUMS:
        sums += part * wide + at
        tl.store(sums, tl.sum(total, 0), mask=at < columns)
        if GATED:
            tl.store(sums + columns, tl.sum(beside, 0), mask=at < columns)


def bent(pre: Tensor, bias: Tensor | None, activation: str, *, gated: bool = False) -> Tensor:
    """`activation(pre)`, or `activation(gate) * up` of the two halves of each row.

    `pre` holds `bias` as a constant: its gradient comes from here.
    """
    result: Tensor = forward(pre, bias, activation, gated)
    return result


# Operators, so that the compiler takes them as they are. Gradients are theirs and not an autograd Function's, which
# torch 2.11 may get wrong when compiled (its issues 180642, 181146). The compiler's cache on disk knows `forward` by
# its name and arguments alone, and has the way back under that key too, as it was when it was compiled. So shapes
# depend on nothing but arguments; and whoever changes `_gradients`, or what an operator takes or returns, renames
# both, or a step from the cache would go on in the old way.


@torch.library.custom_op(
    "trivium::bent", mutates_args=(), schema="(Tensor pre, Tensor? bias, str activation, bool gated) -> Tensor"
)
def forward(pre: Tensor, bias: Tensor | None, activation: str, gated: bool) -> Tensor:
    out: Tensor = _forward_shape(pre, bias, activation, gated)
    launch_forward(pre.contiguous(), out, activation, FORWARD)
    return out


@forward.register_fake
def _forward_shape(pre: Tensor, bias: Tensor | None, activation: str, gated: bool) -> Tensor:
    return pre.new_empty(*pre.shape[:-1], pre.shape[-1] // (2 if gated else 1))


@torch.library.custom_op(
    "trivium::bent_backward",
    mutates_args=(),
    schema="(Tensor grad, Tensor pre, str activation, SymInt parts) -> (Tensor, Tensor)",
)
def backward(grad: Tensor, pre: Tensor, activation: str, parts: int) -> tuple[Tensor, Tensor]:
    """The gradient of `pre`, and the sums of its columns, [parts, H or 2 H]; 0 parts where none are wanted."""
    out, sums = _backward_shapes(grad, pre, activation, parts)
    launch_backward(grad.contiguous(), pre.contiguous(), out, sums, activation, BACKWARD)
    return out, sums


@backward.register_fake
def _backward_shapes(grad: Tensor, pre: Tensor, activation: str, parts: int) -> tuple[Tensor, Tensor]:
    return pre.new_empty(pre.shape), pre.new_empty(parts, pre.shape[-1], dtype=torch.float32)


def _remember(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    pre, bias, ctx.activation, _gated = inputs
    ctx.save_for_backward(pre)
    ctx.kind = None if bias is None else bias.dtype


def _gradients(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    summed = ctx.kind is not None and ctx.needs_input_grad[1]
    many = parts(grad.shape[-1], BACKWARD) if summed else 0
    grad_pre, sums = backward(grad, *ctx.saved_tensors, ctx.activation, many)
    return grad_pre, sums.sum(0).to(ctx.kind) if summed else None, None, None


forward.register_autograd(_gradients, setup_context=_remember)


def parts(columns: int, how: Launch) -> int:
    """Into how many the rows are parted; not by their number, which may change from step to step."""
    return max(1, how.programs // _blocks(columns, how))


def _columns(columns: int, how: Launch) -> int:
    """Of a tile."""
    return min(how.columns, int(triton.next_power_of_2(columns)))


def _blocks(columns: int, how: Launch) -> int:
    """Tiles side by side."""
    return -(-columns // _columns(columns, how))


def launch_forward(pre: Tensor, out: Tensor, activation: str, how: Launch) -> None:
    """Run the kernel over all tiles; both lie row after row."""
    columns = out.shape[-1]
    rows, blocks = out.numel() // columns, _blocks(columns, how)
    if rows == 0:
        return
    with torch.cuda.device_of(pre):  # Triton would start it on the current GPU
        bend_kernel[(blocks * triton.cdiv(rows, how.rows),)](
            pre, out, rows, columns, blocks, ACT=ACTIVATIONS[activation], GATED=pre.shape[-1] != columns,
            ROWS=how.rows, COLUMNS=_columns(columns, how), num_warps=how.warps,
        )  # fmt: skip


def launch_backward(grad: Tensor, pre: Tensor, out: Tensor, sums: Tensor, activation: str, how: Launch) -> None:
    """Run the kernel over all tiles, in as many parts as there are sums for; everything lies row after row."""
    columns = grad.shape[-1]
    rows, many = grad.numel() // columns, len(sums) or parts(columns, how)
    with torch.cuda.device_of(grad):
        unbend_kernel[(_blocks(columns, how), many)](
            grad, pre, out, sums, rows, columns, many, ACT=ACTIVATIONS[activation], GATED=pre.shape[-1] != columns,
            SUMS=len(sums) > 0, ROWS=how.rows, COLUMNS=_columns(columns, how), STAGES=how.stages, num_warps=how.warps,
        )  # fmt: skip
