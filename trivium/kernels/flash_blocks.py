"""The Triton kernels of `flash.py`: each program computes one block of queries, of keys, or of the bias."""

# B rows, T queries, S keys, H query heads, G key/value heads, E head size, M and N queries and keys of a block
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

from __future__ import annotations

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def _scores(products, bias_at, seen_at, m, n, T, S, step, stride, CAUSAL, BIAS, SEEN, WHOLE):
    """The scores to base 2 of a block of pairs, -inf where a key may not be seen; `m` and `n` broadcast to it."""
    scores = products * step
    if WHOLE:  # no block reaches past the end
        if BIAS:
            scores += tl.load(bias_at + m * stride + n).to(tl.float32) * LOG2E
        if SEEN:
            scores = tl.where(tl.load(seen_at + n) != 0, scores, float("-inf"))
    else:
        inside = (m < T) & (n < S)
        if BIAS:
            scores += tl.load(bias_at + m * stride + n, mask=inside, other=0.0).to(tl.float32) * LOG2E
        if SEEN:
            inside = inside & (tl.load(seen_at + n, mask=n < S, other=0) != 0)
        scores = tl.where(inside, scores, float("-inf"))
    if CAUSAL:
        scores = tl.where(n <= m + (S - T), scores, float("-inf"))  # the queries are the last T of the S positions
    return scores


@triton.jit
def _tile(at, rows, count, stride, E: tl.constexpr, WHOLE: tl.constexpr):
    """A block of rows of one head, [rows, E], zero past the end."""
    places = at + rows[:, None] * stride + tl.arange(0, E)[None, :]
    if WHOLE:
        return tl.load(places)
    else:
        return tl.load(places, mask=rows[:, None] < count, other=0.0)


@triton.jit
def _put(at, value, rows, count, stride, E: tl.constexpr):
    tl.store(at + rows[:, None] * stride + tl.arange(0, E)[None, :], value, mask=rows[:, None] < count)


