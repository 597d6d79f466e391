"""Queries, keys and values cut from one product, whose gradient is laid together by one kernel of Triton.

The kernels of cuDNN make three gradients; the compiler lays them side by side and then reads them again for the bias.
Here the columns are summed on the way: one read and one write, 0.14 ms for GPT-2's 65,536 tokens at 4.2 TB/s instead
of the 0.22 that the two took on an H200. Imported only where there is a GPU: Triton is not needed elsewhere.
"""

# B rows, T tokens, H heads, E head size, C columns: 3 H E
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor


class Launch(NamedTuple):
    """How the gradients are gone over: blocks of so many tokens and columns, one after another in so many parts."""

    tokens: int = 32
    columns: int = 128
    warps: int = 4
    parts: int = 256  # for each of which the columns are summed; fixed, so that the order of the sum is


LAUNCH = Launch()


@triton.jit
def _lay(
    grad, row_stride, head_stride, token_stride, packed, sums, part, column, shift, tokens, length, each, columns,
    WIDTH: tl.constexpr, E: tl.constexpr, TOKENS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Lay some columns of one gradient, for the tokens of one part, beside the other gradients."""
    at = column + tl.arange(0, COLUMNS)
    inside = at < WIDTH
    grad += (at // E).to(tl.int64) * head_stride + at % E
    packed += shift + at
    total = tl.zeros([TOKENS, COLUMNS], tl.float32)
    for start in range(part * each, tl.minimum((part + 1) * each, tokens), TOKENS):
        token = start + tl.arange(0, TOKENS)
        mask = (token < tokens)[:, None] & inside[None, :]
        place = (token // length).to(tl.int64) * row_stride + (token % length).to(tl.int64) * token_stride
        loaded = tl.load(grad[None, :] + place[:, None], mask=mask, other=0.0, eviction_policy="evict_first")
        tl.store(packed[None, :] + token.to(tl.int64)[:, None] * columns, loaded, mask=mask)
        total += loaded.to(tl.float32)
    tl.store(sums + part.to(tl.int64) * columns + shift + at, tl.sum(total, 0), mask=inside)


@triton.jit
def laid_kernel(
    query, key, value, packed, sums, query_row, query_head, query_token, key_row, key_head, key_token,
    value_row, value_head, value_token, tokens, length, each, columns,
    WIDTH: tl.constexpr, E: tl.constexpr, TOKENS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    block, part = tl.program_id(0), tl.program_id(1)
    blocks = tl.cdiv(WIDTH, COLUMNS)  # of each
    # written out for each: of a pointer that is one of three it is not known that wide loads are aligned
    if block < blocks:
        _lay(
            query, query_row, query_head, query_token, packed, sums, part, block * COLUMNS, 0,
            tokens, length, each, columns, WIDTH, E, TOKENS, COLUMNS,
        )  # fmt: skip
    elif block < 2 * blocks:
        _lay(
            key, key_row, key_head, key_token, packed, sums, part, (block - blocks) * COLUMNS, WIDTH,
            tokens, length, each, columns, WIDTH, E, TOKENS, COLUMNS,
        )  # fmt: skip
    else:
        _lay(
            value, value_row, value_head, value_token, packed, sums, part, (block - 2 * blocks) * COLUMNS, 2 * WIDTH,
            tokens, length, each, columns, WIDTH, E, TOKENS, COLUMNS,
        )  # fmt: skip


def cut(packed_BTC: Tensor, bias_C: Tensor, heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values by heads out of one product, made with a `bias` whose gradient is found here."""
    parts: tuple[Tensor, Tensor, Tensor] = Parted.apply(packed_BTC, bias_C, heads)
    return parts


# Torch 2.11 gets a compiled Function wrong whose forward writes in place (its issue 180642) or is given a tensor twice
# (181146). This one only takes views, and its two tensors are never one: it need not be an operator, as in bend.py.


class Parted(torch.autograd.Function):
    """Three views of one tensor; the bias is not added, since the product had it."""

    @staticmethod
    def forward(ctx: Any, packed_BTC: Tensor, bias_C: Tensor, heads: int) -> tuple[Tensor, Tensor, Tensor]:
        ctx.dtype = bias_C.dtype
        rows, length, columns = packed_BTC.shape
        query, key, value = torch.split(packed_BTC.view(rows, length, 3 * heads, columns // (3 * heads)), heads, 2)
        return query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        packed_BTC, sums = together(*grads, LAUNCH.parts)
        return packed_BTC, sums.sum(0).to(ctx.dtype), None


# An operator, so that the compiler takes it as it is: it could not see which of its arguments the kernel writes.
# All that the shapes depend on is an argument: the compiler's cache knows nothing else of it than its name.


@torch.library.custom_op(
    "trivium::laid_together",
    mutates_args=(),
    schema="(Tensor query, Tensor key, Tensor value, int parts) -> (Tensor, Tensor)",
)
def together(query: Tensor, key: Tensor, value: Tensor, parts: int) -> tuple[Tensor, Tensor]:
    """The three, each [B, H, T, E], side by side [B, T, C], and the sums of their columns [parts, C]."""
    packed, sums = _shapes(query, key, value, parts)
    launch(query, key, value, packed, sums, LAUNCH)
    return packed, sums


@together.register_fake
def _shapes(query: Tensor, key: Tensor, value: Tensor, parts: int) -> tuple[Tensor, Tensor]:
    rows, heads, length, size = query.shape
    columns = 3 * heads * size
    return query.new_empty(rows, length, columns), query.new_empty(parts, columns, dtype=torch.float32)


def launch(query: Tensor, key: Tensor, value: Tensor, packed: Tensor, sums: Tensor, how: Launch) -> None:
    """Run the kernel over all tokens, in as many parts as there are sums for."""
    query, key, value = (one if one.stride(-1) == 1 else one.contiguous() for one in (query, key, value))
    rows, heads, length, size = query.shape
    tokens, parts = rows * length, len(sums)
    each = triton.cdiv(triton.cdiv(tokens, parts), how.tokens) * how.tokens
    with torch.cuda.device_of(query):  # Triton would start it on the current GPU
        laid_kernel[(3 * triton.cdiv(heads * size, how.columns), parts)](
            query, key, value, packed, sums, *query.stride()[:3], *key.stride()[:3], *value.stride()[:3],
            tokens, max(length, 1), each, packed.shape[-1], WIDTH=heads * size, E=size,
            TOKENS=how.tokens, COLUMNS=how.columns, num_warps=how.warps,
        )  # fmt: skip
