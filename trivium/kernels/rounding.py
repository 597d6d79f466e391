"""Rows rounded to float8 by the kernels that make them; only for a GPU.

A row's scale needs its largest magnitude, so that whoever rounds a row later reads it twice. Here a program has whole
rows in its registers, or the widest in a cache: it writes them once in 16 bits and once in 8. The three are the hidden
layer, the gradient before its activation, and the gradients of queries, keys and values side by side. What comes out
are the bits of `fp8.quantized`, for rows of 16-bit numbers.
"""

# N rows, H columns of the hidden layer; of a gated one, gate and up lie side by side in rows of 2 H
# B rows of T tokens, E head size
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, assignment"
# ruff: noqa: RUF005 (a kernel of Triton can add tuples, but not unpack one into another)

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from trivium.kernels.bend import BARE, Launch, bend
from trivium.kernels.fp8 import FORMAT
from trivium.kernels.step import ACTIVATIONS

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
LEAST = tl.constexpr(1e-30)
MOST = tl.constexpr(torch.finfo(FORMAT).max)
SHARE = tl.constexpr(1 / torch.finfo(FORMAT).max)
ENDLESS = tl.constexpr(float("inf"))
PROCESSORS = 132  # of an H200
# Programs that walk down the rows at the same time on one processor, by their warps: as many as its registers hold.
AT_ONCE = {4: 6, 8: 2, 16: 1, 32: 1}
# Rows of more numbers do not stay in registers until their scale is known, where two programs would fill a processor.
HELD = 8192
TWICE = Launch(1, 2048, 8)  # loads of 16 bytes, and many warps in few programs: what these write stays in the cache


@triton.jit
def narrowed(x, out):
    """x in the numbers of `out`."""
    if BARE and (x.dtype == tl.float32 and out.dtype.element_ty == tl.bfloat16):
        # Two at a time: what is used again afterwards Triton would convert one by one, in a slower unit.
        return tl.inline_asm_elementwise(
            "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,r,r", [x], tl.bfloat16, is_pure=True, pack=2
        )  # fmt: skip
    else:
        return x.to(out.dtype.element_ty)


@triton.jit
def magnitude(x):
    """The bits of |x| as a number: they are ordered as the magnitudes, and above all is what is not a number."""
    return x.to(tl.float32).to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def scaled(most):
    """Of each row its scale, [ROWS, 1], the divisor for `eighth`, and the inverse of the scale."""
    largest = tl.max(most, 1)[:, None].to(tl.float32, bitcast=True)
    largest = tl.where(largest < LEAST, LEAST, largest)
    # A GPU's as torch divides by a constant there, compiled or not.
    scale = largest / MOST if INTERPRETED else largest * SHARE
    # An endless one would be no number times 0: then nothing is to be corrected.
    return scale, tl.where(scale == ENDLESS, 0.0, scale), tl.div_rn(1.0, scale)


@triton.jit
def eighth(x, divisor, inverse):
    """The nearest 8-bit number to x / divisor, as after a division.

    Times the inverse alone, 1 of 3,000 would be a half that falls to the wrong side. With what that leaves over brought
    in, every quotient of 16-bit numbers is right (the tests count), in three instructions where a division is a dozen.
    The signs are such that a negative 0 stays one, beside what is endless too.
    """
    x = x.to(tl.float32)
    near = x * inverse
    over = tl.fma(near, divisor, -x)
    return cast(tl.fma(over, inverse * -1.0, near))  # -inverse is 0 - inverse in Triton 3.6, never a negative 0


@triton.jit
def cast(x):
    """To 8 bits, halves to even; x is at most half a step beyond the largest."""
    if INTERPRETED:  # which drops carries and small numbers (triton 3.9)
        whole = x.to(tl.int32, bitcast=True)
        bits = whole & 0x7FFFFFFF
        large = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - ((127 - 7) << 3)
        small = (tl.abs(x) + 16384.0).to(tl.int32, bitcast=True) - 0x46800000  # in steps of 2^-9, those of 2^14
        bits = tl.where(x == x, tl.where(bits < 0x3C800000, small, large), 0x7F)  # 2^-6
        return (bits | ((whole >> 24) & 0x80)).to(tl.uint8).to(tl.float8e4nv, bitcast=True)
    else:
        return x.to(tl.float8e4nv)


