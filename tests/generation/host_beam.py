"""Beam search as it was before it moved to the device: candidates in lists, beams in rows of their own."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from trivium.generation.beam import Beam, Found, Search
from trivium.generation.scorer import Scorer


class Candidate(NamedTuple):
    logprob: float
    beam: int
    id: int


class Text:
    """What one search has come to."""

    def __init__(self, item: Search, beam: Beam, context: int) -> None:
        self.beam = beam
        self.prompt = item.prompt
        room = context - len(item.prompt.ids)
        self.limit = min(item.tokens, room)
        self.reason: Literal["length", "context"] = "length" if item.tokens <= room else "context"
        self.live: list[list[int]] = [[]]
        self.finished: list[Found] = []
        self.done = False

    def grow(self, ranked: Sequence[Candidate], length: int, ends: frozenset[int]) -> list[Candidate]:
        live: list[Candidate] = []
        ended: set[int] = set()
        for rank, candidate in enumerate(ranked):
            if candidate.id not in ends:
                live.append(candidate)
            elif rank < self.beam.beams and candidate.beam not in ended:
                ended.add(candidate.beam)
                self._finish(self.live[candidate.beam], candidate.logprob, length, "end")
        live = live[: self.beam.beams]
        texts = [[*self.live[candidate.beam], candidate.id] for candidate in live]
        if length == self.limit:
            for ids, candidate in zip(texts, live, strict=True):
                self._finish(ids, candidate.logprob, length, self.reason)
        self.live = texts
        self.done = length == self.limit or not live or self._settled(live[0].logprob)
        return live

    def _finish(self, ids: list[int], logprob: float, length: int, reason: Literal["end", "length", "context"]) -> None:
        self.finished.append(Found(ids, logprob, logprob / self.beam.penalty(length), reason))
        self.finished.sort(key=lambda found: -found.score)  # stable: of equals the first found
        del self.finished[self.beam.n :]

    def _settled(self, best: float) -> bool:
        return len(self.finished) == self.beam.n and best / self.beam.penalty(self.limit) <= self.finished[-1].score


@torch.no_grad()
def host_search(
    scorer: Scorer, item: Search, beam: Beam, *, ends: frozenset[int], vocab: int, banned: Collection[int]
) -> list[Found]:
    """The n best texts of one search, by lists."""
    text = Text(item, beam, scorer.context)
    reading, scores_RV = scorer.open([item.prompt], text.limit - 1)
    live = [0.0]
    for length in range(1, text.limit + 1):
        alive = text.grow(candidates(scores_RV, live, beam, ends, vocab, banned), length, ends)
        if text.done:
            break
        reading.keep(torch.tensor([candidate.beam for candidate in alive]))
        live = [candidate.logprob for candidate in alive]
        scores_RV = reading.next(torch.tensor([[candidate.id] for candidate in alive]))
    return text.finished


def candidates(
    scores_RV: Tensor, live: list[float], beam: Beam, ends: Collection[int], vocab: int, banned: Collection[int]
) -> list[Candidate]:
    """The best 2 K continuations, and K more for each further id that ends a text, by sorting all of them."""
    allowed_RV = scores_RV[:, :vocab].clone()
    allowed_RV[:, list(banned)] = -math.inf
    count = (1 + max(1, len(ends))) * beam.beams
    best = allowed_RV.sort(dim=-1, descending=True, stable=True)
    logprobs = torch.tensor(live)[:, None] + best.values - scores_RV.logsumexp(-1, keepdim=True)
    found = [
        Candidate(logprob, row, id)
        for row, (values, ids) in enumerate(zip(logprobs.tolist(), best.indices.tolist(), strict=True))
        for logprob, id in zip(values, ids, strict=True)
        if logprob > -math.inf
    ]
    return sorted(found, key=lambda candidate: -candidate.logprob)[:count]
