"""Attention of a few new tokens to a long cache, one program per row, group of heads and part of the keys.

"Flash decoding": the keys of a row are split among programs so that a single row too fills the GPU; the last program
of a row and group adds the parts up. Only what a row holds is read, and the heads of a group share that. Imported on
CUDA only; plain attention over `trivium.parts.cache.SlotMask` is the plain version.
"""

# B rows, H query heads, G key/value heads, T new tokens, S longest length, E head size, P parts

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from trivium.kernels.step import begun, started

# mypy: disable-error-code="no-untyped-def"

_PROGRAMS = 132  # wanted at least: one for each multiprocessor of an H200


class Turn(NamedTuple):
    """Rotary positions: the angle per position of each pair, what cosines and sines are multiplied by, the layout."""

    frequencies: Tensor
    strength: float
    interleaved: bool


@triton.jit  # type: ignore[untyped-decorator]
def turned(base, at, e, position, frequencies, strength, real, PAIRS: tl.constexpr, INTERLEAVED: tl.constexpr):
    """The vectors at `base + at + e` turned by their position, float32."""
    x = tl.load(base + at + e, mask=real, other=0.0).to(tl.float32)
    if PAIRS > 0:
        if INTERLEAVED:
            other, pair, sign = e ^ 1, e // 2, tl.where(e % 2 == 0, -1.0, 1.0)
        else:
            other, pair, sign = tl.where(e < PAIRS, e + PAIRS, e - PAIRS), e % PAIRS, tl.where(e < PAIRS, -1.0, 1.0)
        within = e < 2 * PAIRS
        y = tl.load(base + at + tl.where(within, other, e), mask=real, other=0.0).to(tl.float32)
        angle = position.to(tl.float32) * tl.load(frequencies + tl.where(within, pair, 0))
        x = tl.where(within, (x * tl.cos(angle) + y * sign * tl.sin(angle)) * strength, x)
    return x


