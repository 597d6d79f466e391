"""Products of few rows with 8- or 4-bit levels as they lie: decoding then reads a half or a quarter of the bytes.

One row is multiplied without tensor cores, the norm before it and all that follows on the way; up to 64 go to the
tensor cores as whole levels, exact in bfloat16, and every group's sum is scaled in float32. For more rows the matrix is
made whole in one pass. Imported on CUDA only; `trivium.parts.quantized` is the plain version.
"""

# B rows, N outputs, K inputs, G groups of bytes; a byte of 4-bit levels belongs to two groups of inputs
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

from __future__ import annotations

import struct
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from trivium.kernels.step import ACTIVATIONS, Scale, activate, begun, normed, started

Levels = tuple[Tensor, Tensor]  # int8 [N, P] or uint8 [N, P / 2], and scales: `quantized.Packed`

MOST = 64  # rows that are multiplied with the levels themselves
_PROGRAMS = 264  # wanted at least: two for each multiprocessor of an H200

# Four bytes at a time. A byte, or half of one, becomes part of the fraction of 2^23, from which subtraction leaves the
# level, exactly: three instructions for a weight, its product included, fewer than the compiler makes of `_floats`. At
# one row they are what counts: seven for each 4-bit weight would take longer than reading it.
_EIGHT = tl.constexpr(
    "{ .reg .b32 w, a; xor.b32 w, $4, 0x80808080;"
    + "".join(f"prmt.b32 a, w, 0x4B000000, 0x744{byte}; add.f32 ${byte}, a, 0fCB000080;" for byte in range(4))
    + "}"
)


def _halves() -> str:
    """The same for bytes of 4-bit levels: four low halves, then four high ones."""
    lines = ["{ .reg .b32 w, h, a; mov.b32 w, $8; shr.u32 h, w, 12;"]
    for half in (0, 4):
        for byte in range(4):
            place = 8 * byte + half
            word, place = ("w", place) if place < 20 else ("h", place - 12)  # a fraction has 23 bits
            power, offset = (struct.pack(">f", value).hex() for value in (2.0**-place, -(2.0 ** (23 - place)) - 8))
            lines.append(f"lop3.b32 a, {word}, {15 << place:#x}, {0x4B000000 | 8 << place:#x}, 0x6A;")  # and, then xor
            lines.append(f"fma.rn.f32 ${byte + half}, a, 0f{power}, 0f{offset};")
    return "".join([*lines, "}"])


_FOUR = tl.constexpr(_halves())


@triton.jit
def _floats(x, MASK: tl.constexpr, MIDDLE: tl.constexpr):
    """Some bits of an int32 as a signed number, by way of a float's fraction: conversions are slow on a GPU."""
    return ((x & MASK) ^ (0x4B000000 | MIDDLE)).to(tl.float32, bitcast=True) - (8388608.0 + MIDDLE)


@triton.jit
def _unpacked(held, SIZE: tl.constexpr, PLAIN: tl.constexpr):
    """The levels in bytes as floats, those of the low and the high halves (or all, twice)."""
    if SIZE == 64:
        if PLAIN:
            low = _floats(held.to(tl.int32), 255, 128)
        else:
            low = tl.inline_asm_elementwise(_EIGHT, "=f,=f,=f,=f,r", [held], dtype=tl.float32, is_pure=True, pack=4)
        high = low
    elif PLAIN:
        low = _floats(held.to(tl.int32), 15, 8)
        high = _floats(held.to(tl.int32), 240, 128) * 0.0625  # they stand 4 bits higher
    else:
        low, high = tl.inline_asm_elementwise(
            _FOUR, "=f,=f,=f,=f,=f,=f,=f,=f,r", [held], dtype=(tl.float32, tl.float32), is_pure=True, pack=4
        )
    return low, high


@triton.jit
def _fetched(levels, scales, n, g, outputs, COUNT: tl.constexpr, SIZE: tl.constexpr):
    """Levels [N, G, SIZE] as bytes, and the scales [N, G] of their low and high halves (of all of it if 8 bits)."""
    real = (n < outputs)[:, None] & (g < COUNT)[None, :]
    row = n[:, None].to(tl.int64)
    at = (row * COUNT + g[None, :]) * SIZE
    held = tl.load(levels + at[:, :, None] + tl.arange(0, SIZE)[None, None, :], mask=real[:, :, None], other=0)
    if SIZE == 64:
        low = tl.load(scales + row * COUNT + g[None, :], mask=real, other=0.0).to(tl.float32)
        high = low
    else:
        low = tl.load(scales + row * 2 * COUNT + g[None, :], mask=real, other=0.0).to(tl.float32)
        high = tl.load(scales + (row * 2 + 1) * COUNT + g[None, :], mask=real, other=0.0).to(tl.float32)
    return held, low, high


