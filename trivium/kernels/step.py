"""The kernels of one decoding step: few tokens, many weights, so that starting kernels costs as much as their work.

Each does what several would: norm and product, product and activation and residual. Where the GPU can (Hopper), a
kernel starts while the one before it still runs, and reads its weights meanwhile ("programmatic dependent launch").
Imported on CUDA only; the modules that they stand for are the plain versions.
"""

# B rows, N outputs, K inputs, D width

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

# mypy: disable-error-code="no-untyped-def"

ACTIVATIONS = {"identity": 0, "relu": 1, "gelu": 2, "gelu-tanh": 3, "silu": 4, "relu2": 5, "sigmoid": 6}


class Scale(NamedTuple):
    """A norm over the width: its learned numbers, and whether it centres."""

    weight: Tensor
    bias: Tensor | None
    eps: float
    centred: bool


@triton.jit  # type: ignore[untyped-decorator]
def begun(EARLY: tl.constexpr):
    """Wait for the kernels before this one, if it was started early, and let the next one start.

    In this order: whatever comes before the wait may then rely on all kernels but the one right before this one.
    """
    if EARLY:
        gdc_wait()
        gdc_launch_dependents()


@triton.jit  # type: ignore[untyped-decorator]
def activate(x, ACT: tl.constexpr):
    if ACT == 1:
        x = tl.maximum(x, 0.0)
    elif ACT == 2:
        x = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    elif ACT == 3:
        x = x * tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))  # 0.5 (1 + tanh z) = sigmoid(2 z)
    elif ACT == 4:
        x = x * tl.sigmoid(x)
    elif ACT == 5:
        x = tl.maximum(x, 0.0) * tl.maximum(x, 0.0)
    elif ACT == 6:
        x = tl.sigmoid(x)
    return x


