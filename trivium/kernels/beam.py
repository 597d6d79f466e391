"""Beam search on a GPU: the best ids of every row in one read of its scores, and attention of beams that share a row.

Imported on CUDA only; `trivium.generation.frontier.top` and a mask over all slots are the plain versions.
"""

# R rows, V vocabulary, M chunks of it, C ids wanted
# B texts, K beams, H query heads, G key/value heads, S slots, E head size

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

# mypy: disable-error-code="no-untyped-def"

CHUNK = 128  # ids whose highest score is kept by the first read
MOST, LARGEST = 32, 1 << 18  # ids wanted of a row, and vocabulary: beyond, a program would hold too much
_SPAN, _KEYS = 32, 64  # chunks and slots at a time


@triton.jit
def _key(x, number):
    """A whole number in the order of the scores, of equal ones the lower number first: no two are the same."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)  # there are two zeros, with different bits
    ordered = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.int64)
    return ordered * 4294967296 + (0x7FFFFFFF - number.to(tl.int64))


@triton.jit
def _number(key):
    return 0x7FFFFFFF - (key & 0x7FFFFFFF)


@triton.jit
def _score(key):
    ordered = (key >> 32).to(tl.int32)
    return tl.where(ordered < 0, ordered ^ 0x7FFFFFFF, ordered).to(tl.float32, bitcast=True)


@triton.jit  # type: ignore[untyped-decorator]
def _scan(scores, shut, highest, normal, width, vocab, chunks, CHUNK: tl.constexpr, SPAN: tl.constexpr):
    """The logarithm of the sum of a row's exponentials, and the highest open score of each of its chunks."""
    row = tl.program_id(0).to(tl.int64)
    inside, block = tl.arange(0, CHUNK), tl.arange(0, SPAN)
    peak, total = -3.0e38, 0.0
    for first in range(0, tl.cdiv(width, CHUNK), SPAN):
        ids = (first + block)[:, None] * CHUNK + inside[None, :]
        x = tl.load(scores + row * width + ids, mask=ids < width, other=-float("inf")).to(tl.float32)
        higher = tl.maximum(peak, tl.max(tl.max(x, 1), 0))
        total = total * tl.exp(peak - higher) + tl.sum(tl.sum(tl.exp(x - higher), 1), 0)
        peak = higher
        closed = tl.load(shut + ids, mask=ids < vocab, other=1)
        best = tl.max(tl.where(closed != 0, -float("inf"), x), 1)
        tl.store(highest + row * chunks + first + block, best, mask=first + block < chunks)
    tl.store(normal + row, peak + tl.log(total))


@triton.jit  # type: ignore[untyped-decorator]
def _choose(
    scores, shut, highest, normal, found, found_ids, width, vocab, chunks, count,
    CHUNK: tl.constexpr, CHUNKS: tl.constexpr, COUNT: tl.constexpr,
):  # fmt: skip
    """The best ids of a row and their log-probabilities: they lie in the chunks with the highest peaks."""
    row = tl.program_id(0).to(tl.int64)
    numbers, order, inside = tl.arange(0, CHUNKS), tl.arange(0, COUNT), tl.arange(0, CHUNK)
    lowest = -9223372036854775807
    peaks = tl.load(highest + row * chunks + numbers, mask=numbers < chunks, other=-float("inf"))
    keys = tl.where(numbers < chunks, _key(peaks, numbers), lowest)
    chosen = tl.zeros([COUNT], dtype=tl.int64)
    for place in range(count):
        best = tl.max(keys, 0)
        chosen = tl.where(order == place, _number(best), chosen)
        keys = tl.where(keys == best, lowest, keys)
    ids = chosen[:, None] * CHUNK + inside[None, :]
    real = (order[:, None] < count) & (ids < vocab)
    x = tl.load(scores + row * width + ids, mask=real, other=-float("inf")).to(tl.float32)
    closed = tl.load(shut + ids, mask=real, other=1)
    near = tl.where(real, _key(tl.where(closed != 0, -float("inf"), x), ids), lowest)
    near = tl.reshape(near, [COUNT * CHUNK])
    whole = tl.load(normal + row)
    for place in range(count):
        best = tl.max(near, 0)
        tl.store(found + row * count + place, _score(best) - whole)
        tl.store(found_ids + row * count + place, _number(best))
        near = tl.where(near == best, lowest, near)


