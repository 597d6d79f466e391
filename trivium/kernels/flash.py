"""Attention in Triton with a bias that all rows share, its gradient included, and with padded keys.

The kernels of torch make the gradient of such a bias once per row, in a tensor of B x H x T x S; here the rows are
summed while the scores are still in registers. Imported only where there is a GPU: Triton is not needed elsewhere.
"""

# B rows, T queries, S keys, H query heads, G key/value heads, E head size
# mypy: disable-error-code="untyped-decorator"

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from trivium.kernels.flash_blocks import LOG2E, bias_kernel, forward_kernel, keys_kernel, queries_kernel
from trivium.kernels.hardware import INTERPRETED


class Block(NamedTuple):
    """The shape of a kernel's work: queries and keys of a block, warps, and how many loads go ahead."""

    queries: int
    keys: int
    warps: int
    ahead: int


class Plan(NamedTuple):
    """The blocks of the four kernels: for each the fastest on an H200 with 64 rows of 512 tokens in 12 heads of 64."""

    forward: Block = Block(128, 64, 8, 3)
    keys: Block = Block(64, 64, 4, 3)
    queries: Block = Block(64, 64, 4, 2)
    bias: Block = Block(64, 64, 4, 3)
    parts: int = 0  # in which the rows are summed for the bias; 0 means as many as keep the GPU busy
    busy: int = 1536  # programs that do so

    def numbers(self) -> list[int]:
        # `busy` and not the parts that come of it: those change with the lengths, and each would be another program
        return [*self.forward, *self.keys, *self.queries, *self.bias, self.parts, self.busy]


# Milliseconds forward and backward on an H200, for 64 rows in 12 heads of 64 with the gradient of the bias
PLAN = Plan()  # 512 tokens: 1.047; cuDNN with `bias_kernel` beside it: 1.446
SHORT = Plan(forward=Block(64, 64, 4, 2), parts=8)  # 114 tokens, causal: 0.140; with PLAN 0.168
FEW = 128  # keys up to which SHORT is taken: two blocks. Between 114 and 512 nothing was measured


def _roomy() -> bool:
    """Whether a multiprocessor of this GPU holds the largest blocks, 131 KB, in its own memory."""
    # A100, H100 and H200, B200; the cards between them (8.6, 8.9, 12.0) have some 100 KB
    return torch.cuda.is_available() and torch.cuda.get_device_capability() in ((8, 0), (9, 0), (10, 0))


ROOMY = INTERPRETED or _roomy()  # now, since it is asked while a step is being compiled
_ROWS = 65_535  # programs along the second axis of a launch


def able(query: Tensor, value: Tensor) -> bool:
    """Whether the kernels are made for this GPU and for so many heads of this size and kind; float32 would not fit."""
    size = query.shape[-1]
    if not ROOMY or query.shape[0] * query.shape[1] > _ROWS:
        return False
    return size == value.shape[-1] and size in (32, 64, 128) and query.dtype in (torch.bfloat16, torch.float16)


def attend(
    query_BHTE: Tensor,
    key_BGSE: Tensor,
    value_BGSE: Tensor,
    bias_1HTS: Tensor | None,
    seen_BS: Tensor | None,
    *,
    causal: bool,
    scale: float,
    plan: Plan | None = None,
) -> Tensor:
    """Scaled dot-product attention with a bias shared by all rows and with keys that are seen or not.

    The queries are the last T of the S positions if it is causal; one that sees nothing gets zeros.
    Without a plan it takes the one for so many keys.
    """
    numbers = (plan or planned(key_BGSE.shape[2])).numbers()
    mixed_BTHE: Tensor = forward(query_BHTE, key_BGSE, value_BGSE, bias_1HTS, seen_BS, causal, scale, numbers)[0]
    return mixed_BTHE.transpose(1, 2)


def planned(keys: int) -> Plan:
    """The faster plan for so many keys."""
    return SHORT if keys <= FEW else PLAN


# Operators, so that the compiler takes them as they are: it could not see which of their arguments the kernels write.
# Its cache finds a step by their names and arguments, going back too: shapes depend on nothing but arguments, and what
# is returned or done in `_gradients` changes with a name.


