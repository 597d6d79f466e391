"""The next token of every row chosen where the scores are: the functions of `sampling` with settings by row."""

# B slots, n rows among them, V vocabulary, N random numbers of a row

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from trivium.fast.graphs import to_device_async
from trivium.generation.rows import Row
from trivium.generation.sampling import Sampling, by_kernel, draw


class Kind(NamedTuple):
    """What has to be done for at least one row; what no row needs costs nothing."""

    draws: bool
    filters: bool  # by rank: top-k, top-p
    penalises: bool

    @classmethod
    def of(cls, samplings: Collection[Sampling]) -> Kind:
        drawn = [sampling for sampling in samplings if not sampling.greedy]
        return cls(
            draws=bool(drawn),
            filters=any(sampling.top_k or sampling.top_p < 1 for sampling in drawn),
            penalises=any(sampling.penalises for sampling in samplings),
        )


class Chooser:
    """The settings, random numbers and seen ids of all slots, on the device at addresses that stay."""

    def __init__(self, slots: int, vocab: int, numbers: int, device: torch.device) -> None:
        self.vocab, self.numbers, self.device = vocab, numbers, device
        # temperature (0: greedy), top-k, top-p, log of min-p, repetition penalty
        plain = [_settings(Sampling(temperature=0), vocab)] * slots
        self.settings_B5 = torch.tensor(plain, device=device, dtype=torch.float32)
        self.uniforms_BN = torch.zeros(slots, numbers, device=device, dtype=torch.float64)
        self.drawn_B = torch.zeros(slots, device=device, dtype=torch.long)
        self.seen_BV = torch.zeros(slots, vocab, device=device, dtype=torch.bool)
        self.shut_V = torch.zeros(vocab, device=device, dtype=torch.bool)
        self._shut: tuple[int, frozenset[int]] = (vocab, frozenset())  # what it says

    def shut(self, vocab: int, banned: Collection[int]) -> None:
        """Forbid the ids from `vocab` on and the `banned` ones."""
        if self._shut == (vocab, frozenset(banned)):
            return
        shut = torch.arange(self.vocab) >= vocab
        shut[torch.tensor(sorted(banned), dtype=torch.long)] = True
        self.shut_V.copy_(shut)
        self._shut = (vocab, frozenset(banned))

    def settings(self, rows: Sequence[Row]) -> list[list[float]]:
        """How these rows choose, five numbers each."""
        return [_settings(row.request.sampling, self.vocab) for row in rows]

    def bring(self, slots: Sequence[int], rows: Sequence[Row]) -> None:
        """Bring what only some of the new rows need: random numbers, the ids that were seen."""
        for slot, row in zip(slots, rows, strict=True):
            wish = row.request.sampling
            if not wish.greedy:
                count = min(row.left, self.numbers)
                self.uniforms_BN[slot, :count] = send(row.uniforms.take(count), self.device, torch.float64)
            if wish.penalises:
                self.seen_BV[slot] = False
                self.seen_BV[slot, send(row.ids, self.device)] = True

    def settle(self, slots_n: Tensor, settings_n5: Tensor) -> None:
        """Take over how the new rows of these slots choose."""
        self.settings_B5.index_copy_(0, slots_n, settings_n5)
        self.drawn_B.index_fill_(0, slots_n, 0)

    def choose(self, logits_nV: Tensor, kind: Kind, slots_n: Tensor | None = None) -> Tensor:
        """The next id of each row, -1 where the scores are not finite; `slots` [n] are theirs, None means all.

        A slot that is there twice has one id.
        """
        logits_nV = logits_nV.float().masked_fill(self.shut_V, -math.inf)
        settings_n5, seen_nV, drawn_n = self.settings_B5, self.seen_BV, self.drawn_B
        if slots_n is not None:
            settings_n5, drawn_n = settings_n5[slots_n], drawn_n[slots_n]
            seen_nV = seen_nV[slots_n] if kind.penalises else seen_nV
        temperature, top_k, top_p, min_p, penalty = settings_n5[:, :, None].unbind(1)
        best = logits_nV.max(-1)
        ids_n = best.indices
        if kind.penalises:
            punished = torch.where(logits_nV > 0, logits_nV / penalty, logits_nV * penalty)
            logits_nV = torch.where(seen_nV, punished, logits_nV)
            ids_n = logits_nV.argmax(-1)
        if kind.draws:
            shifted_nV = logits_nV - logits_nV.amax(-1, keepdim=True)
            kept_nV = shifted_nV / temperature.clamp(min=1e-30)
            kept_nV = _kept(kept_nV, top_k if kind.filters else None, top_p, min_p)
            numbers_nN = self.uniforms_BN if slots_n is None else self.uniforms_BN[slots_n]
            uniform_n = numbers_nN.gather(1, drawn_n[:, None])[:, 0]
            drawn = draw(kept_nV.softmax(-1), uniform_n)
            ids_n = torch.where(temperature[:, 0] > 0, drawn, ids_n)
        ids_n = torch.where(best.values.isfinite(), ids_n, -1)
        if slots_n is not None:
            ids_n = torch.empty_like(self.drawn_B).index_copy_(0, slots_n, ids_n).index_select(0, slots_n)
        self._note(ids_n, drawn_n, kind, slots_n)
        return ids_n

    def _note(self, ids_n: Tensor, drawn_n: Tensor, kind: Kind, slots_n: Tensor | None) -> None:
        """One number of each row is used up, one more id of it was seen."""
        after_n = (drawn_n + 1).clamp(max=self.numbers - 1)
        if slots_n is None:
            self.drawn_B.copy_(after_n)
        else:
            self.drawn_B[slots_n] = after_n
        if kind.penalises:
            ids_n1 = ids_n.clamp(min=0)[:, None]
            if slots_n is None:
                self.seen_BV.scatter_(1, ids_n1, True)
            else:
                self.seen_BV[slots_n] = self.seen_BV[slots_n].scatter(1, ids_n1, True)


