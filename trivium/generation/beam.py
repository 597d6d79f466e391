"""Beam search: of the likeliest beginnings a few are kept alive at every step (spec: inspection §1)."""

# B prompts, K beams of each, R = B * K rows (at first R = B), C candidates of a prompt, W source tokens, V vocabulary

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from trivium.errors import RequestError
from trivium.generation.coverage import Coverage
from trivium.generation.engine import evaluating
from trivium.generation.scorer import Prompt, Reading, Scorer, allowed, require_finite
from trivium.models.transformer import Transformer


@dataclass(frozen=True, kw_only=True, slots=True)
class Beam:
    """How to search; a finished text is scored by log p / ((5 + length) / 6) ** alpha + coverage (GNMT), END counted.

    Coverage is `coverage` times the sum, over the source, of the logarithm of how much attention each token has got,
    at most 1: it ranks finished texts and does not steer the search.
    """

    beams: int = 4
    alpha: float = 0.6  # 0 ranks by probability alone, which prefers short texts
    coverage: float = 0.0
    n: int = 1  # how many of the best are wanted

    def __post_init__(self) -> None:
        if self.beams < 1:
            raise RequestError(f"beams: {self.beams} is less than 1; 1 is greedy, 4 is usual")
        if not 0 <= self.alpha < math.inf:
            raise RequestError(f"alpha: {self.alpha} is not a number from 0 (no length penalty) upwards; try 0.6")
        if not 0 <= self.coverage < math.inf:
            raise RequestError(f"coverage: {self.coverage} is not a number from 0 (no penalty) upwards; try 0.2")
        if not 1 <= self.n <= self.beams:
            raise RequestError(f"n: {self.n} is not between 1 and the number of beams, {self.beams}")

    def penalty(self, length: int) -> float:
        """What the log-probability of a text of so many tokens is divided by."""
        return math.pow((5 + length) / 6, self.alpha)


@dataclass(frozen=True, kw_only=True, slots=True)
class Search:
    """One text to find a continuation or translation for, of at most so many tokens."""

    prompt: Prompt
    tokens: int

    def __post_init__(self) -> None:
        if self.tokens < 1:
            raise RequestError(f"tokens: {self.tokens} is less than 1; ask for at least one new token")


class Found(NamedTuple):
    """A finished text: its new ids without the END, its log-probability with it, and its score."""

    ids: list[int]
    logprob: float
    score: float
    reason: Literal["end", "length", "context"]


def search(
    model: Transformer | Scorer,
    searches: Sequence[Search],
    beam: Beam,
    *,
    end: int | None,
    stop_ids: frozenset[int] = frozenset(),
    vocab: int = 0,
    banned: Collection[int] = (),
) -> list[list[Found]]:
    """The `beam.n` best texts for each, best first, found together; each is what it would be alone.

    A text is finished where END (or one of `stop_ids`) is among the best K of its step; one that is cut off, at its
    number of tokens or the context, comes behind all that are finished. The search ends when no live beam can still
    become better than the worst of the n. Of equal scores the first found is the better: the shorter text, the better
    beam, the lower id.
    """
    scorer = model if isinstance(model, Scorer) else Scorer(model)
    vocab = min(vocab or scorer.vocab, scorer.vocab)
    scorer.check([item.prompt for item in searches], vocab)
    texts = [_Text(item, beam, scorer.context) for item in searches]
    if texts:
        with evaluating(*scorer.models), torch.inference_mode():
            ends = stop_ids if end is None else stop_ids | {end}
            _Beams(scorer, texts, beam, ends, vocab, banned).run()
    return [text.finished for text in texts]


class _Node(NamedTuple):
    """A token of a live beam, and all before it."""

    before: _Node | None
    id: int


def _ids(node: _Node | None) -> list[int]:
    """The tokens up to this one."""
    ids: list[int] = []
    while node is not None:
        ids.append(node.id)
        node = node.before
    return ids[::-1]


class _Candidate(NamedTuple):
    """A live beam with one more token."""

    logprob: float
    beam: int
    id: int