@torch.library.custom_op(
    "trivium::attention",
    mutates_args=(),
    schema="(Tensor query, Tensor key, Tensor value, Tensor? bias, Tensor? seen, bool causal, float scale, int[] plan)"
    " -> (Tensor, Tensor)",
)
def forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    seen: Tensor | None,
    causal: bool,
    scale: float,
    plan: list[int],
) -> tuple[Tensor, Tensor]:
    """The mixed values [B, T, H, E], and the logarithms to base 2 of the sums of each query, [B, H, T]."""
    out, lse = _forward_shapes(query)
    query, key, value = _rows(query), _rows(key), _rows(value)
    rows, heads, queries, size = query.shape
    bias, seen = _beside(bias, seen, rows)
    block, keys = Block(*plan[:4]), key.shape[2]
    forward_kernel[(_blocks(queries, block.queries), rows * heads)](
        query, key, value, query if bias is None else bias, query if seen is None else seen, out, lse,
        *query.stride()[:3], *key.stride()[:3], *value.stride()[:3], *out.transpose(1, 2).stride()[:3],
        *_strides(bias, seen), scale * LOG2E.value, heads, queries, keys, RATIO=heads // key.shape[1], E=size,
        CAUSAL=causal, BIAS=bias is not None, SEEN=seen is not None, **_shape(block, queries, keys),
    )  # fmt: skip
    return out, lse


