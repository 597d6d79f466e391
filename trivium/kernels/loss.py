"""The loss over a large vocabulary, some rows at a time: no more logits are ever held, and none is computed twice.

For each chunk of rows the logits become their own gradient, and the gradient of the states and that of the matrix
come from it at once; the backward pass only multiplies by what arrives from behind.
"""

# N rows (of a chunk, or all), D width, V vocabulary, P vocabulary with its padding

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from trivium.kernels import fp8, onednn
from trivium.kernels.fp8 import Scaled
from trivium.kernels.hardware import can_launch, working
from trivium.labels import IGNORED

# Rows that end where a memory line does: the wide loads of a GPU's tensor cores need it.
ALIGNED = 64
# Rows of a chunk. On a CPU below some 300 the products slow down (384 of V = 50,257 are 77 MB); 16 MB of logits if
# the vocabulary is small.
ROWS, CHUNK = {"cpu": 384, "cuda": 16_384}, 1 << 22
# So many logits stay in a CPU's cache while the softmax goes over them several times.
CACHED = 1 << 19


@dataclass(frozen=True, slots=True)
class Scoring:
    """What happens to the logits: a soft cap, and a share of each label that is spread over the whole vocabulary."""

    vocab: int
    cap: float = 0.0
    smoothing: float = 0.0
    narrow: bool = False  # logits in float8


def summed(
    hidden_ND: Tensor,
    weight_VD: Tensor,
    bias_V: Tensor | None,
    labels_N: Tensor,
    *,
    cap: float = 0.0,
    smoothing: float = 0.0,
    narrow: bool = False,
    rows: int = 0,
) -> Tensor:
    """The losses of all labels added up, float32; `rows` at a time, by default as many as the device likes best.

    With `narrow` the logits of a training step in half precision are multiplied in float8, where the sizes allow it.
    """
    kind = hidden_ND.device.type
    mixed = torch.is_autocast_enabled(kind)
    dtype = working(hidden_ND)
    at_once = rows or max(ROWS.get(kind, ROWS["cuda"]), CHUNK // len(weight_VD))
    narrow = narrow and torch.is_grad_enabled() and mixed and fp8.fits(hidden_ND)
    scoring = Scoring(len(weight_VD), cap, smoothing, narrow)
    wanted = (
        hidden_ND.requires_grad,
        weight_VD.requires_grad,
        bias_V is not None and bias_V.requires_grad,
    )
    if not torch.is_grad_enabled() or not any(wanted):
        wanted = (False, False, False)
        return _forward(hidden_ND, weight_VD, bias_V, labels_N, scoring, dtype, at_once, wanted)[0]
    loss: Tensor = _Summed.apply(  # type: ignore[no-untyped-call]
        hidden_ND, weight_VD, bias_V, labels_N, scoring, dtype, at_once, wanted
    )
    return loss


Wanted = tuple[bool, bool, bool]  # whether states, matrix and bias want a gradient
Found = tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]  # the loss, and these gradients


class _Summed(Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_ND: Tensor,
        weight_VD: Tensor,
        bias_V: Tensor | None,
        labels_N: Tensor,
        scoring: Scoring,
        dtype: torch.dtype,
        rows: int,
        wanted: Wanted,
    ) -> Tensor:
        loss, *gradients = _forward(hidden_ND, weight_VD, bias_V, labels_N, scoring, dtype, rows, wanted)
        ctx.save_for_backward(*gradients)
        ctx.dtypes = (hidden_ND.dtype, weight_VD.dtype, weight_VD.dtype if bias_V is None else bias_V.dtype)
        return loss

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor | None, ...]:
        (factor,) = gradients
        # Not in place: somebody may go back a second time. And in the precision of the loss: one over the labels of a
        # step, rounded to bfloat16, would make all gradients up to 0.4 % too large or too small.
        kept = zip(ctx.saved_tensors, ctx.dtypes, strict=True)
        found = [None if one is None else (one.to(factor.dtype) * factor).to(dtype) for one, dtype in kept]
        return (*found, None, None, None, None, None)


def _forward(
    hidden_ND: Tensor,
    weight_VD: Tensor,
    bias_V: Tensor | None,
    labels_N: Tensor,
    scoring: Scoring,
    dtype: torch.dtype,
    rows: int,
    wanted: Wanted,
) -> Found:
    eager = hidden_ND.device.type == "cpu" and not torch.compiler.is_compiling() and not scoring.narrow
    over = _eager if eager else _compiled
    with torch.autocast(hidden_ND.device.type, enabled=False):
        return over(hidden_ND.to(dtype), weight_VD.to(dtype), bias_V, labels_N, scoring, rows, wanted)


