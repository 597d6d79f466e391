"""Top-k, top-p and min-p of every row without sorting it; imported only for a GPU.

A program has a row and looks for two borders: the k-th highest score, and the score at which the mass reaches p. Each
look at the scores tells what lies above three pivots, so that a quarter of the bracket is left. What can still matter
is laid aside early, some thousand scores at most as a rule: most looks are short. There are no atomics: bits
repeat, whatever else is in the batch. `trivium.generation.choosing` has the plain version, which sorts.
"""

# n rows, V vocabulary. A row, and what is laid aside of it, is looked at as a table of WIDE columns: id or place
# i stands in column i % WIDE; every column has its own count of entries, the deepest has `depth`.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

# Columns of the table, entries of each at a time, and warps: two columns for each thread, whose entries never leave
# it until the look is over. On an H200, 64 rows of 50,257 with k = 50 and p = 0.95: 72 us, 87 with entries by eight, 80
# with 32 warps, 81 with 8; the sort took 561.
WIDE, TALL, WARPS = 1024, 4, 16

_NARROWING = tl.constexpr(3)  # looks at the whole row before a part of it is laid aside, if only p is asked for
_GUESSES = tl.constexpr(8)  # halvings between the lowest and the highest score for a first bound of the k-th
_BY_VALUE = tl.constexpr(6)  # looks whose pivots are spread over the scores; over their bits afterwards
_INFINITY = tl.constexpr(float("inf"))


@triton.jit
def _key(x):
    """A whole number in the order of the scores; both zeros are -1, so that the key before them is below both."""
    bits = x.to(tl.int32, bitcast=True)
    return tl.where(x == 0.0, -1, tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)).to(tl.int64)


@triton.jit
def _score(key):
    bits = key.to(tl.int32)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.float32, bitcast=True)


@triton.jit
def _tile(table, first, counts, WIDE: tl.constexpr, TALL: tl.constexpr):
    """Some entries of every column, -inf where it has no more."""
    entry = first + tl.arange(0, TALL)
    at = entry[:, None] * WIDE + tl.arange(0, WIDE)[None, :]
    return tl.load(table + at, mask=entry[:, None] < counts[None, :], other=-_INFINITY)


@triton.jit
def _extent(table, counts, depth, WIDE: tl.constexpr, TALL: tl.constexpr):
    """The highest score of each column, the lowest finite one, and how many are not -inf."""
    best = tl.full([WIDE], -_INFINITY, tl.float32)
    worst = tl.full([WIDE], _INFINITY, tl.float32)
    number = tl.zeros([WIDE], tl.int32)
    x = _tile(table, 0, counts, WIDE, TALL)
    for first in range(0, depth, TALL):
        later = _tile(table, first + TALL, counts, WIDE, TALL)  # comes meanwhile
        real = x > -_INFINITY
        best = tl.maximum(best, tl.max(x, 0))
        worst = tl.minimum(worst, tl.min(tl.where(real, x, _INFINITY), 0))
        number += tl.sum(real.to(tl.int32), 0)
        x = later
    return best, tl.min(worst, 0), tl.sum(number, 0)


@triton.jit
def _guess(best, lowest, peak, k):
    """A score with k or more columns whose highest is not below it: no more than the k-th highest of the row."""
    bound, beyond = lowest, peak
    for _ in range(_GUESSES):
        middle = bound * 0.5 + beyond * 0.5
        enough = tl.sum((best >= middle).to(tl.int32), 0) >= k
        bound = tl.where(enough, middle, bound)
        beyond = tl.where(enough, beyond, middle)
    # rounded up, a middle may be beyond: as good as any, if it has its k columns
    return tl.where(tl.sum((best >= bound).to(tl.int32), 0) >= k, bound, lowest)


@triton.jit
def _look(
    table, counts, depth, floor, least, most, one, two, three, peak,
    MASS: tl.constexpr, WIDE: tl.constexpr, TALL: tl.constexpr,
):  # fmt: skip
    """What weighs above the floor and above each pivot; the lowest, the highest and the number in (least, most].

    A score weighs its share of the mass, times what the highest one has, or 1.
    """
    total = tl.zeros([WIDE], tl.float32)
    first_sum = tl.zeros([WIDE], tl.float32)
    second_sum = tl.zeros([WIDE], tl.float32)
    third_sum = tl.zeros([WIDE], tl.float32)
    number = tl.zeros([WIDE], tl.int32)
    low = tl.full([WIDE], _INFINITY, tl.float32)
    high = tl.full([WIDE], -_INFINITY, tl.float32)
    x = _tile(table, 0, counts, WIDE, TALL)
    for first in range(0, depth, TALL):
        later = _tile(table, first + TALL, counts, WIDE, TALL)
        weight = tl.exp(x - peak) if MASS else tl.full([TALL, WIDE], 1.0, tl.float32)
        if MASS:
            total += tl.sum(tl.where(x > floor, weight, 0.0), 0)
        first_sum += tl.sum(tl.where(x > one, weight, 0.0), 0)
        second_sum += tl.sum(tl.where(x > two, weight, 0.0), 0)
        third_sum += tl.sum(tl.where(x > three, weight, 0.0), 0)
        within = (x > least) & (x <= most)
        number += tl.sum(within.to(tl.int32), 0)
        low = tl.minimum(low, tl.min(tl.where(within, x, _INFINITY), 0))
        high = tl.maximum(high, tl.max(tl.where(within, x, -_INFINITY), 0))
        x = later
    sums = (tl.sum(total, 0), tl.sum(first_sum, 0), tl.sum(second_sum, 0), tl.sum(third_sum, 0))
    return sums[0], sums[1], sums[2], sums[3], tl.min(low, 0), tl.max(high, 0), tl.sum(number, 0)


