"""Products of up to 64 rows with a large matrix, as decoding has them: bias, activation and residual on the way.

The inputs of one output are split among programs where outputs are few; the last of them adds up in a fixed order, so
that results repeat. Imported on CUDA only; `Linear` is the plain version.
"""

# B rows, N outputs, K inputs

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from trivium.kernels.step import ACTIVATIONS, activate, begun, started

# mypy: disable-error-code="no-untyped-def"


@triton.jit  # type: ignore[untyped-decorator]
def _product(
    x, weight, bias, gate, gate_bias, out, partial, arrived, rows, outputs,
    INPUTS: tl.constexpr, EACH: tl.constexpr, PARTS: tl.constexpr, BIAS: tl.constexpr, RESIDUAL: tl.constexpr,
    GATED: tl.constexpr, ACT: tl.constexpr, ROWS: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr,
    EARLY: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """WIDE outputs of all rows, from EACH of the inputs; the residual is what `out` has before."""
    tile, part = tl.program_id(0), tl.program_id(1)
    m, n, k0 = tl.arange(0, ROWS), tile * WIDE + tl.arange(0, WIDE), tl.arange(0, BLOCK)
    sums = tl.zeros([ROWS, WIDE], tl.float32)
    gates = tl.zeros([ROWS, WIDE], tl.float32)
    x_at = x + m[:, None] * INPUTS
    w_at = n[None, :].to(tl.int64) * INPUTS
    if AHEAD > 0:  # bring the weights to the cache while the kernel before this one still runs
        lines = tl.minimum(part * EACH + tl.arange(0, AHEAD) * 64, INPUTS - 64)
        fetched = weight + tl.minimum(n, outputs - 1)[:, None].to(tl.int64) * INPUTS + lines[None, :]
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [fetched], dtype=tl.int32, is_pure=False, pack=1
        )
    if BIAS:
        added = tl.load(bias + n, mask=n < outputs, other=0.0).to(tl.float32)
        if GATED:
            gate_added = tl.load(gate_bias + n, mask=n < outputs, other=0.0).to(tl.float32)
    begun(EARLY)
    for start in range(0, EACH, BLOCK):
        k = part * EACH + start + k0
        a = tl.load(x_at + k[None, :], mask=(m < rows)[:, None] & (k < INPUTS)[None, :], other=0.0)
        real = (n < outputs)[None, :] & (k < INPUTS)[:, None]
        w = tl.load(weight + w_at + k[:, None], mask=real, other=0.0)
        sums = tl.dot(a, w, sums, input_precision="ieee")
        if GATED:
            v = tl.load(gate + w_at + k[:, None], mask=real, other=0.0)
            gates = tl.dot(a, v, gates, input_precision="ieee")
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
            sums += added[None, :]
        if GATED:
            if BIAS:
                gates += gate_added[None, :]
            sums = sums * activate(gates, ACT)
        else:
            sums = activate(sums, ACT)
        out_at = out + m[:, None] * outputs + n[None, :]
        real = (m < rows)[:, None] & (n < outputs)[None, :]
        if RESIDUAL:
            sums += tl.load(out_at, mask=real, other=0.0).to(tl.float32)
        tl.store(out_at, sums.to(out.dtype.element_ty), mask=real)


def product(
    x_BK: Tensor,
    weight_NK: Tensor,
    bias: Tensor | None,
    arrived: Tensor,
    *,
    activation: str = "identity",
    gated: tuple[Tensor, Tensor | None] | None = None,
    residual: Tensor | None = None,
    tile: tuple[int, int, int, int] = (0, 0, 0, 0),
    early: bool = False,
    ahead: bool = False,
) -> Tensor:
    """`activation(x W^T + bias) + residual` of at most 64 rows; with `gated` weights the activation is theirs.

    The result is written to `residual` if there is one. `arrived` int32 are zeros, at least one for each tile, and are
    so again afterwards. `tile` is (outputs of a program, inputs at a time, parts of the inputs, stages); `ahead`
    fetches weights before the kernel in front of this one is done.
    """
    rows, inputs = x_BK.shape
    outputs = len(weight_NK)
    out = x_BK.new_empty(rows, outputs) if residual is None else residual
    wide, block, count, stages = tile if tile[0] else _tile(outputs, inputs, gated is not None)
    tiles, each = triton.cdiv(outputs, wide), triton.cdiv(triton.cdiv(inputs, count), block) * block
    padded = max(16, triton.next_power_of_2(rows))
    size = tiles * count * padded * wide * (1 if gated is None else 2) if count > 1 else 1
    partial = x_BK.new_empty(size, dtype=torch.float32)
    _product[(tiles, count)](
        x_BK, weight_NK, weight_NK if bias is None else bias,
        weight_NK if gated is None else gated[0], weight_NK if gated is None or gated[1] is None else gated[1],
        out, partial, arrived, rows, outputs,
        INPUTS=inputs, EACH=each, PARTS=count, BIAS=bias is not None, RESIDUAL=residual is not None,
        GATED=gated is not None, ACT=ACTIVATIONS[activation], ROWS=padded, WIDE=wide, BLOCK=block,
        AHEAD=triton.next_power_of_2(each // 64) if early and ahead else 0, num_warps=4, num_stages=stages,
        **started(early),
    )  # fmt: skip
    return out


def _tile(outputs: int, inputs: int, gated: bool) -> tuple[int, int, int, int]:
    """Programs enough for all multiprocessors (measured on an H200 with 64 rows: bench/decode.py)."""
    if outputs > 8192:
        return 64, 64, 1, 5
    if gated:
        return 32, 128, 1, 3
    if inputs > 4096:
        return 32, 128, 4, 4
    return 16, 128, 1 if outputs > 2048 else 2, 4