def _chunks(number: int, rows: int) -> Iterator[tuple[int, int]]:
    """Where each chunk begins and ends: of one size as far as possible, so that one program serves all of them."""
    pieces = max(1, -(-number // rows))
    size = -(-number // pieces // 16) * 16 if number % 16 == 0 else -(-number // pieces)
    for piece in range(pieces):
        yield piece * size, min(number, (piece + 1) * size)


def _compiled(
    hidden_ND: Tensor,
    weight_VD: Tensor,
    bias_V: Tensor | None,
    labels_N: Tensor,
    scoring: Scoring,
    rows: int,
    wanted: Wanted,
) -> Found:
    """Matrix products, and between them one kernel: Triton's, or what the compiler makes of the plain formulas."""
    vocab = scoring.vocab
    weight_PD = F.pad(weight_VD, (0, 0, 0, -vocab % ALIGNED))
    products = _Narrow(hidden_ND, weight_PD) if scoring.narrow else _Plain(hidden_ND, weight_PD)
    bias_P = None if bias_V is None else F.pad(bias_V, (0, -vocab % ALIGNED))
    loss = torch.zeros((), dtype=_wide(hidden_ND.dtype), device=hidden_ND.device)
    states: list[Tensor] = []
    matrix, offset = None, None
    for start, end in _chunks(len(labels_N), rows):
        logits_NP = products.logits(start, end)
        part, gradient_NP = _differentiated(logits_NP, bias_P, labels_N[start:end], scoring, any(wanted))
        loss = loss + part
        if wanted[0] or wanted[1]:
            new_states, new = products.gradients(gradient_NP, start, end)
            states.append(new_states)
            matrix = new if matrix is None else matrix + new
        if wanted[2]:
            more = gradient_NP.to(loss.dtype).sum(0)
            offset = more if offset is None else offset + more
    return (
        loss,
        torch.cat(states) if wanted[0] else None,
        None if matrix is None or not wanted[1] else matrix[:vocab],
        None if offset is None else offset[:vocab],
    )


class _Plain:
    """The products of a chunk in the precision of what is multiplied."""

    def __init__(self, hidden_ND: Tensor, weight_PD: Tensor) -> None:
        self.hidden, self.weight = hidden_ND, weight_PD

    def logits(self, start: int, end: int) -> Tensor:
        return self.hidden[start:end] @ self.weight.mT

    def gradients(self, gradient_NP: Tensor, start: int, end: int) -> tuple[Tensor, Tensor]:
        """Those of the states and of the matrix."""
        return gradient_NP @ self.weight, wide_product(gradient_NP.mT, self.hidden[start:end])


class _Narrow:
    """The same, the logits in float8; their gradient would have to be written once more for each of its products."""

    def __init__(self, hidden_ND: Tensor, weight_PD: Tensor) -> None:
        self.plain = _Plain(hidden_ND, weight_PD)
        self.hidden, self.weight = fp8.quantized(hidden_ND), fp8.quantized(weight_PD)

    def logits(self, start: int, end: int) -> Tensor:
        chunk = Scaled(self.hidden.values[start:end], self.hidden.scale[start:end])
        return fp8.scaled_product(chunk, self.weight, self.plain.hidden.dtype)

    def gradients(self, gradient_NP: Tensor, start: int, end: int) -> tuple[Tensor, Tensor]:
        return self.plain.gradients(gradient_NP, start, end)


def _differentiated(
    logits_NP: Tensor, bias_P: Tensor | None, labels_N: Tensor, scoring: Scoring, wanted: bool
) -> tuple[Tensor, Tensor]:
    """The summed loss of a chunk, and the gradient of its logits in their precision."""
    if _by_kernel(logits_NP):
        from trivium.kernels import softmax  # not above: there is no Triton for a CPU

        return softmax.differentiated_in_place(logits_NP, bias_P, labels_N, scoring, wanted).sum(), logits_NP
    loss, gradient_NP = differentiated(logits_NP, bias_P, labels_N, scoring, wanted)
    return loss, gradient_NP.to(logits_NP.dtype)


def _by_kernel(logits: Tensor) -> bool:
    return can_launch(logits) and logits.dtype in (torch.bfloat16, torch.float32)


def differentiated(
    logits_NP: Tensor, bias_P: Tensor | None, labels_N: Tensor, scoring: Scoring, wanted: bool
) -> tuple[Tensor, Tensor]:
    """The summed loss of a chunk and the gradient of its logits; columns beyond the vocabulary count for nothing."""
    scores_NP = logits_NP.to(_wide(logits_NP.dtype))
    if bias_P is not None:
        scores_NP = scores_NP + bias_P
    slope_NP: Tensor | float = 1.0
    if scoring.cap:
        bent_NP = torch.tanh(scores_NP / scoring.cap)
        scores_NP, slope_NP = scoring.cap * bent_NP, 1 - bent_NP.square()
    column_P = torch.arange(logits_NP.shape[-1], device=logits_NP.device)
    real_P = column_P < scoring.vocab
    if logits_NP.shape[-1] != scoring.vocab:
        scores_NP = scores_NP.masked_fill(~real_P, float("-inf"))
    top_N1 = scores_NP.amax(-1, keepdim=True)
    powers_NP = (scores_NP - top_N1).exp()
    total_N1 = powers_NP.sum(-1, keepdim=True)
    label_NP = column_P == labels_N[:, None]
    counts_N1 = (labels_N != IGNORED)[:, None]
    chosen_N1 = torch.where(label_NP, scores_NP, 0.0).sum(-1, keepdim=True)
    losses_N1 = top_N1 + total_N1.log() - (1 - scoring.smoothing) * chosen_N1
    aim_NP = label_NP.to(scores_NP.dtype) * (1 - scoring.smoothing)
    if scoring.smoothing:
        share = scoring.smoothing / scoring.vocab
        losses_N1 = losses_N1 - share * torch.where(real_P, scores_NP, 0.0).sum(-1, keepdim=True)
        aim_NP = aim_NP + real_P.to(scores_NP.dtype) * share
    loss = torch.where(counts_N1, losses_N1, 0.0).sum()
    if not wanted:
        return loss, logits_NP
    return loss, torch.where(counts_N1, (powers_NP / total_N1 - aim_NP) * slope_NP, 0.0)


def _eager(
    hidden_ND: Tensor,
    weight_VD: Tensor,
    bias_V: Tensor | None,
    labels_N: Tensor,
    scoring: Scoring,
    rows: int,
    wanted: Wanted,
) -> Found:
    """The same, the gradient in the place of the logits."""
    number, vocab, wide = len(labels_N), scoring.vocab, _wide(hidden_ND.dtype)
    loss = hidden_ND.new_zeros((), dtype=wide)
    states = torch.empty_like(hidden_ND) if wanted[0] else None
    matrix = torch.zeros_like(weight_VD, dtype=wide) if wanted[1] else None
    offset = weight_VD.new_zeros(vocab, dtype=wide) if wanted[2] else None
    for start, end in _chunks(number, rows):
        chunk_ND, labels = hidden_ND[start:end], labels_N[start:end]
        scores_NV = _product(chunk_ND, weight_VD.mT).to(wide)
        few = max(1, CACHED // vocab)
        for some_NV, some in zip(torch.split(scores_NV, few), torch.split(labels, few), strict=True):
            loss += differentiated_in_place(some_NV, bias_V, some, scoring, any(wanted))
        gradient_NV = scores_NV.to(hidden_ND.dtype)
        if states is not None:
            states[start:end] = _product(gradient_NV, weight_VD)
        if matrix is not None and matrix.dtype == gradient_NV.dtype:
            matrix.addmm_(gradient_NV.mT, chunk_ND)
        elif matrix is not None:
            matrix += wide_product(gradient_NV.mT, chunk_ND)
        if offset is not None:
            offset += scores_NV.sum(0)
        del scores_NV, gradient_NV  # the next chunk takes their place
    return loss, states, matrix, offset


def _product(left: Tensor, right: Tensor) -> Tensor:
    return onednn.matmul(left, right) if onednn.fits(left, right.mT) else left @ right


def differentiated_in_place(
    scores_NV: Tensor, bias_V: Tensor | None, labels_N: Tensor, scoring: Scoring, wanted: bool
) -> Tensor:
    """The summed loss of some rows; their logits become their gradient."""
    if bias_V is not None:
        scores_NV += bias_V
    slope_NV: Tensor | None = None
    if scoring.cap:
        scores_NV.div_(scoring.cap).tanh_()
        slope_NV = 1 - scores_NV.square()
        scores_NV.mul_(scoring.cap)
    counts_N, chosen_N1 = labels_N != IGNORED, labels_N.clamp(min=0)[:, None]
    top_N = scores_NV.amax(-1)
    right_N = scores_NV.gather(1, chosen_N1)[:, 0]
    mean_N = scores_NV.mean(-1) if scoring.smoothing else right_N
    torch.softmax(scores_NV, -1, out=scores_NV)
    likely_N = scores_NV.gather(1, chosen_N1)[:, 0]
    sum_N = right_N - likely_N.log()
    if bool((likely_N < 1e-30).any()):  # the largest probability is one over the sum that the softmax has divided by
        sum_N = top_N - scores_NV.amax(-1).log()
    losses_N = sum_N - (1 - scoring.smoothing) * right_N - scoring.smoothing * mean_N
    if wanted:
        if scoring.smoothing:
            scores_NV -= scoring.smoothing / scoring.vocab
        scores_NV.scatter_add_(1, chosen_N1, scores_NV.new_full(chosen_N1.shape, scoring.smoothing - 1))
        if slope_NV is not None:
            scores_NV *= slope_NV
        scores_NV[~counts_N] = 0.0
    return losses_N.masked_fill(~counts_N, 0.0).sum()


def wide_product(left: Tensor, right: Tensor) -> Tensor:
    """A matrix product whose sums are not rounded to the half precision of what is multiplied."""
    if left.dtype == _wide(left.dtype):
        return left @ right
    if left.device.type == "cuda":
        return torch.mm(left, right, out_dtype=torch.float32)
    return (left @ right).float()


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)
