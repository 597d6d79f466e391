"""The losses of a chunk of logits, which become their own gradient, by a kernel of Triton; imported only for a GPU.

Each program goes over its row twice: from memory for the sum, and from the cache for the gradient, which it writes
where the logits were, so that a row takes up the cache once. By bytes that is one read and one write of the chunk,
0.77 ms for 16,384 rows of 50,304 at 4.26 TB/s; what torch's compiler makes of the plain formulas took 2.49 ms on an
H200, and a kernel that wrote elsewhere and looked for the row's maximum in every round 1.70.
"""

# N rows, P columns, those beyond the vocabulary included
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from trivium.kernels.loss import Scoring
from trivium.labels import IGNORED

# Columns at a time, and warps. 16,384 rows of 50,304 on an H200: 1.22 ms; with 16 warps 1.28, with 4 warps 1.76, with
# 8,192 columns and 16 warps 1.42, without the hints 1.28; a mere copy takes 0.78. A kernel that held its row in
# registers took 1.12, and needed assembly for it.
BLOCK, WARPS = 4096, 8

# exp(x) is exp2(x * BASE), which is what the unit for it computes.
BASE = tl.constexpr(1.4426950408889634)
# Less than any score, but no infinity: the difference of two of those is not a number.
LOWEST = tl.constexpr(-1e38)


@triton.jit
def _scores(loaded, bias, at, inside, cap, BIAS: tl.constexpr, CAP: tl.constexpr):
    """The scores at some columns and, where they are capped, the tangents that they come from."""
    scores = loaded.to(tl.float32)
    if BIAS:
        scores += tl.load(bias + at, mask=inside, other=0.0).to(tl.float32)
    bent = scores
    if CAP:
        bent = 1 - 2 / (tl.exp2(scores * (2 * BASE) / cap) + 1)  # tanh: right at both ends, where the power is 0 or inf
        scores = cap * bent
    return scores, bent


@triton.jit
def loss_kernel(
    logits, bias, labels, losses, stride, vocab, columns, cap, smoothing,
    IGNORED: tl.constexpr, BIAS: tl.constexpr, CAP: tl.constexpr, SMOOTH: tl.constexpr, WANTED: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    # Masks are of columns and not of the vocabulary: only where they end at a multiple of 16 are loads wide.
    row = tl.program_id(0).to(tl.int64)
    logits += row * stride
    label = tl.load(labels + row)
    counts = label != IGNORED
    label = tl.where(counts, label, 0)
    right, _tangent = _scores(tl.load(logits + label), bias, label, counts, cap, BIAS, CAP)
    # Each lane has a maximum and a sum of its own, so that the lanes need not wait for each other in every round.
    most = tl.full([BLOCK], LOWEST, tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    whole = tl.zeros([BLOCK], tl.float32)
    for start in range(0, vocab, BLOCK):
        at = start + tl.arange(0, BLOCK)
        loaded = tl.load(logits + at, mask=at < columns, other=0.0, eviction_policy="evict_last")
        scores, bent = _scores(loaded, bias, at, at < columns, cap, BIAS, CAP)
        if SMOOTH:
            whole += tl.where(at < vocab, scores, 0.0)
        scores = tl.where(at < vocab, scores, LOWEST)
        power = tl.exp2(-tl.abs(scores - most) * BASE)  # of the lower one over the higher one
        total = tl.where(scores > most, total * power + 1, total + power)
        most = tl.maximum(most, scores)
    top = tl.max(most, 0)
    total *= tl.exp2((most - top) * BASE)
    sum_of_all = top + tl.log(tl.sum(total, 0))
    loss = sum_of_all - (1 - smoothing) * right
    if SMOOTH:
        loss -= smoothing / vocab * tl.sum(whole, 0)
    tl.store(losses + row, tl.where(counts, loss, 0.0))
    if WANTED:
        for start in range(0, columns, BLOCK):
            at = start + tl.arange(0, BLOCK)
            loaded = tl.load(logits + at, mask=at < columns, other=0.0, eviction_policy="evict_first")
            scores, bent = _scores(loaded, bias, at, at < columns, cap, BIAS, CAP)
            slope = tl.exp2(scores * BASE - sum_of_all * BASE) - tl.where(at == label, 1 - smoothing, 0.0)
            if SMOOTH:
                slope -= smoothing / vocab
            if CAP:
                slope *= 1 - bent * bent
            slope = tl.where((at < vocab) & counts, slope, 0.0)
            tl.store(logits + at, slope.to(logits.dtype.element_ty), mask=at < columns, eviction_policy="evict_first")


def differentiated_in_place(
    logits_NP: Tensor, bias_P: Tensor | None, labels_N: Tensor, scoring: Scoring, wanted: bool
) -> Tensor:
    """The losses [N]; where a gradient is wanted, the logits become theirs."""
    losses_N: Tensor = softmax_gradient(
        logits_NP, bias_P, labels_N, scoring.vocab, scoring.cap, scoring.smoothing, wanted
    )
    return losses_N


# An operator, so that the compiler takes it as it is: it could not see which of its arguments the kernel writes.


@torch.library.custom_op(
    "trivium::softmax_gradient",
    mutates_args=("logits",),
    schema="(Tensor(a!) logits, Tensor? bias, Tensor labels, int vocab, float cap, float smoothing, bool wanted)"
    " -> Tensor",
)
def softmax_gradient(
    logits: Tensor, bias: Tensor | None, labels: Tensor, vocab: int, cap: float, smoothing: float, wanted: bool
) -> Tensor:
    losses: Tensor = _shape(logits, bias, labels, vocab, cap, smoothing, wanted)
    assert logits.stride(1) == 1, "the columns of a row are neighbours"
    columns = logits.shape[1]
    if len(logits):
        with torch.cuda.device_of(logits):  # Triton would start it on the current GPU
            loss_kernel[(len(logits),)](
                logits, logits if bias is None else bias.contiguous(), labels.contiguous(), losses, logits.stride(0),
                vocab, columns, cap, smoothing, IGNORED=IGNORED, BIAS=bias is not None, CAP=cap > 0,
                SMOOTH=smoothing > 0, WANTED=wanted, BLOCK=min(BLOCK, triton.next_power_of_2(columns)),
                num_warps=WARPS,
            )  # fmt: skip
    return losses


@softmax_gradient.register_fake
def _shape(
    logits: Tensor, bias: Tensor | None, labels: Tensor, vocab: int, cap: float, smoothing: float, wanted: bool
) -> Tensor:
    return logits.new_empty(logits.shape[0], dtype=torch.float32)  # not len: that is a number