@triton.jit
def _weigh(q, k, v, seen, best, total, mixed, scale):
    """Some more keys and values, of which `seen` count."""
    scores = tl.dot(q, k, input_precision="ieee") * scale
    scores = tl.where(seen, scores, -float("inf"))
    higher = tl.maximum(best, tl.max(scores, 1))
    weights = tl.exp(scores - higher[:, None])
    shrink = tl.exp(best - higher)
    total = total * shrink + tl.sum(weights, 1)
    mixed = mixed * shrink[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
    return higher, total, mixed


@triton.jit  # type: ignore[untyped-decorator]
def _finish(
    best, total, mixed, out_at, real, partial, sums, arrived, pair, part, dtype,
    ROWS: tl.constexpr, PAD: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Write the mixed values; of several parts the last program to arrive does it, for all in a fixed order."""
    if PARTS == 1:
        tl.store(out_at, (mixed / total[:, None]).to(dtype), mask=real)
    else:
        rows, e = tl.arange(0, ROWS), tl.arange(0, PAD)
        here = pair * PARTS
        partial_at = partial + rows[:, None] * PAD + e[None, :]
        tl.store(partial_at + (here + part) * ROWS * PAD, mixed, mask=real)
        tl.store(sums + (here + part) * 2 * ROWS + rows, best)
        tl.store(sums + ((here + part) * 2 + 1) * ROWS + rows, total)
        tl.debug_barrier()  # all threads' parts are written before one thread says so
        before = tl.atomic_add(arrived + pair, 1, sem="acq_rel", scope="gpu")
        if before == PARTS - 1:
            best = tl.full([ROWS], -1e30, tl.float32)
            total = tl.zeros([ROWS], tl.float32)
            mixed = tl.zeros([ROWS, PAD], tl.float32)
            for other in tl.static_range(PARTS):  # unrolled: the loads wait for each other no longer
                its_best = tl.load(sums + (here + other) * 2 * ROWS + rows, cache_modifier=".cg")
                its_total = tl.load(sums + ((here + other) * 2 + 1) * ROWS + rows, cache_modifier=".cg")
                at = partial_at + (here + other) * ROWS * PAD
                its_mixed = tl.load(at, mask=real, other=0.0, cache_modifier=".cg")
                higher = tl.maximum(best, its_best)
                shrink, its_shrink = tl.exp(best - higher), tl.exp(its_best - higher)
                total = total * shrink + its_total * its_shrink
                mixed = mixed * shrink[:, None] + its_mixed * its_shrink[:, None]
                best = higher
            tl.store(out_at, (mixed / total[:, None]).to(dtype), mask=real)
            tl.store(arrived + pair, 0)  # ready for the next launch


@triton.jit  # type: ignore[untyped-decorator]
def _attend(
    query, keys, values, lengths, out, partial, sums, arrived, scale,
    query_b, query_h, query_t, keys_b, keys_g, keys_s, values_b, values_g, values_s,
    GROUPS: tl.constexpr, SHARE: tl.constexpr, NEW: tl.constexpr, ROWS: tl.constexpr,
    KEY: tl.constexpr, KEY_PAD: tl.constexpr, VALUE: tl.constexpr, VALUE_PAD: tl.constexpr,
    LONGEST: tl.constexpr, WINDOW: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """ROWS (a power of two) hold the SHARE heads x NEW queries of one group."""
    b, g, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    length = tl.load(lengths + b).to(tl.int32)
    rows = tl.arange(0, ROWS)
    head, new = g * SHARE + rows // NEW, rows % NEW
    real = rows < SHARE * NEW
    at = tl.minimum(length + new, LONGEST - 1)  # a full row goes on in its last place
    held = tl.minimum(length + NEW, LONGEST)
    key_e, value_e = tl.arange(0, KEY_PAD), tl.arange(0, VALUE_PAD)
    q_at = query + b * query_b + head[:, None] * query_h + new[:, None] * query_t + key_e[None, :]
    q = tl.load(q_at, mask=real[:, None] & (key_e < KEY)[None, :], other=0.0)
    first = 0
    if WINDOW > 0:
        first = tl.maximum(length + 1 - WINDOW, 0) // BLOCK * BLOCK
    each = tl.cdiv(tl.cdiv(held - first, BLOCK), PARTS) * BLOCK
    begin = first + part * each
    stop = tl.minimum(begin + each, held)
    best = tl.full([ROWS], -1e30, tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    mixed = tl.zeros([ROWS, VALUE_PAD], tl.float32)
    for start in range(begin, stop, BLOCK):
        s = start + tl.arange(0, BLOCK)
        k_at = keys + b * keys_b + g * keys_g + s[None, :] * keys_s + key_e[:, None]
        k = tl.load(k_at, mask=(s < stop)[None, :] & (key_e < KEY)[:, None], other=0.0)
        v_at = values + b * values_b + g * values_g + s[:, None] * values_s + value_e[None, :]
        v = tl.load(v_at, mask=(s < stop)[:, None] & (value_e < VALUE)[None, :], other=0.0)
        seen = (s[None, :] <= at[:, None]) & (s < stop)[None, :]
        if WINDOW > 0:
            seen = seen & (s[None, :] > at[:, None] - WINDOW)
        best, total, mixed = _weigh(q, k, v, seen, best, total, mixed, scale)
    out_at = out + ((b * GROUPS * SHARE + head[:, None]) * NEW + new[:, None]) * VALUE + value_e[None, :]
    written = real[:, None] & (value_e < VALUE)[None, :]
    _finish(
        best, total, mixed, out_at, written, partial, sums, arrived, b * GROUPS + g, part, out.dtype.element_ty,
        ROWS, VALUE_PAD, PARTS,
    )  # fmt: skip


@triton.jit  # type: ignore[untyped-decorator]
def _mix(
    packed, keys, values, lengths, out, partial, sums, arrived, frequencies, strength, scale,
    GROUPS: tl.constexpr, SHARE: tl.constexpr, ROWS: tl.constexpr, SIZE: tl.constexpr, PAD: tl.constexpr,
    LONGEST: tl.constexpr, WINDOW: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr,
    PAIRS: tl.constexpr, INTERLEAVED: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Turn the new query and key, keep key and value, and attend; ROWS hold the SHARE heads of one group."""
    b, g, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    length = tl.minimum(tl.load(lengths + b).to(tl.int32), LONGEST - 1)  # a full row goes on in its last place
    rows, e = tl.arange(0, ROWS), tl.arange(0, PAD)
    real = (rows < SHARE)[:, None] & (e < SIZE)[None, :]
    dtype = keys.dtype.element_ty
    held = (b * GROUPS + g).to(tl.int64) * LONGEST * SIZE
    first = 0
    if WINDOW > 0:
        first = tl.maximum(length + 1 - WINDOW, 0)
    each = tl.cdiv(tl.cdiv(length - first, BLOCK), PARTS) * BLOCK
    begin = first + part * each
    stop = tl.minimum(begin + each, length)
    # what earlier steps have written can be read before the kernel in front of this one is done
    s = begin + tl.arange(0, BLOCK)
    k = tl.load(keys + held + s[None, :] * SIZE + e[:, None], mask=(s < stop)[None, :] & (e < SIZE)[:, None], other=0.0)
    v = tl.load(
        values + held + s[:, None] * SIZE + e[None, :], mask=(s < stop)[:, None] & (e < SIZE)[None, :], other=0.0
    )
    begun(EARLY)
    own = packed + b * (GROUPS * (SHARE + 2) * SIZE)
    q_at = (g * SHARE + rows)[:, None] * SIZE
    q = turned(own, q_at, e[None, :], length, frequencies, strength, real, PAIRS, INTERLEAVED).to(dtype)
    best = tl.full([ROWS], -1e30, tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    mixed = tl.zeros([ROWS, PAD], tl.float32)
    if part == 0:
        k_at = (GROUPS * SHARE + g) * SIZE
        key = turned(own, k_at, e, length, frequencies, strength, e < SIZE, PAIRS, INTERLEAVED).to(dtype)
        value = tl.load(own + (GROUPS * (SHARE + 1) + g) * SIZE + e, mask=e < SIZE, other=0.0)
        tl.store(keys + held + length * SIZE + e, key, mask=e < SIZE)
        tl.store(values + held + length * SIZE + e, value, mask=e < SIZE)
        best = tl.sum(q.to(tl.float32) * key.to(tl.float32)[None, :], 1) * scale
        total += 1.0
        mixed += value.to(tl.float32)[None, :]
    best, total, mixed = _weigh(q, k, v, (s < stop)[None, :], best, total, mixed, scale)
    for start in range(begin + BLOCK, stop, BLOCK):
        s = start + tl.arange(0, BLOCK)
        k_mask, v_mask = (s < stop)[None, :] & (e < SIZE)[:, None], (s < stop)[:, None] & (e < SIZE)[None, :]
        k = tl.load(keys + held + s[None, :] * SIZE + e[:, None], mask=k_mask, other=0.0)
        v = tl.load(values + held + s[:, None] * SIZE + e[None, :], mask=v_mask, other=0.0)
        best, total, mixed = _weigh(q, k, v, (s < stop)[None, :], best, total, mixed, scale)
    out_at = out + b * (GROUPS * SHARE * SIZE) + q_at + e[None, :]
    _finish(
        best, total, mixed, out_at, real, partial, sums, arrived, b * GROUPS + g, part, dtype, ROWS, PAD, PARTS
    )  # fmt: skip


@triton.jit
def _look(q, k, v, real, best, total, mixed, scale):
    """Some more keys and values for one query; every place of a block keeps sums of its own, so that none waits."""
    scores = tl.where(real, tl.sum(k.to(tl.float32) * q[None, :], 1) * scale, -float("inf"))
    higher = tl.maximum(best, scores)
    shrink, weights = tl.exp(best - higher), tl.exp(scores - higher)
    total = total * shrink + weights
    mixed = mixed * shrink[:, None] + weights[:, None] * v.to(tl.float32)
    return higher, total, mixed


@triton.jit  # type: ignore[untyped-decorator]
def _mix_single(
    packed, keys, values, lengths, out, partial, sums, arrived, frequencies, strength, scale,
    GROUPS: tl.constexpr, SIZE: tl.constexpr, PAD: tl.constexpr,
    LONGEST: tl.constexpr, WINDOW: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
    PAIRS: tl.constexpr, INTERLEAVED: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """As `_mix` where every head has keys of its own: without products of matrices, at the speed of the memory."""
    b, g, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    length = tl.minimum(tl.load(lengths + b).to(tl.int32), LONGEST - 1)
    e = tl.arange(0, PAD)
    dtype = keys.dtype.element_ty
    held = (b * GROUPS + g).to(tl.int64) * LONGEST * SIZE
    first = 0
    if WINDOW > 0:
        first = tl.maximum(length + 1 - WINDOW, 0)
    each = tl.cdiv(tl.cdiv(length - first, BLOCK), PARTS) * BLOCK
    begin = first + part * each
    stop = tl.minimum(begin + each, length)
    s = begin + tl.arange(0, BLOCK)
    real = (s < stop)[:, None] & (e < SIZE)[None, :]
    k = tl.load(keys + held + s[:, None] * SIZE + e[None, :], mask=real, other=0.0)
    v = tl.load(values + held + s[:, None] * SIZE + e[None, :], mask=real, other=0.0)
    begun(EARLY)
    own = packed + b * (3 * GROUPS * SIZE)
    q = turned(own, g * SIZE, e, length, frequencies, strength, e < SIZE, PAIRS, INTERLEAVED).to(dtype).to(tl.float32)
    best = tl.full([BLOCK], -1e30, tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    mixed = tl.zeros([BLOCK, PAD], tl.float32)
    best, total, mixed = _look(q, k, v, s < stop, best, total, mixed, scale)
    for start in tl.range(begin + BLOCK, stop, BLOCK, num_stages=STAGES):
        s = start + tl.arange(0, BLOCK)
        real = (s < stop)[:, None] & (e < SIZE)[None, :]
        k = tl.load(keys + held + s[:, None] * SIZE + e[None, :], mask=real, other=0.0)
        v = tl.load(values + held + s[:, None] * SIZE + e[None, :], mask=real, other=0.0)
        best, total, mixed = _look(q, k, v, s < stop, best, total, mixed, scale)
    highest = tl.max(best, 0)
    shrink = tl.exp(best - highest)
    whole = tl.sum(total * shrink, 0)
    value = tl.sum(mixed * shrink[:, None], 0)
    if part == 0:
        new_key = turned(own, (GROUPS + g) * SIZE, e, length, frequencies, strength, e < SIZE, PAIRS, INTERLEAVED)
        new_key = new_key.to(dtype)
        new_value = tl.load(own + (2 * GROUPS + g) * SIZE + e, mask=e < SIZE, other=0.0)
        tl.store(keys + held + length * SIZE + e, new_key, mask=e < SIZE)
        tl.store(values + held + length * SIZE + e, new_value, mask=e < SIZE)
        score = tl.sum(q * new_key.to(tl.float32), 0) * scale
        higher = tl.maximum(highest, score)
        old, new = tl.exp(highest - higher), tl.exp(score - higher)
        whole = whole * old + new
        value = value * old + new * new_value.to(tl.float32)
        highest = higher
    one = tl.zeros([1], tl.float32)
    out_at = out + (b * GROUPS + g) * SIZE + e[None, :]
    _finish(
        one + highest, one + whole, value[None, :], out_at, (e < SIZE)[None, :], partial, sums, arrived,
        b * GROUPS + g, part, dtype, 1, PAD, PARTS,
    )  # fmt: skip


def fits(query_BHTE: Tensor, keys_BGSE: Tensor, values_BGSE: Tensor) -> bool:
    """Whether the kernel takes it: few queries of each group, heads of usual size."""
    share = query_BHTE.shape[1] // keys_BGSE.shape[1] * query_BHTE.shape[2]
    wide = max(keys_BGSE.shape[3], values_BGSE.shape[3])
    return share <= 64 and wide <= 256 and query_BHTE.dtype == keys_BGSE.dtype != torch.float64


def attend(
    query_BHTE: Tensor,
    keys_BGSE: Tensor,
    values_BGSE: Tensor,
    lengths_B: Tensor,
    arrived: Tensor,
    scale: float,
    window: int,
) -> Tensor:
    """The mixed values [B, H, T, E] of each row's newest T tokens, which the cache holds already.

    `arrived` [B, G] int32 are zeros, and are so again afterwards.
    """
    batch, heads, new, key = query_BHTE.shape
    groups, longest, value = keys_BGSE.shape[1], keys_BGSE.shape[2], values_BGSE.shape[3]
    if query_BHTE.stride(3) != 1:
        query_BHTE = query_BHTE.contiguous()
    share = heads // groups
    rows = max(16, triton.next_power_of_2(share * new))  # 16: the least that a product on tensor cores has
    pad = max(16, triton.next_power_of_2(value))
    block, count = _split(batch * groups, longest)
    out = query_BHTE.new_empty(batch, heads, new, value)
    partial, sums = _scratch(query_BHTE, batch * groups * count, rows, pad, count)
    _attend[(batch, groups, count)](
        query_BHTE, keys_BGSE, values_BGSE, lengths_B, out, partial, sums, arrived, scale,
        *query_BHTE.stride()[:3], *keys_BGSE.stride()[:3], *values_BGSE.stride()[:3],
        GROUPS=groups, SHARE=share, NEW=new, ROWS=rows, KEY=key, KEY_PAD=max(16, triton.next_power_of_2(key)),
        VALUE=value, VALUE_PAD=pad, LONGEST=longest, WINDOW=window, PARTS=count, BLOCK=block,
        num_warps=4, num_stages=3,
    )  # fmt: skip
    return out


def mix(
    packed: Tensor,
    keys_BGSE: Tensor,
    values_BGSE: Tensor,
    lengths_B: Tensor,
    arrived: Tensor,
    heads: int,
    scale: float,
    window: int,
    turn: Turn | None,
    tile: tuple[int, int, int, int] = (0, 0, 0, 0),
    *,
    early: bool = False,
    single: bool = False,
) -> Tensor:
    """Attention's mixed values [B, H E] from queries, keys and values side by side, [B, (H + 2 G) E].

    Key and value are written behind each row's length; `arrived` [B, G] int32 are zeros, and are so again afterwards.
    `tile` is (keys at a time, parts, warps, stages); `single` chooses the kernel for heads that share no keys, if so.
    """
    batch, groups, longest, size = keys_BGSE.shape
    share, pad = heads // groups, max(16, triton.next_power_of_2(size))
    rows = max(16, triton.next_power_of_2(share))  # 16: the least that a product on tensor cores has
    block, count, warps, stages = tile if tile[0] else (*_split(batch * groups, longest), 4, 3)
    out = packed.new_empty(batch, heads * size)
    partial, sums = _scratch(packed, batch * groups * count, rows, pad, count)
    frequencies, strength, turning = angles(turn, sums)
    given = (packed, keys_BGSE, values_BGSE, lengths_B, out, partial, sums, arrived, frequencies, strength, scale)
    options = {"LONGEST": longest, "WINDOW": window, "PARTS": count, "BLOCK": block, **turning, **started(early)}
    if share == 1 and single:
        _mix_single[(batch, groups, count)](
            *given, GROUPS=groups, SIZE=size, PAD=pad, STAGES=stages, num_warps=warps, **options
        )
    else:
        _mix[(batch, groups, count)](
            *given, GROUPS=groups, SHARE=share, ROWS=rows, SIZE=size, PAD=pad, num_warps=warps, num_stages=stages,
            **options,
        )  # fmt: skip
    return out


def angles(turn: Turn | None, nothing: Tensor) -> tuple[Tensor, float, dict[str, Any]]:
    """What kernels are told of a rotation; `nothing` stands for the angles where there are none."""
    if turn is None:
        return nothing, 1.0, {"PAIRS": 0, "INTERLEAVED": False}
    return turn.frequencies, turn.strength, {"PAIRS": len(turn.frequencies), "INTERLEAVED": turn.interleaved}


def _scratch(like: Tensor, programs: int, rows: int, pad: int, parts: int) -> tuple[Tensor, Tensor]:
    count = programs if parts > 1 else 0
    partial = like.new_empty(max(1, count * rows * pad), dtype=torch.float32)
    return partial, like.new_empty(max(1, count * 2 * rows), dtype=torch.float32)


def _split(programs: int, longest: int) -> tuple[int, int]:
    """Keys at a time, and among how many programs those of one row and group are split: a power of two."""
    if programs >= _PROGRAMS:
        return 32, 1
    count = 1
    while count * programs < _PROGRAMS and count * 64 < longest and count < 16:
        count *= 2
    return 64, count