@triton.jit  # type: ignore[untyped-decorator]
def _enter(
    tokens, lengths, weight, table, out, scale,
    WIDTH: tl.constexpr, PAD: tl.constexpr, LONGEST: tl.constexpr, OFFSET: tl.constexpr, TABLE: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    b = tl.program_id(0)
    d = tl.arange(0, PAD)
    begun(EARLY)
    id = tl.load(tokens + b)
    x = tl.load(weight + id * WIDTH + d, mask=d < WIDTH).to(tl.float32) * scale
    if TABLE:
        at = tl.minimum(tl.load(lengths + b), LONGEST - 1) + OFFSET
        x += tl.load(table + at * WIDTH + d, mask=d < WIDTH).to(tl.float32)
    tl.store(out + b * WIDTH + d, x.to(out.dtype.element_ty), mask=d < WIDTH)


@triton.jit  # type: ignore[untyped-decorator]
def _norm(
    x, weight, bias, out, add, eps,
    WIDTH: tl.constexpr, PAD: tl.constexpr, CENTRED: tl.constexpr, BIAS: tl.constexpr, ADD: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    b = tl.program_id(0)
    d = tl.arange(0, PAD)
    gain = tl.load(weight + d, mask=d < WIDTH, other=0.0).to(tl.float32)  # before what has to be waited for
    if BIAS:
        shift = tl.load(bias + d, mask=d < WIDTH, other=0.0).to(tl.float32)
    if ADD:
        more = tl.load(add + d, mask=d < WIDTH, other=0.0).to(tl.float32)
    begun(EARLY)
    raw = tl.load(x + b * WIDTH + d, mask=d < WIDTH, other=0.0)
    value = raw.to(tl.float32)
    if CENTRED:
        value = tl.where(d < WIDTH, value - tl.sum(value, 0) / WIDTH, 0.0)
    value = value * tl.rsqrt(tl.sum(value * value, 0) / WIDTH + eps)
    if not CENTRED:
        value = value.to(out.dtype.element_ty).to(tl.float32)  # rounded before the scale, as published LLaMAs are
    value = value * gain
    if BIAS:
        value += shift
    tl.store(out + b * WIDTH + d, value.to(out.dtype.element_ty), mask=d < WIDTH)
    if ADD:
        more += raw.to(tl.float32)
        tl.store(x + b * WIDTH + d, more.to(x.dtype.element_ty), mask=d < WIDTH)


@triton.jit  # type: ignore[untyped-decorator]
def _gate(gate, up, out, count, ACT: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr):
    begun(EARLY)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = activate(tl.load(gate + at, mask=at < count).to(tl.float32), ACT)
    value = value * tl.load(up + at, mask=at < count).to(tl.float32)
    tl.store(out + at, value.to(out.dtype.element_ty), mask=at < count)


@triton.jit  # type: ignore[untyped-decorator]
def normed(value, gain, shift, mean, scale, dtype, NORM: tl.constexpr):
    """Some of the inputs, normed."""
    if NORM > 0:
        value = (value - mean) * scale
        if NORM == 1:
            value = value.to(dtype).to(tl.float32)  # as published LLaMAs are
        value = (value * gain + shift).to(dtype).to(tl.float32)
    return value


@triton.jit  # type: ignore[untyped-decorator]
def _multiply(
    x, weight, bias, gate, gate_bias, residual, out, norm_weight, norm_bias, eps, outputs,
    INPUTS: tl.constexpr, NORM: tl.constexpr, NORM_BIAS: tl.constexpr, BIAS: tl.constexpr, RESIDUAL: tl.constexpr,
    GATED: tl.constexpr, ACT: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """ROWS outputs of a product with one row of inputs; NORM is 0 without, 1 without centring, 2 with."""
    n = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    k0 = tl.arange(0, BLOCK)
    at = n[:, None].to(tl.int64) * INPUTS + k0[None, :]
    real = (n < outputs)[:, None] & (k0 < INPUTS)[None, :]
    # learned numbers depend on nothing: they come while others still run, and no later load waits for a sum
    w = tl.load(weight + at, mask=real, other=0.0)
    if GATED:
        v = tl.load(gate + at, mask=real, other=0.0)
    if BIAS:
        added = tl.load(bias + n, mask=n < outputs, other=0.0).to(tl.float32)
        if GATED:
            gate_added = tl.load(gate_bias + n, mask=n < outputs, other=0.0).to(tl.float32)
    gain, shift = 1.0, 0.0
    if NORM > 0:
        gain = tl.load(norm_weight + k0, mask=k0 < INPUTS, other=0.0).to(tl.float32)
        if NORM_BIAS:
            shift = tl.load(norm_bias + k0, mask=k0 < INPUTS, other=0.0).to(tl.float32)
    begun(EARLY)
    dtype = x.dtype.element_ty
    first = tl.load(x + k0, mask=k0 < INPUTS, other=0.0).to(tl.float32)
    if RESIDUAL:
        before = tl.load(residual + n, mask=n < outputs, other=0.0).to(tl.float32)
    mean, scale = 0.0, 1.0
    if NORM == 2:
        total = first
        for k in range(BLOCK, INPUTS, BLOCK):
            total += tl.load(x + k + k0, mask=k + k0 < INPUTS, other=0.0).to(tl.float32)
        mean = tl.sum(total, 0) / INPUTS
    if NORM > 0:
        value = tl.where(k0 < INPUTS, first - mean, 0.0)
        total = value * value
        for k in range(BLOCK, INPUTS, BLOCK):
            value = tl.load(x + k + k0, mask=k + k0 < INPUTS, other=0.0).to(tl.float32)
            value = tl.where(k + k0 < INPUTS, value - mean, 0.0)
            total += value * value
        scale = tl.rsqrt(tl.sum(total, 0) / INPUTS + eps)
    value = normed(first, gain, shift, mean, scale, dtype, NORM)
    sums = w.to(tl.float32) * value[None, :]
    if GATED:
        gates = v.to(tl.float32) * value[None, :]
    for k in range(BLOCK, INPUTS, BLOCK):
        real = (n < outputs)[:, None] & (k + k0 < INPUTS)[None, :]
        w = tl.load(weight + at + k, mask=real, other=0.0)
        value = tl.load(x + k + k0, mask=k + k0 < INPUTS, other=0.0).to(tl.float32)
        if NORM > 0:
            gain = tl.load(norm_weight + k + k0, mask=k + k0 < INPUTS, other=0.0).to(tl.float32)
            if NORM_BIAS:
                shift = tl.load(norm_bias + k + k0, mask=k + k0 < INPUTS, other=0.0).to(tl.float32)
        value = normed(value, gain, shift, mean, scale, dtype, NORM)
        sums += w.to(tl.float32) * value[None, :]
        if GATED:
            v = tl.load(gate + at + k, mask=real, other=0.0)
            gates += v.to(tl.float32) * value[None, :]
    result = tl.sum(sums, 1)
    if BIAS:
        result += added
    if GATED:
        gated = tl.sum(gates, 1)
        if BIAS:
            gated += gate_added
        result = result * activate(gated, ACT)
    else:
        result = activate(result, ACT)
    if RESIDUAL:
        result += before
    tl.store(out + n, result.to(out.dtype.element_ty), mask=n < outputs)


@triton.jit  # type: ignore[untyped-decorator]
def _best(logits, shut, found, places, vocab, PARTS: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr):
    """The highest score of a block and the first place that has it; plus infinity stands for what is no number."""
    b, part = tl.program_id(0), tl.program_id(1)
    v = part * BLOCK + tl.arange(0, BLOCK)
    begun(EARLY)
    x = tl.load(logits + b.to(tl.int64) * vocab + v, mask=v < vocab, other=-float("inf")).to(tl.float32)
    x = tl.where(tl.load(shut + v, mask=v < vocab, other=1) != 0, -float("inf"), x)
    x = tl.where(x == x, x, float("inf"))
    highest = tl.max(x, 0)
    tl.store(found + b * PARTS + part, highest)
    tl.store(places + b * PARTS + part, tl.min(tl.where(x == highest, v, vocab), 0))


@triton.jit  # type: ignore[untyped-decorator]
def _move(
    found, places, last, lengths, active, ring, count, slots,
    PARTS: tl.constexpr, PAD: tl.constexpr, LONGEST: tl.constexpr, RING: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    b = tl.program_id(0)
    part = tl.arange(0, PAD)
    begun(EARLY)
    x = tl.load(found + b * PARTS + part, mask=part < PARTS, other=-float("inf"))
    at = tl.load(places + b * PARTS + part, mask=part < PARTS, other=2147483647)
    highest = tl.max(x, 0)
    id = tl.min(tl.where(x == highest, at, 2147483647), 0).to(tl.int64)
    id = tl.where(tl.abs(highest) < float("inf"), id, -1)
    step = tl.load(count + b)
    tl.store(ring + (step % RING) * slots + b, id)
    tl.store(count + b, step + 1)
    tl.store(last + b, tl.maximum(id, 0))
    length = tl.minimum(tl.load(lengths + b) + 1, LONGEST - 1)
    tl.store(lengths + b, length * tl.load(active + b))


def enter(
    tokens_B: Tensor,
    lengths_B: Tensor,
    weight_VD: Tensor,
    table: Tensor | None,
    offset: int,
    scale: float,
    longest: int,
    *,
    early: bool = False,
) -> Tensor:
    """The vectors [B, D] of these ids, times `scale`, with the rows of their positions from `table` added."""
    width = weight_VD.shape[1]
    out_BD = weight_VD.new_empty(len(tokens_B), width)
    _enter[(len(tokens_B),)](
        tokens_B, lengths_B, weight_VD, weight_VD if table is None else table, out_BD, scale,
        WIDTH=width, PAD=triton.next_power_of_2(width), LONGEST=longest, OFFSET=offset, TABLE=table is not None,
        **started(early),
    )  # fmt: skip
    return out_BD


def norm(x_BD: Tensor, scale: Scale, add_D: Tensor | None = None, *, early: bool = False) -> Tensor:
    """The rows normed; afterwards `add` is added to `x` itself, where a product will be added too."""
    out_BD = torch.empty_like(x_BD)
    width = x_BD.shape[1]
    _norm[(len(x_BD),)](
        x_BD, scale.weight, x_BD if scale.bias is None else scale.bias, out_BD, x_BD if add_D is None else add_D,
        scale.eps, WIDTH=width, PAD=triton.next_power_of_2(width), CENTRED=scale.centred, BIAS=scale.bias is not None,
        ADD=add_D is not None, num_warps=4 if width <= 4096 else 8, **started(early),
    )  # fmt: skip
    return out_BD


def gate(gate_BN: Tensor, up_BN: Tensor, activation: str, *, early: bool = False) -> Tensor:
    """`activation(gate) * up`."""
    out_BN = torch.empty_like(up_BN)
    count = up_BN.numel()
    _gate[(triton.cdiv(count, 1024),)](
        gate_BN, up_BN, out_BN, count, ACT=ACTIVATIONS[activation], BLOCK=1024, **started(early)
    )  # fmt: skip
    return out_BN


def multiply(
    x_1K: Tensor,
    weight_NK: Tensor,
    bias: Tensor | None,
    *,
    scale: Scale | None = None,
    activation: str = "identity",
    gated: tuple[Tensor, Tensor | None] | None = None,
    residual: Tensor | None = None,
    tile: tuple[int, int, int] = (0, 0, 0),
    early: bool = False,
) -> Tensor:
    """`activation(norm(x) W^T + bias) + residual` for one row; with `gated` weights the activation is theirs.

    The result is written to `residual` if there is one. `tile` is (outputs of a program, inputs at a time, warps).
    """
    outputs, inputs = weight_NK.shape
    out = x_1K.new_empty(1, outputs) if residual is None else residual
    rows, block, warps = tile if tile[0] else _tile(outputs, inputs, gated is not None)
    _multiply[(triton.cdiv(outputs, rows),)](
        x_1K, weight_NK, weight_NK if bias is None else bias,
        weight_NK if gated is None else gated[0], weight_NK if gated is None or gated[1] is None else gated[1],
        out, out, x_1K if scale is None else scale.weight,
        x_1K if scale is None or scale.bias is None else scale.bias, 0.0 if scale is None else scale.eps, outputs,
        INPUTS=inputs, NORM=0 if scale is None else 2 if scale.centred else 1,
        NORM_BIAS=scale is not None and scale.bias is not None, BIAS=bias is not None, RESIDUAL=residual is not None,
        GATED=gated is not None, ACT=ACTIVATIONS[activation], ROWS=rows, BLOCK=block, num_warps=warps, **started(early),
    )  # fmt: skip
    return out


def _tile(outputs: int, inputs: int, gated: bool) -> tuple[int, int, int]:
    """Few outputs for each program where inputs are few (measured on an H200: bench/decode.py)."""
    if inputs <= 1024:
        return (2, triton.next_power_of_2(inputs), 4) if outputs <= 8192 else (4, 1024, 2)
    if inputs <= 2048:
        return (4 if gated else 8, 2048, 4)
    return (1 if outputs <= 1024 else 2, 4096, 4)


def started(early: bool) -> dict[str, Any]:
    """How a kernel is launched that may start before the one in front of it is done."""
    return {"EARLY": True, "launch_pdl": True} if early else {"EARLY": False}


def move(
    logits_BV: Tensor,
    shut_V: Tensor,
    last_B: Tensor,
    lengths_B: Tensor,
    active_B: Tensor,
    ring_RB: Tensor,
    count_B: Tensor,
    longest: int,
    *,
    early: bool = False,
) -> None:
    """Take the likeliest id of every row, -1 where the scores are not finite, and move the rows on with it."""
    slots, vocab = logits_BV.shape
    block = max(1024, triton.next_power_of_2(triton.cdiv(vocab, 64)))
    count = triton.cdiv(vocab, block)
    found = logits_BV.new_empty(slots, count, dtype=torch.float32)
    places = logits_BV.new_empty(slots, count, dtype=torch.int32)
    _best[(slots, count)](
        logits_BV.contiguous(), shut_V, found, places, vocab, PARTS=count, BLOCK=block, **started(early)
    )  # fmt: skip
    _move[(slots,)](
        found, places, last_B, lengths_B, active_B, ring_RB, count_B, slots,
        PARTS=count, PAD=triton.next_power_of_2(count), LONGEST=longest, RING=len(ring_RB), num_warps=1,
        **started(early),
    )  # fmt: skip
