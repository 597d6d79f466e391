"""Prompts on their way into slots: queries, keys and values turned and laid out in one pass.

Imported on CUDA only; `MultiHeadAttention` with a cache is the plain version.
"""

# n prompts, T tokens, B slots, H query heads, G key/value heads, S longest length, E head size

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from trivium.parts.kernels.decode import Turn, angles, turned

# mypy: disable-error-code="no-untyped-def"


@triton.jit  # type: ignore[untyped-decorator]
def _lay(
    packed, out, keys, values, slots, frequencies, strength, tokens,
    HEADS: tl.constexpr, GROUPS: tl.constexpr, SIZE: tl.constexpr, PAD: tl.constexpr, LONGEST: tl.constexpr,
    PAIRS: tl.constexpr, INTERLEAVED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Queries, keys and values of a prompt by heads and turned; keys and values go to the slot too."""
    n, h = tl.program_id(0), tl.program_id(1)
    t = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    e = tl.arange(0, PAD)
    real = (t < tokens)[:, None] & (e < SIZE)[None, :]
    at = (n * tokens + t).to(tl.int64)[:, None] * ((HEADS + 2 * GROUPS) * SIZE) + h * SIZE
    dtype = out.dtype.element_ty
    if h < HEADS + GROUPS:
        x = turned(packed, at, e[None, :], t[:, None], frequencies, strength, real, PAIRS, INTERLEAVED).to(dtype)
    else:
        x = tl.load(packed + at + e[None, :], mask=real, other=0.0).to(dtype)
    own = ((n * (HEADS + 2 * GROUPS) + h) * tokens + t).to(tl.int64)[:, None] * SIZE + e[None, :]
    tl.store(out + own, x, mask=real)
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

    Keys and values are written to the slots of these rows too, from the first place on.
    """
    _, groups, longest, size = keys_BGSE.shape
    rows = len(slots_n)
    out = packed.new_empty(rows, heads + 2 * groups, tokens, size)
    frequencies, strength, turning = angles(turn, packed)
    _lay[(rows, heads + 2 * groups, triton.cdiv(tokens, 32))](
        packed, out, keys_BGSE, values_BGSE, slots_n, frequencies, strength, tokens,
        HEADS=heads, GROUPS=groups, SIZE=size, PAD=triton.next_power_of_2(size), LONGEST=longest, BLOCK=32,
        **turning,
    )  # fmt: skip
    query, key, value = torch.split(out, [heads, groups, groups], dim=1)
    return query, key, value