@triton.jit
def _pivot(low, high, least, most, look, PART: tl.constexpr):
    """A key between two others: by value, which fits how scores lie; later by bits, which ends however they lie."""
    by_value = _key(least * (1.0 - PART / 4) + most * (PART / 4))
    pivot = tl.where(look < _BY_VALUE, by_value, low + (high - low) * PART // 4)
    return tl.minimum(tl.maximum(pivot, low + 1), high - 1)


@triton.jit
def _narrow(
    table, counts, depth, floor, low, high, least, most, above, goal, share, look, peak,
    MASS: tl.constexpr, WIDE: tl.constexpr, TALL: tl.constexpr,
):  # fmt: skip
    """One look: the bracket (low, high] of keys, out of which what weighs `goal` ends, becomes a quarter or less.

    Above `low` there is as much or more, above `high` less. With MASS the first look finds the goal: `share` of what
    is above the floor. Also: the lowest and highest score of the bracket as it was before, what weighs above the new
    one, the number in the old one, and whether to go on.
    """
    a = _pivot(low, high, least, most, look, 1)
    b = tl.maximum(_pivot(low, high, least, most, look, 2), a)
    c = tl.maximum(_pivot(low, high, least, most, look, 3), b)
    total, over_a, over_b, over_c, least, most, number = _look(
        table, counts, depth, floor, _score(low), _score(high), _score(a), _score(b), _score(c), peak, MASS, WIDE, TALL
    )
    if MASS:
        goal = tl.where(look == 0, total * share, goal)
    go_on = least < most
    if go_on:
        exact = (over_a == goal) | (over_b == goal) | (over_c == goal)
        # each pivot becomes an end on this side or on that, even if the goal is not a number: every look gets on
        after_a, after_b, after_c = over_a >= goal, over_b >= goal, over_c >= goal
        low = tl.where(after_c, c, tl.where(after_b, b, tl.where(after_a, a, low)))
        high = tl.where(after_a, tl.where(after_b, tl.where(after_c, high, c), b), a)
        above = tl.where(after_a, tl.where(after_b, tl.where(after_c, above, over_c), over_b), over_a)
        low, high = tl.maximum(low, _key(least) - 1), tl.minimum(high, _key(most))
        least, most = tl.maximum(least, _score(low)), tl.minimum(most, _score(high))
        if not MASS:
            go_on = exact == 0  # above `low` are exactly k: which of them is the last does not matter
    return low, high, least, most, above, goal, number, go_on


@triton.jit
def _lay(table, counts, depth, bound, aside, WIDE: tl.constexpr, TALL: tl.constexpr):
    """Lay what is above the bound aside, each column by itself; the counts of the columns."""
    laid = tl.zeros([WIDE], tl.int32)
    column = tl.arange(0, WIDE)
    x = _tile(table, 0, counts, WIDE, TALL)
    for first in range(0, depth, TALL):
        later = _tile(table, first + TALL, counts, WIDE, TALL)
        wanted = (x > bound).to(tl.int32)
        entry = laid[None, :] + tl.cumsum(wanted, 0) - wanted
        tl.store(aside + entry * WIDE + column[None, :], x, mask=wanted != 0)
        laid += tl.sum(wanted, 0)
        x = later
    tl.debug_barrier()  # other threads may read it
    return laid


@triton.jit
def _after(row, vocab, border, keep, SPAN: tl.constexpr):
    """The id after the last of the first `keep` ids whose score is the border."""
    passed, end = 0, 0
    for first in range(0, vocab, SPAN):
        ids = first + tl.arange(0, SPAN)
        equal = (tl.load(row + ids, mask=ids < vocab, other=-_INFINITY) == border).to(tl.int32)
        here = tl.sum(equal, 0)
        if (passed < keep) & (passed + here >= keep):
            last = (passed + tl.cumsum(equal, 0) == keep) & (equal != 0)
            end = tl.max(tl.where(last, ids, -1), 0) + 1
        passed += here
    return end


# Rows begin anywhere as a rule (GPT-2 has 50,257 ids). Where the compiler knew better it would give every thread four
# neighbouring columns, and yet load them one by one because of the counts: four times the requests to the cache.
@triton.jit(do_not_specialize=["stride", "room", "vocab", "k_stride", "p_stride", "min_stride"])
def rank_kernel(
    logits, kept, spare, top_k, top_p, min_p, stride, room, vocab, k_stride, p_stride, min_stride,
    WIDE: tl.constexpr, TALL: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0).to(tl.int64)
    row, aside, kept = logits + program * stride, spare + program * room, kept + program * vocab
    k = tl.load(top_k + program * k_stride).to(tl.int32)
    p = tl.load(top_p + program * p_stride).to(tl.float32)
    column = tl.arange(0, WIDE)
    counts, depth = (vocab - column + WIDE - 1) // WIDE, tl.cdiv(vocab, WIDE)
    best, lowest, finite = _extent(row, counts, depth, WIDE, TALL)
    peak = tl.max(best, 0)
    # what is not above the floor goes, nor stays what is below the border, or on it from the id `end` on
    floor, border, end = -_INFINITY, -_INFINITY, vocab
    by_k, by_p = (k < finite) & (k > 0), (p < 1.0) & (finite > 0)
    if by_k | by_p:
        low, high, least, most = _key(lowest) - 1, _key(peak), lowest, peak
        above, goal, look = 0.0, 0.0, 0
        if by_k:
            least = _guess(best, lowest, peak, k)
            low = _key(least) - 1
        else:
            for _ in range(_NARROWING):
                low, high, least, most, above, goal, _number, _go_on = _narrow(
                    row, counts, depth, floor, low, high, least, most, above, goal, p, look, peak, True, WIDE, TALL
                )
                look += 1
        counts = _lay(row, counts, depth, _score(low), aside, WIDE, TALL)
        depth = tl.max(counts, 0)
        if by_k:
            go_on, goal = True, k.to(tl.float32)
            while go_on:
                low, high, least, most, above, goal, _number, go_on = _narrow(
                    aside, counts, depth, floor, low, high, least, most, above, goal, p, look, peak, False, WIDE, TALL
                )
                look += 1
            floor = _score(low)
            high, least, most, above, look = _key(peak), tl.maximum(floor, lowest), peak, 0.0, 0
        if by_p:
            go_on, number = True, 0
            while go_on:
                low, high, least, most, above, goal, number, go_on = _narrow(
                    aside, counts, depth, floor, low, high, least, most, above, goal, p, look, peak, True, WIDE, TALL
                )
                look += 1
            border = most
            # the first of equal ones stay, as many as begin before the goal, and the likeliest id in any case
            share = tl.maximum(tl.exp(border - peak), 1e-38)
            keep = tl.maximum(tl.ceil(tl.minimum((goal - above) / share, number * 1.0)), 1.0).to(tl.int32)
            if keep < number:
                end = _after(row, vocab, border, keep, WIDE * TALL)
    low_end = peak + tl.load(min_p + program * min_stride).to(tl.float32)
    for first in range(0, vocab, WIDE * TALL):
        ids = first + tl.arange(0, WIDE * TALL)
        x = tl.load(row + ids, mask=ids < vocab, other=0.0)
        gone = (x <= floor) | (x < border) | ((x == border) & (ids >= end)) | (x < low_end)
        tl.store(kept + ids, tl.where(gone, -_INFINITY, x), mask=ids < vocab)


def ranked(logits_nV: Tensor, top_k_n: Tensor, top_p_n: Tensor, min_p_n: Tensor) -> Tensor:
    """Float32 scores with -inf in place of all that top-k drops, then top-p, then min-p, each row by its own settings.

    A k of 0, or of V and more, a p of 1 and a logarithm of min-p of -inf drop nothing. Ties with the k-th stay, of
    those at the border of p the first ids. Sums are float32: where the mass before an id is p up to some 1e-6 (that
    of all is 1), a sum in another order may choose otherwise.
    """
    rows, vocab = logits_nV.shape
    assert logits_nV.dtype == torch.float32
    logits_nV = logits_nV if logits_nV.stride(1) == 1 else logits_nV.contiguous()
    kept_nV = logits_nV.new_empty(rows, vocab)
    room = triton.cdiv(vocab, WIDE) * WIDE
    spare = logits_nV.new_empty(rows, room)
    with torch.cuda.device_of(logits_nV):  # Triton would start it on the current GPU
        rank_kernel[(rows,)](
            logits_nV, kept_nV, spare, top_k_n, top_p_n, min_p_n, logits_nV.stride(0), room, vocab,
            top_k_n.stride(0), top_p_n.stride(0), min_p_n.stride(0), WIDE, TALL, num_warps=WARPS,
        )  # fmt: skip
    return kept_nV