class _Text:
    """What one search has come to."""

    __slots__ = ("beam", "done", "finished", "limit", "live", "prompt", "reason")

    def __init__(self, item: Search, beam: Beam, context: int) -> None:
        self.beam = beam
        self.prompt = item.prompt
        room = context - len(item.prompt.ids)
        self.limit = min(item.tokens, room)
        self.reason: Literal["length", "context"] = "length" if item.tokens <= room else "context"
        self.live: list[_Node | None] = [None]
        self.finished: list[Found] = []  # the n best, best first
        self.done = False

    def grow(
        self, ranked: Sequence[_Candidate], length: int, ends: frozenset[int], coverage: Sequence[float]
    ) -> list[_Candidate]:
        """Take the candidates of one step, best first; the ones that live on."""
        live: list[_Candidate] = []
        ended: set[int] = set()  # beams: of several ids that end one text the likeliest counts
        for rank, candidate in enumerate(ranked):
            node = self.live[candidate.beam]
            if candidate.id not in ends:
                live.append(candidate)
            elif rank < self.beam.beams and candidate.beam not in ended:
                ended.add(candidate.beam)
                self._finish(node, candidate.logprob, length, coverage[candidate.beam], "end")
        live = live[: self.beam.beams]
        nodes = [_Node(self.live[candidate.beam], candidate.id) for candidate in live]
        if length == self.limit:
            for node, candidate in zip(nodes, live, strict=True):
                self._finish(node, candidate.logprob, length, coverage[candidate.beam], self.reason)
        self.live = [*nodes]
        self.done = length == self.limit or not live or self._settled(live[0].logprob)
        return live

    def _finish(
        self,
        node: _Node | None,
        logprob: float,
        length: int,
        coverage: float,
        reason: Literal["end", "length", "context"],
    ) -> None:
        score = logprob / self.beam.penalty(length) + coverage
        self.finished.append(Found(_ids(node), logprob, score, reason))
        # stable: of equals the earlier one stays first
        self.finished.sort(key=lambda found: (found.reason != "end", -found.score))
        del self.finished[self.beam.n :]

    def _settled(self, best: float) -> bool:
        """Whether no live beam can win: more tokens only lower log p, and at best all of it is divided by the most."""
        return len(self.finished) == self.beam.n and best / self.beam.penalty(self.limit) <= self.finished[-1].score