def choosable(vocab: int, count: int) -> bool:
    """Whether `best` can be asked for so many ids of so large a vocabulary."""
    return count <= min(MOST, -(-vocab // CHUNK)) and vocab <= LARGEST


def best(scores_RV: Tensor, shut_V: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The log-probabilities and ids [R, C] of the best that are not shut, best first, equal ones by id.

    Ids beyond those that `shut` knows count among the probabilities and are never chosen; what is shut is at -inf.
    """
    rows, width = scores_RV.shape
    vocab = len(shut_V)
    chunks = -(-vocab // CHUNK)
    highest_RM = scores_RV.new_empty(rows, chunks, dtype=torch.float32)
    normal_R = scores_RV.new_empty(rows, dtype=torch.float32)
    found_RC = scores_RV.new_empty(rows, count, dtype=torch.float32)
    ids_RC = torch.empty(rows, count, dtype=torch.long, device=scores_RV.device)
    shut_V = shut_V.view(torch.uint8)
    _scan[(rows,)](scores_RV, shut_V, highest_RM, normal_R, width, vocab, chunks, CHUNK, _SPAN, num_warps=8)
    _choose[(rows,)](
        scores_RV, shut_V, highest_RM, normal_R, found_RC, ids_RC, width, vocab, chunks, count,
        CHUNK, triton.next_power_of_2(chunks), triton.next_power_of_2(count), num_warps=4,
    )  # fmt: skip
    return found_RC, ids_RC


@triton.jit  # type: ignore[untyped-decorator]
def _mix(
    query, keys, values, seen, steps, out, query_b, query_h, query_k, keys_b, keys_g, keys_s, values_b, values_g,
    values_s, seen_b, seen_k, out_b, out_h, out_k, slots, scale, beams,
    SHARE: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, E: tl.constexpr, PAD: tl.constexpr,
):  # fmt: skip
    """All beams of one text in the heads that share keys: they read the filled slots together, each sees its own."""
    text, group = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row, e, key = tl.arange(0, ROWS), tl.arange(0, PAD), tl.arange(0, KEYS)
    head, beam = group * SHARE + row // beams, row % beams
    real = row < SHARE * beams
    wide = real[:, None] & (e[None, :] < E)
    q = tl.load(
        query + text * query_b + head[:, None] * query_h + beam[:, None] * query_k + e[None, :], mask=wide, other=0.0
    )
    filled = tl.minimum((tl.load(steps + text) + 1) * beams, slots).to(tl.int32)
    top = tl.full([ROWS], -3.0e38, dtype=tl.float32)
    total = tl.zeros([ROWS], dtype=tl.float32)
    mixed = tl.zeros([ROWS, PAD], dtype=tl.float32)
    for first in range(0, filled, KEYS):
        at = first + key
        there = (at < filled)[:, None] & (e[None, :] < E)
        k = tl.load(keys + text * keys_b + group * keys_g + at[:, None] * keys_s + e[None, :], mask=there, other=0.0)
        v = tl.load(
            values + text * values_b + group * values_g + at[:, None] * values_s + e[None, :], mask=there, other=0.0
        )
        visible = real[:, None] & (at < filled)[None, :]
        visible = tl.load(seen + text * seen_b + beam[:, None] * seen_k + at[None, :], mask=visible, other=0) != 0
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        scores = tl.where(visible, scores, -float("inf"))
        higher = tl.maximum(top, tl.max(scores, 1))
        weights = tl.exp(scores - higher[:, None])
        shrink = tl.exp(top - higher)
        total = total * shrink + tl.sum(weights, 1)
        mixed = mixed * shrink[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
        top = higher
    at_out = out + text * out_b + head[:, None] * out_h + beam[:, None] * out_k + e[None, :]
    tl.store(at_out, (mixed / tl.where(total == 0.0, 1.0, total)[:, None]).to(out.dtype.element_ty), mask=wide)


def mixable(query_BHKE: Tensor, keys_BGSE: Tensor, values_BGSE: Tensor) -> bool:
    """Whether `mix` can be asked: keys and values of one size, few beams, half precision or single."""
    size, beams = query_BHKE.shape[3], query_BHKE.shape[2] * query_BHKE.shape[1] // keys_BGSE.shape[1]
    return size == values_BGSE.shape[3] and size <= 128 and beams <= 64


def mix(
    query_BHKE: Tensor, keys_BGSE: Tensor, values_BGSE: Tensor, seen_BKS: Tensor, steps_B: Tensor, scale: float
) -> Tensor:
    """The mixed values [B, H, K, E]: each beam of a text over the slots that it has seen, of steps up to its own."""
    texts, heads, beams, size = query_BHKE.shape
    groups, slots = keys_BGSE.shape[1:3]
    share = heads // groups
    out_BKHE = query_BHKE.new_empty(texts, beams, heads, size)
    out_BHKE = out_BKHE.transpose(1, 2)
    rows = max(16, triton.next_power_of_2(share * beams))
    _mix[(texts, groups)](
        query_BHKE, keys_BGSE, values_BGSE, seen_BKS.view(torch.uint8), steps_B, out_BHKE, *query_BHKE.stride()[:3],
        *keys_BGSE.stride()[:3], *values_BGSE.stride()[:3], *seen_BKS.stride()[:2], *out_BHKE.stride()[:3], slots,
        scale, beams, share, rows, _KEYS, size, max(16, triton.next_power_of_2(size)), num_warps=4,
    )  # fmt: skip
    return out_BHKE