@triton.jit
def _weighed(held, low, high, x, y, SIZE: tl.constexpr, PLAIN: tl.constexpr):
    """The sum of every group [N, G]: levels times inputs [G, SIZE], those of the low halves and those of the high."""
    first, second = _unpacked(held, SIZE, PLAIN)
    sums = tl.sum(first * x[None, :, :], 2) * low
    if SIZE == 32:
        sums += tl.sum(second * y[None, :, :], 2) * high
    return sums


@triton.jit
def _moments(x, eps, INPUTS: tl.constexpr, PAD: tl.constexpr, NORM: tl.constexpr):
    """The mean that a norm subtracts, and what it multiplies with."""
    k = tl.arange(0, PAD)
    value = tl.load(x + k, mask=k < INPUTS, other=0.0).to(tl.float32)
    mean = 0.0
    if NORM == 2:
        mean = tl.sum(value, 0) / INPUTS
        value = tl.where(k < INPUTS, value - mean, 0.0)
    return mean, tl.rsqrt(tl.sum(value * value, 0) / INPUTS + eps)


@triton.jit
def _gains(norm_weight, norm_bias, k, INPUTS: tl.constexpr, NORM: tl.constexpr, NORM_BIAS: tl.constexpr):
    gain, shift = 1.0, 0.0
    if NORM > 0:
        gain = tl.load(norm_weight + k, mask=k < INPUTS, other=0.0).to(tl.float32)
        if NORM_BIAS:
            shift = tl.load(norm_bias + k, mask=k < INPUTS, other=0.0).to(tl.float32)
    return gain, shift