def send(values: Sequence[object], device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """A small list on the device, without waiting for it."""
    return to_device_async(torch.tensor(values, dtype=dtype), device)


def _settings(sampling: Sampling, vocab: int) -> list[float]:
    k = sampling.top_k if 0 < sampling.top_k < vocab else vocab
    least = math.log(sampling.min_p) if sampling.min_p > 0 else -math.inf
    temperature = 0.0 if sampling.greedy else max(sampling.temperature, 1e-30)
    return [temperature, k, sampling.top_p, least, sampling.repetition_penalty]


def _kept(logits_nV: Tensor, top_k_n1: Tensor | None, top_p_n1: Tensor, min_p_n1: Tensor) -> Tensor:
    """`keep_top_k`, `keep_top_p`, then `keep_min_p`; without a k only the last, whose p is a logarithm."""
    if top_k_n1 is not None:
        if by_kernel(logits_nV):
            from trivium.kernels.rank import ranked  # triton is there with CUDA only

            return ranked(logits_nV, top_k_n1[:, 0], top_p_n1[:, 0], min_p_n1[:, 0])
        logits_nV = _ranked(logits_nV, top_k_n1, top_p_n1)
    return logits_nV.masked_fill(logits_nV < logits_nV.amax(-1, keepdim=True) + min_p_n1, -math.inf)


def _ranked(logits_nV: Tensor, top_k_n1: Tensor, top_p_n1: Tensor) -> Tensor:
    """`keep_top_k`, then `keep_top_p`, by one sort: what the first drops stays at the end of the order."""
    sorted_nV, order_nV = logits_nV.sort(dim=-1, descending=True, stable=True)
    least_n1 = sorted_nV.gather(1, top_k_n1.long() - 1)
    sorted_nV = sorted_nV.masked_fill(sorted_nV < least_n1, -math.inf)
    mass_nV = sorted_nV.softmax(-1)
    drop_nV = (mass_nV.cumsum(-1) - mass_nV >= top_p_n1) & (top_p_n1 < 1)
    first = torch.zeros_like(logits_nV[:, :1], dtype=torch.bool)
    kept_nV = sorted_nV.masked_fill(torch.cat((first, drop_nV[:, 1:]), 1), -math.inf)
    return torch.empty_like(kept_nV).scatter(1, order_nV, kept_nV)