@triton.jit
def forward_kernel(
    q, k, v, bias, seen, out, lse,
    q_b, q_h, q_t, k_b, k_h, k_s, v_b, v_h, v_s, o_b, o_h, o_t, bias_h, bias_t, seen_b,
    step, H, T, S,
    RATIO: tl.constexpr, E: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    CAUSAL: tl.constexpr, BIAS: tl.constexpr, SEEN: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    first, row = tl.program_id(0) * M, tl.program_id(1)
    b, h = (row // H).to(tl.int64), row % H
    m = first + tl.arange(0, M)
    query = _tile(q + b * q_b + h * q_h, m, T, q_t, E, WHOLE)
    key_at, value_at = k + b * k_b + h // RATIO * k_h, v + b * v_b + h // RATIO * v_h
    top = tl.full([M], float("-inf"), tl.float32)
    total = tl.zeros([M], tl.float32)
    mixed = tl.zeros([M, E], tl.float32)
    last = tl.minimum(S, first + M + S - T) if CAUSAL else S
    for start in range(0, last, N):
        n = start + tl.arange(0, N)
        products = tl.dot(query, tl.trans(_tile(key_at, n, S, k_s, E, WHOLE)))
        scores = _scores(
            products, bias + h * bias_h, seen + b * seen_b, m[:, None], n[None, :], T, S, step, bias_t,
            CAUSAL, BIAS, SEEN, WHOLE,
        )  # fmt: skip
        higher = tl.maximum(top, tl.max(scores, 1))
        level = tl.where(higher == float("-inf"), 0.0, higher)  # a query that has seen nothing yet
        weights = tl.math.exp2(scores - level[:, None])
        fade = tl.math.exp2(top - level)
        total = total * fade + tl.sum(weights, 1)
        value = _tile(value_at, n, S, v_s, E, WHOLE)
        mixed = tl.dot(weights.to(value.dtype), value, mixed * fade[:, None])
        top = higher
    some = tl.where(total == 0.0, 1.0, total)
    _put(out + b * o_b + h * o_h, (mixed / some[:, None]).to(query.dtype), m, T, o_t, E)
    level = tl.where(total == 0.0, 0.0, top)
    tl.store(lse + row.to(tl.int64) * T + m, level + tl.math.log2(some), mask=m < T)


@triton.jit
def keys_kernel(
    q, k, v, bias, seen, grad, lse, delta, grad_k, grad_v,
    q_b, q_h, q_t, k_b, k_h, k_s, v_b, v_h, v_s, g_b, g_h, g_t, bias_h, bias_t, seen_b, dk_b, dk_h, dk_s,
    step, scale, H, T, S,
    RATIO: tl.constexpr, E: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    CAUSAL: tl.constexpr, BIAS: tl.constexpr, SEEN: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """The gradients of a block of keys and values, summed over the query heads that share them."""
    first, row = tl.program_id(0) * N, tl.program_id(1)
    G = H // RATIO
    b, g = (row // G).to(tl.int64), row % G
    n = first + tl.arange(0, N)
    key = _tile(k + b * k_b + g * k_h, n, S, k_s, E, WHOLE)
    value = _tile(v + b * v_b + g * v_h, n, S, v_s, E, WHOLE)
    for_key, for_value = tl.zeros([N, E], tl.float32), tl.zeros([N, E], tl.float32)
    begin = tl.maximum(first - (S - T), 0) // M * M if CAUSAL else 0
    for h in range(g * RATIO, g * RATIO + RATIO):
        at = (b * H + h) * T
        for start in range(begin, T, M):
            m = start + tl.arange(0, M)
            query = _tile(q + b * q_b + h * q_h, m, T, q_t, E, WHOLE)
            upper = _tile(grad + b * g_b + h * g_h, m, T, g_t, E, WHOLE)
            scores = _scores(
                tl.dot(key, tl.trans(query)), bias + h * bias_h, seen + b * seen_b, m[None, :], n[:, None], T, S, step,
                bias_t, CAUSAL, BIAS, SEEN, WHOLE,
            )  # fmt: skip
            weights = tl.math.exp2(scores - tl.load(lse + at + m, mask=m < T, other=0.0)[None, :])
            for_value = tl.dot(weights.to(upper.dtype), upper, for_value)
            along = tl.dot(value, tl.trans(upper)) - tl.load(delta + at + m, mask=m < T, other=0.0)[None, :]
            for_key = tl.dot((weights * along).to(query.dtype), query, for_key)
    _put(grad_k + b * dk_b + g * dk_h, (for_key * scale).to(key.dtype), n, S, dk_s, E)
    _put(grad_v + b * dk_b + g * dk_h, for_value.to(key.dtype), n, S, dk_s, E)


@triton.jit
def queries_kernel(
    q, k, v, bias, seen, grad, lse, delta, out, grad_q,
    q_b, q_h, q_t, k_b, k_h, k_s, v_b, v_h, v_s, g_b, g_h, g_t, bias_h, bias_t, seen_b, dq_b, dq_h, dq_t,
    step, scale, H, T, S,
    RATIO: tl.constexpr, E: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    CAUSAL: tl.constexpr, BIAS: tl.constexpr, SEEN: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """The gradient of a block of queries, and for the other kernels the sum of each query's out x grad, in `delta`."""
    first, row = tl.program_id(0) * M, tl.program_id(1)
    b, h = (row // H).to(tl.int64), row % H
    m = first + tl.arange(0, M)
    query = _tile(q + b * q_b + h * q_h, m, T, q_t, E, WHOLE)
    upper = _tile(grad + b * g_b + h * g_h, m, T, g_t, E, WHOLE)
    level = tl.load(lse + row.to(tl.int64) * T + m, mask=m < T, other=0.0)
    mean = tl.sum(upper.to(tl.float32) * _tile(out + b * g_b + h * g_h, m, T, g_t, E, WHOLE).to(tl.float32), 1)
    tl.store(delta + row.to(tl.int64) * T + m, mean, mask=m < T)
    key_at, value_at = k + b * k_b + h // RATIO * k_h, v + b * v_b + h // RATIO * v_h
    for_query = tl.zeros([M, E], tl.float32)
    last = tl.minimum(S, first + M + S - T) if CAUSAL else S
    for start in range(0, last, N):
        n = start + tl.arange(0, N)
        key = _tile(key_at, n, S, k_s, E, WHOLE)
        scores = _scores(
            tl.dot(query, tl.trans(key)), bias + h * bias_h, seen + b * seen_b, m[:, None], n[None, :], T, S, step,
            bias_t, CAUSAL, BIAS, SEEN, WHOLE,
        )  # fmt: skip
        weights = tl.math.exp2(scores - level[:, None])
        along = tl.dot(upper, tl.trans(_tile(value_at, n, S, v_s, E, WHOLE))) - mean[:, None]
        for_query = tl.dot((weights * along).to(key.dtype), key, for_query)
    _put(grad_q + b * dq_b + h * dq_h, (for_query * scale).to(query.dtype), m, T, dq_t, E)


@triton.jit
def bias_kernel(
    q, k, v, bias, seen, grad, lse, delta, grad_bias,
    q_b, q_h, q_t, k_b, k_h, k_s, v_b, v_h, v_s, g_b, g_h, g_t, bias_h, bias_t, seen_b,
    step, rows, B, H, T, S,
    RATIO: tl.constexpr, E: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    CAUSAL: tl.constexpr, SEEN: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """The gradient of one block of the bias, summed over `rows` rows of the batch: [parts, H, T, S]."""
    first, start, h, part = tl.program_id(0) * M, tl.program_id(1) * N, tl.program_id(2) % H, tl.program_id(2) // H
    m, n = first + tl.arange(0, M), start + tl.arange(0, N)
    total = tl.zeros([M, N], tl.float32)
    base = _scores(  # what all rows have in common, loaded once
        total, bias + h * bias_h, seen, m[:, None], n[None, :], T, S, step, bias_t, CAUSAL, True, False, WHOLE
    )
    last = tl.minimum(B, part * rows + rows)
    if CAUSAL:
        last = tl.where(start <= first + M - 1 + S - T, last, 0)  # a block in which nothing is seen
    for row in range(part * rows, last):
        b = tl.full([], 0, tl.int64) + row
        query = _tile(q + b * q_b + h * q_h, m, T, q_t, E, WHOLE)
        upper = _tile(grad + b * g_b + h * g_h, m, T, g_t, E, WHOLE)
        key = _tile(k + b * k_b + h // RATIO * k_h, n, S, k_s, E, WHOLE)
        value = _tile(v + b * v_b + h // RATIO * v_h, n, S, v_s, E, WHOLE)
        scores = tl.dot(query, tl.trans(key)) * step + base
        if SEEN:
            known = tl.load(seen + b * seen_b + n, mask=n < S, other=0)
            scores = tl.where(known[None, :] != 0, scores, float("-inf"))
        at = (b * H + h) * T
        weights = tl.math.exp2(scores - tl.load(lse + at + m, mask=m < T, other=0.0)[:, None])
        along = tl.dot(upper, tl.trans(value)) - tl.load(delta + at + m, mask=m < T, other=0.0)[:, None]
        total += weights * along
    at = grad_bias + (part * H + h).to(tl.int64) * T * S
    tl.store(at + m[:, None] * S + n[None, :], total, mask=(m[:, None] < T) & (n[None, :] < S))