@forward.register_fake
def _forward_shapes(query: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
    rows, heads, queries, size = query.shape
    return query.new_empty(rows, queries, heads, size), query.new_empty(rows, heads, queries, dtype=torch.float32)


@torch.library.custom_op(
    "trivium::attention_backward",
    mutates_args=(),
    schema="(Tensor grad, Tensor query, Tensor key, Tensor value, Tensor? bias, Tensor? seen, Tensor lse, Tensor out,"
    " bool causal, float scale, int[] plan) -> Tensor[]",
)
def backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    seen: Tensor | None,
    lse: Tensor,
    out: Tensor,
    causal: bool,
    scale: float,
    plan: list[int],
) -> list[Tensor]:
    """The sums of out x grad of each query, [B, H, T], then the gradients of queries, keys and values for `_parted`."""
    delta, *made = _backward_shapes(grad, query, key)
    grad_query, grad_key, grad_value = _parted(made, query, key)
    grad, out = grad.contiguous(), out.contiguous()  # they share their strides
    query, key, value = _rows(query), _rows(key), _rows(value)
    (rows, heads, queries, size), groups, keys = query.shape, key.shape[1], key.shape[2]
    bias, seen = _beside(bias, seen, rows)
    given = (query, key, value, query if bias is None else bias, query if seen is None else seen, grad, lse, delta)
    strides = [part for one in (query, key, value, grad.transpose(1, 2)) for part in one.stride()[:3]]
    strides += _strides(bias, seen)
    flags = {"RATIO": heads // groups, "E": size, "CAUSAL": causal, "BIAS": bias is not None, "SEEN": seen is not None}
    block = Block(*plan[8:12])
    queries_kernel[(_blocks(queries, block.queries), rows * heads)](
        *given, out, grad_query, *strides, *grad_query.stride()[:3],
        scale * LOG2E.value, scale, heads, queries, keys, **flags, **_shape(block, queries, keys),
    )  # fmt: skip
    block = Block(*plan[4:8])  # after the other, which has made `delta`
    keys_kernel[(_blocks(keys, block.keys), rows * groups)](
        *given, grad_key, grad_value, *strides, *grad_key.stride()[:3],
        scale * LOG2E.value, scale, heads, queries, keys, **flags, **_shape(block, queries, keys),
    )  # fmt: skip
    return [delta, *made]


@backward.register_fake
def _backward_shapes(grad: Tensor, query: Tensor, key: Tensor, *others: Any) -> list[Tensor]:
    """After the sums one tensor with all three side by side if they are equally long, else three, [B, T, heads, E]."""
    (rows, heads, queries, size), groups, keys = query.shape, key.shape[1], key.shape[2]
    delta = query.new_empty(rows, heads, queries, dtype=torch.float32)
    if queries == keys:
        return [delta, query.new_empty(rows, queries, heads + 2 * groups, size)]
    shapes = ((queries, heads), (keys, groups), (keys, groups))
    return [delta, *(query.new_empty(rows, long, many, size) for long, many in shapes)]


def _parted(made: list[Tensor], query: Tensor, key: Tensor) -> list[Tensor]:
    """The gradients of queries, keys and values, each [B, heads, T or S, E].

    Of one tensor they are views, so that the compiler has nothing to copy where the three came out of one product.
    """
    heads, groups = query.shape[1], key.shape[1]
    parts = torch.split(made[0], [heads, groups, groups], 2) if len(made) == 1 else made
    return [part.transpose(1, 2) for part in parts]


@torch.library.custom_op(
    "trivium::attention_bias",
    mutates_args=(),
    schema="(Tensor grad, Tensor query, Tensor key, Tensor value, Tensor bias, Tensor? seen, Tensor lse, Tensor delta,"
    " bool causal, float scale, int[] plan) -> Tensor",
)
def bias_sums(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor,
    seen: Tensor | None,
    lse: Tensor,
    delta: Tensor,
    causal: bool,
    scale: float,
    plan: list[int],
) -> Tensor:
    """The gradient of the bias, [parts, H, T, S]: each part is the sum of some rows."""
    sums: Tensor = _bias_shape(grad, query, key, value, bias, seen, lse, delta, causal, scale, plan)
    grad, query, key, value = _rows(grad), _rows(query), _rows(key), _rows(value)
    (rows, heads, queries, size), keys = query.shape, key.shape[2]
    bias, seen = _rows(bias), _beside(None, seen, rows)[1]
    block, parts = Block(*plan[12:16]), len(sums)
    strides = [part for one in (query, key, value, grad.transpose(1, 2)) for part in one.stride()[:3]]
    bias_kernel[(_blocks(queries, block.queries), _blocks(keys, block.keys), heads * parts)](
        query, key, value, bias, query if seen is None else seen, grad, lse, delta, sums, *strides,
        *_strides(bias, seen), scale * LOG2E.value, _blocks(rows, parts), rows, heads, queries, keys,
        RATIO=heads // key.shape[1], E=size, CAUSAL=causal, SEEN=seen is not None, **_shape(block, queries, keys),
    )  # fmt: skip
    return sums


@bias_sums.register_fake
def _bias_shape(grad: Tensor, query: Tensor, key: Tensor, *others: Any) -> Tensor:
    (rows, heads, queries, _), keys, plan = query.shape, key.shape[2], others[-1]
    # a block of the bias is one program, which takes the rows of its part one after another
    parts = plan[16] or max(1, plan[17] // (heads * _blocks(queries, plan[12]) * _blocks(keys, plan[13])))
    return query.new_empty(min(parts, rows), heads, queries, keys, dtype=torch.float32)


def _remember(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    query, key, value, bias, seen, ctx.causal, ctx.scale, ctx.plan = inputs
    ctx.save_for_backward(query, key, value, bias, seen, *output)
    ctx.set_materialize_grads(False)


def _gradients(ctx: Any, grad_BTHE: Tensor, unused: Tensor | None) -> tuple[Tensor | None, ...]:
    query, key, value, bias, seen, out_BTHE, lse = ctx.saved_tensors
    given, rest = (grad_BTHE.contiguous(), query, key, value, bias, seen, lse), (ctx.causal, ctx.scale, ctx.plan)
    delta, *made = backward(*given, out_BTHE, *rest)
    grads = _parted(made, query, key)
    grad_bias: Tensor | None = None
    if bias is not None and ctx.needs_input_grad[3]:
        grad_bias = bias_sums(*given, delta, *rest).sum(0, keepdim=True).to(bias.dtype)
    return (*grads, grad_bias, None, None, None, None)


forward.register_autograd(_gradients, setup_context=_remember)


def _rows(x: Tensor) -> Tensor:
    """The same with each head's numbers beside each other, as the kernels read them."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _beside(bias: Tensor | None, seen: Tensor | None, rows: int) -> tuple[Tensor | None, Tensor | None]:
    """The same as the kernels read them: numbers beside each other, and what is seen for every row."""
    return None if bias is None else _rows(bias), None if seen is None else seen.expand(rows, -1).contiguous()


def _blocks(length: int, size: int) -> int:
    return -(-length // size)


def _strides(bias: Tensor | None, seen: Tensor | None) -> list[int]:
    """Of heads and queries of the bias, and of the rows of what is seen."""
    return [*((0, 0) if bias is None else bias.stride()[1:3]), 0 if seen is None else seen.stride(0)]


def _shape(block: Block, queries: int, keys: int) -> dict[str, Any]:
    """What a kernel is told of its block."""
    whole = queries % block.queries == 0 and keys % block.keys == 0
    return {"M": block.queries, "N": block.keys, "WHOLE": whole, "num_warps": block.warps, "num_stages": block.ahead}
