"""Prompts on their way into slots: queries and keys turned where they are, keys and values kept.

Imported on CUDA only; `MultiHeadAttention` with a cache is the plain version.
"""

# n prompts, T tokens, B slots, H query heads, G key/value heads, S longest length, E head size

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from trivium.kernels.decode import Turn, angles, turned

# mypy: disable-error-code="no-untyped-def"


@triton.jit  # type: ignore[untyped-decorator]
def _lay(
    packed, keys, values, slots, frequencies, strength, tokens,
    FIRST: tl.constexpr, HEADS: tl.constexpr, GROUPS: tl.constexpr, SIZE: tl.constexpr, PAD: tl.constexpr,
    LONGEST: tl.constexpr, PAIRS: tl.constexpr, INTERLEAVED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One head of some tokens of a prompt, from head FIRST on: before it nothing has to be done."""
    n, h = tl.program_id(0), tl.program_id(1) + FIRST
    t = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    e = tl.arange(0, PAD)
    real = (t < tokens)[:, None] & (e < SIZE)[None, :]
    at = (n * tokens + t).to(tl.int64)[:, None] * ((HEADS + 2 * GROUPS) * SIZE) + h * SIZE
    dtype = packed.dtype.element_ty
    if h < HEADS + GROUPS:
        x = turned(packed, at, e[None, :], t[:, None], frequencies, strength, real, PAIRS, INTERLEAVED).to(dtype)
        if PAIRS > 0:
            tl.debug_barrier()  # both of a pair are read before one is written
            tl.store(packed + at + e[None, :], x, mask=real)
    else:
        x = tl.load(packed + at + e[None, :], mask=real, other=0.0)
    if h >= HEADS:
        row = tl.load(slots + n) * GROUPS + (h - HEADS) % GROUPS
        held = row * (LONGEST * SIZE) + t[:, None] * SIZE + e[None, :]
        if h < HEADS + GROUPS:
            tl.store(keys + held, x, mask=real)
        else:
            tl.store(values + held, x, mask=real)


def lay(
    packed: Tensor, keys_BGSE: Tensor, values_BGSE: Tensor, slots_n: Tensor, tokens: int, heads: int, turn: Turn | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries [n, H, T, E], keys and values [n, G, T, E] of prompts from all three side by side, [n T, (H + 2 G) E].

    They are views of it, and it is turned in place. Keys and values are written to the slots of these rows too, from
    the first place on.
    """
    _, groups, longest, size = keys_BGSE.shape
    rows, first = len(slots_n), heads if turn is None else 0
    frequencies, strength, turning = angles(turn, packed)
    _lay[(rows, heads + 2 * groups - first, triton.cdiv(tokens, 32))](
        packed, keys_BGSE, values_BGSE, slots_n, frequencies, strength, tokens,
        FIRST=first, HEADS=heads, GROUPS=groups, SIZE=size, PAD=triton.next_power_of_2(size), LONGEST=longest,
        BLOCK=32, **turning,
    )  # fmt: skip
    laid = packed.view(rows, tokens, heads + 2 * groups, size).transpose(1, 2)
    query, key, value = torch.split(laid, [heads, groups, groups], dim=1)
    return query, key, value