@triton.jit
def _one(
    x, levels, scales, bias, gate, gate_scales, gate_bias, out, norm_weight, norm_bias, eps, outputs,
    INPUTS: tl.constexpr, PAD: tl.constexpr, COUNT: tl.constexpr, SIZE: tl.constexpr, NORM: tl.constexpr,
    NORM_BIAS: tl.constexpr, BIAS: tl.constexpr, RESIDUAL: tl.constexpr, GATED: tl.constexpr, ACT: tl.constexpr,
    ROWS: tl.constexpr, GROUPS: tl.constexpr, PLAIN: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """ROWS outputs of one row, GROUPS at a time; NORM is 0 without, 1 without centring, 2 with."""
    HALF: tl.constexpr = COUNT * SIZE if SIZE == 32 else 0
    n, g = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, GROUPS)
    # learned numbers depend on nothing: they come while others still run, and no later load waits for a sum
    held, low, high = _fetched(levels, scales, n, g, outputs, COUNT, SIZE)
    if GATED:
        also, also_low, also_high = _fetched(gate, gate_scales, n, g, outputs, COUNT, SIZE)
    k = g[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
    gain, shift = _gains(norm_weight, norm_bias, k, INPUTS, NORM, NORM_BIAS)
    gain2, shift2 = _gains(norm_weight, norm_bias, k + HALF, INPUTS, NORM, NORM_BIAS)
    if BIAS:
        added = tl.load(bias + n, mask=n < outputs, other=0.0).to(tl.float32)
        if GATED:
            gate_added = tl.load(gate_bias + n, mask=n < outputs, other=0.0).to(tl.float32)
    begun(EARLY)
    dtype = x.dtype.element_ty
    value = tl.load(x + k, mask=k < INPUTS, other=0.0).to(tl.float32)
    other = tl.load(x + k + HALF, mask=k + HALF < INPUTS, other=0.0).to(tl.float32)
    if RESIDUAL:
        before = tl.load(out + n, mask=n < outputs, other=0.0).to(tl.float32)
    mean, scale = 0.0, 1.0
    if NORM > 0:
        mean, scale = _moments(x, eps, INPUTS, PAD, NORM)
    sums = tl.zeros([ROWS, GROUPS], tl.float32)
    gates = tl.zeros([ROWS, GROUPS], tl.float32)
    for first in tl.static_range(0, COUNT, GROUPS):
        now, now_low, now_high = held, low, high
        value = normed(value, gain, shift, mean, scale, dtype, NORM)
        other = normed(other, gain2, shift2, mean, scale, dtype, NORM)
        if first + GROUPS < COUNT:  # the next ones come meanwhile
            held, low, high = _fetched(levels, scales, n, first + GROUPS + g, outputs, COUNT, SIZE)
        sums += _weighed(now, now_low, now_high, value, other, SIZE, PLAIN)
        if GATED:
            gates += _weighed(also, also_low, also_high, value, other, SIZE, PLAIN)
        if first + GROUPS < COUNT:
            k += GROUPS * SIZE
            gain, shift = _gains(norm_weight, norm_bias, k, INPUTS, NORM, NORM_BIAS)
            gain2, shift2 = _gains(norm_weight, norm_bias, k + HALF, INPUTS, NORM, NORM_BIAS)
            value = tl.load(x + k, mask=k < INPUTS, other=0.0).to(tl.float32)
            other = tl.load(x + k + HALF, mask=k + HALF < INPUTS, other=0.0).to(tl.float32)
            if GATED:
                also, also_low, also_high = _fetched(gate, gate_scales, n, first + GROUPS + g, outputs, COUNT, SIZE)
    result, gated = tl.sum(sums, 1), tl.sum(gates, 1)
    if BIAS:
        result += added
        if GATED:
            gated += gate_added
    result = result * activate(gated, ACT) if GATED else activate(result, ACT)
    if RESIDUAL:
        result += before
    tl.store(out + n, result.to(out.dtype.element_ty), mask=n < outputs)


@triton.jit
def _scales(scales, n, g, outputs, COUNT: tl.constexpr, ALL: tl.constexpr, SHIFT: tl.constexpr):
    real = n < tl.where(g < COUNT, outputs, 0)
    return tl.load(scales + n.to(tl.int64) * ALL + SHIFT + g, mask=real, other=0.0).to(tl.float32)


@triton.jit
def _tensored(levels, at, real, a, c, low, high, SIZE: tl.constexpr):
    """The product of inputs [B, SIZE] with a group of every output, by tensor cores."""
    first, second = _unpacked(tl.load(levels + at, mask=real, other=0), SIZE, True)
    sums = tl.dot(a, first.to(a.dtype), input_precision="ieee") * low[None, :]
    if SIZE == 32:
        sums += tl.dot(c, second.to(a.dtype), input_precision="ieee") * high[None, :]
    return sums


@triton.jit
def _few(
    x, levels, scales, bias, gate, gate_scales, gate_bias, out, partial, arrived, rows, outputs,
    INPUTS: tl.constexpr, COUNT: tl.constexpr, SIZE: tl.constexpr, EACH: tl.constexpr, PARTS: tl.constexpr,
    BIAS: tl.constexpr, RESIDUAL: tl.constexpr, GATED: tl.constexpr, ACT: tl.constexpr,
    ROWS: tl.constexpr, WIDE: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """WIDE outputs of all rows from EACH of the groups, added up as `batch.product` does."""
    tile, part = tl.program_id(0), tl.program_id(1)
    m, n, e = tl.arange(0, ROWS), tile * WIDE + tl.arange(0, WIDE), tl.arange(0, SIZE)
    ALL: tl.constexpr = COUNT * (64 // SIZE)
    HIGH: tl.constexpr = ALL - COUNT
    sums = tl.zeros([ROWS, WIDE], tl.float32)
    gates = tl.zeros([ROWS, WIDE], tl.float32)
    x_at = x + m[:, None] * INPUTS
    w_at = n[None, :].to(tl.int64) * (COUNT * SIZE) + e[:, None]
    begin = part * EACH
    # one group ahead: what only scales a sum is not fetched ahead by the compiler
    low, high = _scales(scales, n, begin, outputs, COUNT, ALL, 0), _scales(scales, n, begin, outputs, COUNT, ALL, HIGH)
    if GATED:
        also_low = _scales(gate_scales, n, begin, outputs, COUNT, ALL, 0)
        also_high = _scales(gate_scales, n, begin, outputs, COUNT, ALL, HIGH)
    begun(EARLY)
    for g in range(begin, begin + EACH):
        k = g * SIZE + e
        inside = k < COUNT * SIZE
        a = tl.load(x_at + k[None, :], mask=(m < rows)[:, None] & (inside & (k < INPUTS))[None, :], other=0.0)
        c = a
        if SIZE == 32:
            k += COUNT * SIZE
            c = tl.load(x_at + k[None, :], mask=(m < rows)[:, None] & (k < INPUTS)[None, :], other=0.0)
        real = (n < outputs)[None, :] & inside[:, None]
        sums += _tensored(levels, w_at + g * SIZE, real, a, c, low, high, SIZE)
        low = _scales(scales, n, g + 1, outputs, COUNT, ALL, 0)
        high = _scales(scales, n, g + 1, outputs, COUNT, ALL, HIGH)
        if GATED:
            gates += _tensored(gate, w_at + g * SIZE, real, a, c, also_low, also_high, SIZE)
            also_low = _scales(gate_scales, n, g + 1, outputs, COUNT, ALL, 0)
            also_high = _scales(gate_scales, n, g + 1, outputs, COUNT, ALL, HIGH)
    last = True
    if PARTS > 1:
        own = partial + (tile * PARTS * (2 if GATED else 1)) * ROWS * WIDE
        at = m[:, None] * WIDE + tl.arange(0, WIDE)[None, :]
        tl.store(own + part * ROWS * WIDE + at, sums)
        if GATED:
            tl.store(own + (PARTS + part) * ROWS * WIDE + at, gates)
        tl.debug_barrier()  # all threads' sums are written before one thread says so
        last = tl.atomic_add(arrived + tile, 1, sem="acq_rel", scope="gpu") == PARTS - 1
        if last:
            sums = tl.zeros([ROWS, WIDE], tl.float32)
            gates = tl.zeros([ROWS, WIDE], tl.float32)
            for other in range(PARTS):
                sums += tl.load(own + other * ROWS * WIDE + at, cache_modifier=".cg")
                if GATED:
                    gates += tl.load(own + (PARTS + other) * ROWS * WIDE + at, cache_modifier=".cg")
            tl.store(arrived + tile, 0)  # ready for the next launch
    if last:
        if BIAS:
            sums += tl.load(bias + n, mask=n < outputs, other=0.0).to(tl.float32)[None, :]
            if GATED:
                gates += tl.load(gate_bias + n, mask=n < outputs, other=0.0).to(tl.float32)[None, :]
        sums = sums * activate(gates, ACT) if GATED else activate(sums, ACT)
        out_at = out + m[:, None] * outputs + n[None, :]
        real = (m < rows)[:, None] & (n < outputs)[None, :]
        if RESIDUAL:
            sums += tl.load(out_at, mask=real, other=0.0).to(tl.float32)
        tl.store(out_at, sums.to(out.dtype.element_ty), mask=real)


@triton.jit
def _whole(levels, scales, out, INPUTS: tl.constexpr, COUNT: tl.constexpr, SIZE: tl.constexpr, GROUPS: tl.constexpr):
    n = tl.program_id(0) + tl.arange(0, 1)
    g = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    held, low, high = _fetched(levels, scales, n, g, tl.num_programs(0), COUNT, SIZE)
    first, second = _unpacked(held, SIZE, True)
    k = g[None, :, None] * SIZE + tl.arange(0, SIZE)[None, None, :]
    out += n[:, None, None].to(tl.int64) * INPUTS
    real = (g < COUNT)[None, :, None]
    tl.store(out + k, (first * low[:, :, None]).to(out.dtype.element_ty), mask=real & (k < INPUTS))
    if SIZE == 32:
        k += COUNT * SIZE
        tl.store(out + k, (second * high[:, :, None]).to(out.dtype.element_ty), mask=real & (k < INPUTS))


class _Shape(NamedTuple):
    """How levels lie: so many groups of so many bytes for each output."""

    outputs: int
    groups: int
    size: int


def _shape(packed: Levels) -> _Shape:
    assert fits(packed)
    levels, scales = packed
    eight = levels.dtype == torch.int8
    return _Shape(len(levels), scales.shape[1] if eight else scales.shape[1] // 2, 64 if eight else 32)


def fits(packed: Levels) -> bool:
    """Whether the kernels take these levels: an even number of groups if they have 4 bits, and nothing between rows."""
    levels, scales = packed
    even = levels.dtype == torch.int8 or scales.shape[1] % 2 == 0
    return even and levels.is_contiguous() and scales.is_contiguous()


def multiply(
    x_BK: Tensor,
    packed: Levels,
    bias: Tensor | None,
    *,
    scale: Scale | None = None,
    activation: str = "identity",
    gated: tuple[Levels, Tensor | None] | None = None,
    residual: Tensor | None = None,
    arrived: Tensor | None = None,
    tile: tuple[int, int, int] = (0, 0, 0),
    early: bool = False,
) -> Tensor:
    """`activation(norm(x) W^T + bias) + residual` of at most `MOST` rows; with `gated` levels the activation is theirs.

    The result is written to `residual` if there is one; a norm (`scale`) is for one row only. `arrived` int32 are
    zeros, at least one for each tile, and are so again afterwards; without them the inputs of several rows are not
    split. `tile` is for one row (outputs of a program, groups at a time, warps), else (outputs, parts, stages).
    """
    rows, inputs = x_BK.shape
    shape = _shape(packed)
    out = x_BK.new_empty(rows, shape.outputs) if residual is None else residual
    other, other_bias = (packed, bias) if gated is None else gated
    assert (other_bias is None) == (bias is None)
    weights = (
        x_BK, *packed, packed[1] if bias is None else bias, *other, packed[1] if other_bias is None else other_bias, out
    )  # fmt: skip
    how = {
        "INPUTS": inputs, "COUNT": shape.groups, "SIZE": shape.size, "BIAS": bias is not None,
        "RESIDUAL": residual is not None, "GATED": gated is not None, "ACT": ACTIVATIONS[activation], **started(early),
    }  # fmt: skip
    if rows == 1:
        wide, groups, warps = tile if tile[0] else _single(shape)
        _one[(triton.cdiv(shape.outputs, wide),)](
            *weights, x_BK if scale is None else scale.weight,
            x_BK if scale is None or scale.bias is None else scale.bias, 0.0 if scale is None else scale.eps,
            shape.outputs, PAD=triton.next_power_of_2(inputs), NORM=0 if scale is None else 2 if scale.centred else 1,
            NORM_BIAS=scale is not None and scale.bias is not None, ROWS=wide, GROUPS=groups,
            PLAIN=x_BK.device.type != "cuda", num_warps=warps, **how,
        )  # fmt: skip
        return out
    assert scale is None
    wide, parts, stages = tile if tile[0] else _several(shape, x_BK.dtype)
    parts = 1 if arrived is None else parts
    tiles, padded = triton.cdiv(shape.outputs, wide), max(16, triton.next_power_of_2(rows))
    partial = x_BK.new_empty(tiles * parts * padded * wide * 2 if parts > 1 else 1, dtype=torch.float32)
    _few[(tiles, parts)](
        *weights, partial, partial if arrived is None else arrived, rows, shape.outputs,
        EACH=triton.cdiv(shape.groups, parts), PARTS=parts, ROWS=padded, WIDE=wide, num_warps=4, num_stages=stages,
        **how,
    )  # fmt: skip
    return out


def whole(packed: Levels, inputs: int, dtype: torch.dtype) -> Tensor:
    """The matrix that levels stand for, [N, K] in one pass."""
    outputs, count, size = _shape(packed)
    result_NK = torch.empty(outputs, inputs, dtype=dtype, device=packed[0].device)
    groups = min(32, triton.next_power_of_2(count))
    _whole[(outputs, triton.cdiv(count, groups))](
        *packed, result_NK, INPUTS=inputs, COUNT=count, SIZE=size, GROUPS=groups, num_warps=2
    )  # fmt: skip
    return result_NK


def _single(shape: _Shape) -> tuple[int, int, int]:
    """Programs enough for all multiprocessors; for TinyLlama on an H200 at most 16 % slower than the best of five."""
    groups = triton.next_power_of_2(shape.groups) if shape.groups <= 64 else 32
    wide = 8 if shape.outputs >= 8 * _PROGRAMS else 4
    return wide, groups, 4


def _several(shape: _Shape, dtype: torch.dtype) -> tuple[int, int, int]:
    """Parts of at least four groups, as many as it takes to keep all multiprocessors busy; a prediction."""
    wide = 64 if shape.outputs >= 64 * _PROGRAMS else 32
    wide = 16 if dtype == torch.float32 else wide  # without tensor cores: more would not fit into the registers
    parts = 1
    while parts * triton.cdiv(shape.outputs, wide) < _PROGRAMS and shape.groups // (2 * parts) >= 4:
        parts *= 2
    return wide, parts, 4