class _Beams:
    """The live beams of all texts, one row of a batch each; texts that are done leave when that pays."""

    def __init__(
        self, scorer: Scorer, texts: list[_Text], beam: Beam, ends: frozenset[int], vocab: int, banned: Collection[int]
    ) -> None:
        self.scorer = scorer
        self.texts = texts
        self.beam = beam
        self.ends = ends
        self.vocab = vocab
        self.banned = banned

    def run(self) -> None:
        """Search until every text is done."""
        room = max(text.limit for text in self.texts) - 1  # the last token is never read
        with Coverage(self.scorer, self.beam.coverage) as coverage:
            reading, scores_RV = self.scorer.open([text.prompt for text in self.texts], room)
            live_BK = torch.zeros(len(self.texts), 1, device=self.scorer.device)
            length = 0
            while True:
                length += 1
                coverage.look(reading)
                chosen = self._grow(scores_RV, live_BK, length, coverage.penalties(len(scores_RV)))
                if all(text.done for text in self.texts):
                    return
                last_R1, live_BK = self._arrange(chosen, live_BK.shape[1], reading, coverage)
                if reading.length < self.scorer.context:
                    scores_RV = reading.next(last_R1)
                else:  # padding in front of short prompts has filled it up: read them again with less
                    reading, scores_RV = self.scorer.open(self._rows(), room)

    def _grow(
        self, scores_RV: Tensor, live_BK: Tensor, length: int, coverage: Sequence[float]
    ) -> list[list[_Candidate]]:
        """One more token for every text; its beams that live on."""
        beams = live_BK.shape[1]
        covered = [coverage[first : first + beams] for first in range(0, len(coverage), beams)]
        return [
            [] if text.done else text.grow(candidates, length, self.ends, penalties)
            for text, candidates, penalties in zip(
                self.texts, self._candidates(scores_RV, live_BK), covered, strict=True
            )
        ]

    def _candidates(self, scores_RV: Tensor, live_BK: Tensor) -> list[list[_Candidate]]:
        """The best 2 K continuations of every text: K of them live on even if all the others are END.

        With several ids that end a text there are K more for each.
        """
        count = (1 + max(1, len(self.ends))) * self.beam.beams
        values_RC, ids_RC = _top(allowed(scores_RV, self.vocab, self.banned), count)
        logprob_RC = live_BK.flatten()[:, None] + values_RC - scores_RV.logsumexp(-1, keepdim=True)
        each = values_RC.shape[1]
        best = logprob_RC.reshape(len(self.texts), -1).sort(dim=-1, descending=True, stable=True)
        order_BC = best.indices[:, :count]
        ids_BC = ids_RC.reshape(len(self.texts), -1).gather(1, order_BC)
        found = zip(best.values[:, :count].tolist(), (order_BC // each).tolist(), ids_BC.tolist(), strict=True)
        return [
            [_Candidate(*item) for item in zip(*lists, strict=True) if item[0] > -math.inf]  # dead beams are there too
            for lists in found
        ]

    def _rows(self) -> list[Prompt]:
        """Everything that the model has to read in each row; a dead one begins anew."""
        return [
            replace(text.prompt, ids=(*text.prompt.ids, *_ids(node)))
            for text in self.texts
            for node in [*([] if text.done else text.live), *[None] * self.beam.beams][: self.beam.beams]
        ]

    def _arrange(
        self, chosen: list[list[_Candidate]], beams: int, reading: Reading, coverage: Coverage
    ) -> tuple[Tensor, Tensor]:
        """Put every live beam in its row; the tokens to read next [R, 1] and the log-probabilities [B, K]."""
        leaving = sum(text.done for text in self.texts) * 4 >= len(self.texts)
        rows: list[int] = []
        last: list[int] = []
        live: list[float] = []
        for index, (text, candidates) in enumerate(zip(self.texts, chosen, strict=True)):
            if text.done and leaving:
                continue
            for beam in range(self.beam.beams):
                dead = _Candidate(-math.inf, min(beam, beams - 1), 0)
                candidate = candidates[beam] if beam < len(candidates) else dead
                rows.append(index * beams + candidate.beam)
                last.append(candidate.id)
                live.append(candidate.logprob)
        device = self.scorer.device
        rows_R = torch.tensor(rows, device=device)
        if beams == self.beam.beams and len(rows) == len(self.texts) * beams:
            reading.exchange(rows)
        else:
            reading.keep(rows_R)
        coverage.keep(rows_R)
        if leaving:
            self.texts = [text for text in self.texts if not text.done]
        live_BK = torch.tensor(live, device=device).view(len(self.texts), self.beam.beams)
        return torch.tensor(last, device=device)[:, None], live_BK


def _top(scores_RV: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The highest `count` scores of each row and their ids, equal ones by id: topk promises no order among them."""
    most = min(count + 1, scores_RV.shape[1])
    found = scores_RV.topk(most, dim=-1)
    require_finite(found.values[:, 0])
    by_id = found.indices.sort(dim=-1)
    best = found.values.gather(1, by_id.indices).sort(dim=-1, descending=True, stable=True)
    values_RC, ids_RC = best.values[:, :count], by_id.values.gather(1, best.indices)[:, :count]
    if most > count:
        # the first that is left out is as good as the last that is in
        tied = (found.values[:, -1] == found.values[:, -2]).nonzero()[:, 0]
        if len(tied):
            whole = scores_RV[tied].sort(dim=-1, descending=True, stable=True)
            values_RC[tied], ids_RC[tied] = whole.values[:, :count], whole.indices[:, :count]
    return values_RC, ids_RC