@triton.jit
def settled(
    made, total, out, values, scales, row, there, columns,
    SPANS: tl.constexpr, PIECES: tl.constexpr, COLUMNS: tl.constexpr, SUMS: tl.constexpr,
):  # fmt: skip
    """Store whole rows, in pieces, as they are and in 8 bits; returns the `total` of each piece with them."""
    at = tl.arange(0, COLUMNS)[None, :]
    here = row * (SPANS * columns) + at
    kept, summed = (), ()
    most = tl.zeros(made[0].shape, tl.int32)
    for tile in tl.static_range(SPANS * PIECES):
        inside = there & (tile % PIECES * COLUMNS + at < columns)
        kept = kept + (narrowed(made[tile], out),)
        most = tl.maximum(most, magnitude(kept[tile]))
        tl.store(out + here + (tile // PIECES * columns + tile % PIECES * COLUMNS), kept[tile], mask=inside)
        if SUMS:
            summed = summed + (total[tile] + made[tile].to(tl.float32),)
    scale, divisor, inverse = scaled(most)
    tl.store(scales + row, scale, mask=there)
    for tile in tl.static_range(SPANS * PIECES):
        inside = there & (tile % PIECES * COLUMNS + at < columns)
        rounded = eighth(kept[tile], divisor, inverse)
        tl.store(values + here + (tile // PIECES * columns + tile % PIECES * COLUMNS), rounded, mask=inside)
    return summed


@triton.jit
def zeros(SPANS: tl.constexpr, PIECES: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, SUMS: tl.constexpr):
    """Where the columns of a row's pieces are added up, if they are; rows stay apart until the end."""
    total = ()
    for _tile in tl.static_range(SPANS * PIECES if SUMS else 0):
        total = total + (tl.zeros([ROWS, COLUMNS], tl.float32),)
    return total


@triton.jit
def summed_up(
    total, sums, part, columns,
    SPANS: tl.constexpr, PIECES: tl.constexpr, COLUMNS: tl.constexpr, SUMS: tl.constexpr,
):  # fmt: skip
    at = tl.arange(0, COLUMNS)
    sums += part.to(tl.int64) * (SPANS * columns) + at
    for tile in tl.static_range(SPANS * PIECES if SUMS else 0):
        inside = tile % PIECES * COLUMNS + at < columns
        tl.store(sums + (tile // PIECES * columns + tile % PIECES * COLUMNS), tl.sum(total[tile], 0), mask=inside)


@triton.jit
def slopes(given, gate, up, ACT: tl.constexpr, GATED: tl.constexpr):
    """The gradients of what was bent and, of a gated layer, of what that was multiplied by."""
    given = given.to(tl.float32)
    value, slope = bend(gate.to(tl.float32), ACT)
    if GATED:
        slope *= up.to(tl.float32)
    return slope * given, value * given


# A row is one, two or three SPANS of columns, each in so many PIECES, which tuples hold. All loads stand before the
# stores, since nothing could move them across.


@triton.jit
def bent8_kernel(
    pre, out, values, scales, rows, columns,
    ACT: tl.constexpr, GATED: tl.constexpr, PIECES: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    there = row < rows
    row = row.to(tl.int64)  # there may be more than 2^31 numbers
    at = tl.arange(0, COLUMNS)[None, :]
    pre += row * (2 * columns if GATED else columns) + at
    gates, ups, made = (), (), ()
    for piece in tl.static_range(PIECES):
        inside = there & (piece * COLUMNS + at < columns)
        gates = gates + (tl.load(pre + piece * COLUMNS, mask=inside, other=0.0),)
        ups = ups + (tl.load(pre + columns + piece * COLUMNS, mask=inside, other=0.0) if GATED else gates[piece],)
    for piece in tl.static_range(PIECES):
        value, _slope = bend(gates[piece].to(tl.float32), ACT)
        made = made + (value * ups[piece].to(tl.float32) if GATED else value,)
    settled(made, (), out, values, scales, row, there, columns, 1, PIECES, COLUMNS, False)


@triton.jit
def unbent8_kernel(
    grad, pre, out, values, scales, sums, rows, columns, parts,
    ACT: tl.constexpr, GATED: tl.constexpr, SUMS: tl.constexpr, PIECES: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    part, at = tl.program_id(0), tl.arange(0, COLUMNS)[None, :]
    SPANS: tl.constexpr = 2 if GATED else 1
    total = zeros(SPANS, PIECES, ROWS, COLUMNS, SUMS)
    for tile in tl.range(part, tl.cdiv(rows, ROWS), parts, num_stages=STAGES):
        row = tile * ROWS + tl.arange(0, ROWS)[:, None]
        there = row < rows
        row = row.to(tl.int64)
        given, gates, ups = (), (), ()
        for piece in tl.static_range(PIECES):
            inside = there & (piece * COLUMNS + at < columns)
            here = pre + row * (SPANS * columns) + at + piece * COLUMNS
            given = given + (tl.load(grad + row * columns + at + piece * COLUMNS, mask=inside, other=0.0),)
            gates = gates + (tl.load(here, mask=inside, other=0.0),)
            ups = ups + (tl.load(here + columns, mask=inside, other=0.0) if GATED else gates[piece],)
        left, right = (), ()
        for piece in tl.static_range(PIECES):
            one, two = slopes(given[piece], gates[piece], ups[piece], ACT, GATED)
            left, right = left + (one,), right + (two,)
        made = left + right if GATED else left
        total = settled(made, total, out, values, scales, row, there, columns, SPANS, PIECES, COLUMNS, SUMS)
    summed_up(total, sums, part, columns, SPANS, PIECES, COLUMNS, SUMS)


@triton.jit
def unbent8_twice_kernel(
    grad, pre, out, values, scales, columns,
    ACT: tl.constexpr, GATED: tl.constexpr, COLUMNS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """The same of one row, piece after piece: read back to be rounded, it takes few registers."""
    SPANS: tl.constexpr = 2 if GATED else 1
    row, at = tl.program_id(0).to(tl.int64), tl.arange(0, COLUMNS)[None, :]
    grad += row * columns
    here = row * (SPANS * columns)
    most = tl.zeros([1, COLUMNS], tl.int32)
    for first in tl.range(0, columns, COLUMNS, num_stages=STAGES):
        inside = first + at < columns
        given = tl.load(grad + first + at, mask=inside, other=0.0, eviction_policy="evict_first")
        gates = pre + here + first + at
        gate = tl.load(gates, mask=inside, other=0.0, eviction_policy="evict_first")
        up = tl.load(gates + columns, mask=inside, other=0.0, eviction_policy="evict_first") if GATED else gate
        made = slopes(given, gate, up, ACT, GATED)
        for span in tl.static_range(SPANS):
            kept = narrowed(made[span], out)
            most = tl.maximum(most, magnitude(kept))
            tl.store(out + here + span * columns + first + at, kept, mask=inside)
    scale, divisor, inverse = scaled(most)
    tl.store(scales + row + tl.zeros([1, 1], tl.int32), scale)
    # What threads of a block wrote, all of them read behind their barrier; and no other block writes this row.
    tl.debug_barrier()
    at = tl.arange(0, SPANS * COLUMNS)[None, :]
    for first in tl.range(0, SPANS * columns, SPANS * COLUMNS, num_stages=1):
        inside = first + at < SPANS * columns
        kept = tl.load(out + here + first + at, mask=inside, other=0.0)
        tl.store(values + here + first + at, eighth(kept, divisor, inverse), mask=inside)


@triton.jit
def laid8_kernel(
    query, key, value, out, values, scales, sums, query_row, query_head, query_token, key_row, key_head, key_token,
    value_row, value_head, value_token, rows, length, columns, parts,
    E: tl.constexpr, SUMS: tl.constexpr, PIECES: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    part, at = tl.program_id(0), tl.arange(0, COLUMNS)[None, :]
    total = zeros(3, PIECES, ROWS, COLUMNS, SUMS)
    for tile in tl.range(part, tl.cdiv(rows, ROWS), parts, num_stages=STAGES):
        row = tile * ROWS + tl.arange(0, ROWS)[:, None]
        there = row < rows
        outer, token, row = (row // length).to(tl.int64), (row % length).to(tl.int64), row.to(tl.int64)
        queries, keys, others = (), (), ()
        for piece in tl.static_range(PIECES):
            column = piece * COLUMNS + at
            inside = there & (column < columns)
            head, column = (column // E).to(tl.int64), column % E
            one = query + (outer * query_row + token * query_token) + (head * query_head + column)
            two = key + (outer * key_row + token * key_token) + (head * key_head + column)
            three = value + (outer * value_row + token * value_token) + (head * value_head + column)
            queries = queries + (tl.load(one, mask=inside, other=0.0, eviction_policy="evict_first"),)
            keys = keys + (tl.load(two, mask=inside, other=0.0, eviction_policy="evict_first"),)
            others = others + (tl.load(three, mask=inside, other=0.0, eviction_policy="evict_first"),)
        made = queries + keys + others
        total = settled(made, total, out, values, scales, row, there, columns, 3, PIECES, COLUMNS, SUMS)
    summed_up(total, sums, part, columns, 3, PIECES, COLUMNS, SUMS)


# Operators, as in bend.py, and what it says of them holds here too; none has a gradient.


@torch.library.custom_op(
    "trivium::bent8", mutates_args=(), schema="(Tensor pre, str activation, bool gated) -> (Tensor, Tensor, Tensor)"
)
def bent8(pre: Tensor, activation: str, gated: bool) -> tuple[Tensor, Tensor, Tensor]:
    """`activation(pre)`, or `activation(gate) * up` of the halves of each row; its 8 bits, and their scales [N, 1]."""
    made: tuple[Tensor, Tensor, Tensor] = _bent8_shapes(pre, activation, gated)
    launch_bent8(pre.contiguous(), made, activation, planned(made[0].shape[-1]))
    return made


@bent8.register_fake
def _bent8_shapes(pre: Tensor, activation: str, gated: bool) -> tuple[Tensor, Tensor, Tensor]:
    out = pre.new_empty(*pre.shape[:-1], pre.shape[-1] // (2 if gated else 1))
    return out, *_rounded_shapes(out)


@torch.library.custom_op(
    "trivium::unbent8",
    mutates_args=(),
    schema="(Tensor grad, Tensor pre, str activation, SymInt parts) -> (Tensor, Tensor, Tensor, Tensor)",
)
def unbent8(grad: Tensor, pre: Tensor, activation: str, parts: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The gradient of `pre`, its 8 bits and their scales, and the sums of its columns [parts, H or 2 H], not rounded.

    Each part is one program's: `parts` of this file says how many are fast. With 0 there are no sums.
    """
    grad, pre = grad.contiguous(), pre.contiguous()
    made: tuple[Tensor, Tensor, Tensor, Tensor] = _unbent8_shapes(grad, pre, activation, parts)
    if parts == 0 and pre.shape[-1] > HELD:
        launch_twice(grad, pre, made, activation, TWICE)
    else:
        launch_unbent8(grad, pre, made, activation, planned(grad.shape[-1], pre.shape[-1] // grad.shape[-1]))
    return made


@unbent8.register_fake
def _unbent8_shapes(grad: Tensor, pre: Tensor, activation: str, parts: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    out = pre.new_empty(pre.shape)
    return out, *_rounded_shapes(out), out.new_empty(parts, out.shape[-1], dtype=torch.float32)


@torch.library.custom_op(
    "trivium::laid8",
    mutates_args=(),
    schema="(Tensor query, Tensor key, Tensor value, SymInt parts) -> (Tensor, Tensor, Tensor, Tensor)",
)
def laid8(query: Tensor, key: Tensor, value: Tensor, parts: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Three gradients, each [B, H, T, E], side by side [B T, 3 H E], with 8 bits, scales and sums as of `unbent8`."""
    made: tuple[Tensor, Tensor, Tensor, Tensor] = _laid8_shapes(query, key, value, parts)
    launch_laid8(query, key, value, made, planned(made[0].shape[-1] // 3, 3))
    return made


@laid8.register_fake
def _laid8_shapes(query: Tensor, key: Tensor, value: Tensor, parts: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    rows, heads, length, size = query.shape
    out = query.new_empty(rows * length, 3 * heads * size)
    return out, *_rounded_shapes(out), out.new_empty(parts, out.shape[-1], dtype=torch.float32)


def _rounded_shapes(out: Tensor) -> tuple[Tensor, Tensor]:
    return out.new_empty(out.shape, dtype=FORMAT), out.new_empty(*out.shape[:-1], 1, dtype=torch.float32)


def _warps(wide: int) -> int:
    """Of a program: at most 32 numbers of a row for each thread, as long as there are so many threads."""
    return min(32, max(4, int(triton.next_power_of_2(-(-wide // 1024)))))


def planned(columns: int, spans: int = 1) -> Launch:
    """How rows of so many spans of columns are gone over."""
    warps = _warps(spans * columns)
    # Threads load 4 numbers in one go, or in short rows 8 where that leaves no more of the last piece unused.
    wide = 256 * warps if warps == 4 and (columns - 1) % (256 * warps) >= 128 * warps else 128 * warps
    wide = min(wide, int(triton.next_power_of_2(columns)))
    rows = min(16, 1024 // wide, 4096 // (spans * wide * -(-columns // wide)))
    # Programs that walk load a row ahead, as long as there is room for it.
    return Launch(1 << max(0, rows.bit_length() - 1), wide, warps, stages=2 if warps < 32 else 1)


def parts(wide: int) -> int:
    """Into how many rows of so many numbers are best parted, for sums; by nothing that changes from step to step."""
    return PROCESSORS * AT_ONCE[_warps(wide)]


@torch.compiler.assume_constant_result
def constant_parts(wide: int) -> int:
    """The same, not seen by the compiler: it need not follow Triton's arithmetic. Decorating imports dynamo, a second
    that only a process with Triton pays.
    """
    return parts(wide)


# `made`: rows, 8 bits, scales and sums. Everything lies row after row, but for gradients by heads.


def launch_bent8(pre: Tensor, made: tuple[Tensor, ...], activation: str, how: Launch) -> None:
    columns, rows = made[0].shape[-1], made[2].numel()
    with torch.cuda.device_of(pre):  # Triton would start it on the current GPU
        bent8_kernel[(triton.cdiv(rows, how.rows),)](
            pre, *made, rows, columns, ACT=ACTIVATIONS[activation], GATED=pre.shape[-1] != columns,
            PIECES=triton.cdiv(columns, how.columns), ROWS=how.rows, COLUMNS=how.columns, num_warps=how.warps,
        )  # fmt: skip


def launch_unbent8(grad: Tensor, pre: Tensor, made: tuple[Tensor, ...], activation: str, how: Launch) -> None:
    columns, rows, summed = grad.shape[-1], made[2].numel(), len(made[3])
    many = summed or triton.cdiv(rows, how.rows)
    with torch.cuda.device_of(grad):
        unbent8_kernel[(many,)](
            grad, pre, *made, rows, columns, many, ACT=ACTIVATIONS[activation], GATED=pre.shape[-1] != columns,
            SUMS=summed > 0, PIECES=triton.cdiv(columns, how.columns), ROWS=how.rows, COLUMNS=how.columns,
            STAGES=how.stages if summed else 1, num_warps=how.warps,  # a single tile has none to load ahead
        )  # fmt: skip


def launch_twice(grad: Tensor, pre: Tensor, made: tuple[Tensor, ...], activation: str, how: Launch) -> None:
    """`launch_unbent8` for wide rows without sums."""
    columns = grad.shape[-1]
    with torch.cuda.device_of(grad):
        unbent8_twice_kernel[(made[2].numel(),)](
            grad, pre, *made[:3], columns, ACT=ACTIVATIONS[activation], GATED=pre.shape[-1] != columns,
            COLUMNS=how.columns, STAGES=how.stages, num_warps=how.warps,
        )  # fmt: skip


def launch_laid8(query: Tensor, key: Tensor, value: Tensor, made: tuple[Tensor, ...], how: Launch) -> None:
    query, key, value = (one if one.stride(-1) == 1 else one.contiguous() for one in (query, key, value))
    (_, heads, length, size), rows, summed = query.shape, len(made[0]), len(made[3])
    many = summed or triton.cdiv(rows, how.rows)
    with torch.cuda.device_of(query):
        laid8_kernel[(many,)](
            query, key, value, *made, *query.stride()[:3], *key.stride()[:3], *value.stride()[:3],
            rows, max(length, 1), heads * size, many, E=size, SUMS=summed > 0,
            PIECES=triton.cdiv(heads * size, how.columns), ROWS=how.rows, COLUMNS=how.columns,
            STAGES=how.stages if summed else 1, num_warps=how.warps,
        )  # fmt: skip
