"""Beam search: of the likeliest beginnings a few are kept alive at every step (spec: inspection §1)."""

# B texts, K beams of each, n wanted, L steps

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from trivium.errors import RequestError, shown
from trivium.fast.graphs import is_current_gpu
from trivium.generation.beams import pools_of, room_for, together
from trivium.generation.checks import TOKENS, require_number, require_whole
from trivium.generation.coverage import Coverage
from trivium.generation.engine import evaluating
from trivium.generation.frontier import Frontier, Rules, frontier, grow, rules
from trivium.generation.lineage import BeamReader, Lineage, RowBeams
from trivium.generation.pool import Wish
from trivium.generation.scorer import Prompt, Scorer, require_finite
from trivium.generation.supports import even_batches, supports_beam_tokens, supports_pool
from trivium.models.transformer import Transformer


@dataclass(frozen=True, kw_only=True, slots=True)
class Beam:
    """How to search; a text is scored by log p / ((5 + length) / 6) ** alpha + coverage (GNMT), an END counted.

    Coverage is `coverage` times the sum, over the source, of the logarithm of how much attention each token has got,
    at most 1: it ranks texts that are done and does not steer the search.
    """

    beams: int = 4
    alpha: float = 0.6  # 0 ranks by probability alone, which prefers short texts
    coverage: float = 0.0
    n: int = 1  # how many of the best are wanted

    def __post_init__(self) -> None:
        require_whole("beams", self.beams, 1, 1000, "1 is greedy, 4 is usual")
        # GNMT takes 0.2, Vaswani 0.6; far above 1 length alone decides, and the penalty would overflow
        require_number("alpha", self.alpha, 0, 10, "0 is no length penalty, try 0.6")
        require_number("coverage", self.coverage, 0, 100, "0 is no penalty, try 0.2")
        require_whole("n", self.n, 1, None, "ask for at least one text")
        if self.n > self.beams:
            raise RequestError(f"n: {shown(self.n)} is not between 1 and the number of beams, {self.beams}")

    def penalty(self, length: int) -> float:
        """What the log-probability of a text of so many tokens is divided by."""
        return math.pow((5 + length) / 6, self.alpha)

    def penalties(self, longest: int) -> list[float]:
        """Those of all lengths from 0 to one beyond the longest: a step looks up a text that is done as any other."""
        return [self.penalty(length) for length in range(longest + 2)]


@dataclass(frozen=True, kw_only=True, slots=True)
class Search:
    """One text to find a continuation or translation for, of at most so many tokens."""

    prompt: Prompt
    tokens: int

    def __post_init__(self) -> None:
        require_whole("tokens", self.tokens, 1, TOKENS, f"ask for 1 to {TOKENS:,} new tokens")


class Found(NamedTuple):
    """A text that is done: its new ids without an END, its log-probability with it, its score and how it ended."""

    ids: list[int]
    logprob: float
    score: float
    reason: Literal["end", "length", "context"]


def results(state: Frontier, searches: Sequence[Search], beam: Beam) -> list[list[Found]]:
    """The n best of texts that are done, best first, from their rows on the host.

    Beams that are cut off at the limit compete with finished ones by the same score; of equals the finished is first.
    """
    used = int(state.steps.max())
    steps_of = zip(state.ids[:, :used].tolist(), state.parents[:, :used].tolist(), strict=True)
    lists = [one.tolist() for one in (state.score, state.logprob, state.length, state.beam)]
    ended_of = (zip(*row, strict=True) for row in zip(*lists, strict=True))
    live_of = zip(state.live.tolist(), state.cover.tolist(), strict=True)
    each: list[list[Found]] = []
    rows = zip(searches, steps_of, ended_of, live_of, state.steps.tolist(), state.limit.tolist(), strict=True)
    for item, steps, ended, live, length, most in rows:
        best = [
            Found(_text(steps, tokens - 1, before), logprob, score, "end")
            for score, logprob, tokens, before in ended
            if score > -math.inf
        ]
        if length == most:
            reason: Literal["length", "context"] = "length" if most == item.tokens else "context"
            best += [
                Found(_text(steps, length, last), logprob, logprob / beam.penalty(length) + cover, reason)
                for last, (logprob, cover) in enumerate(zip(*live, strict=True))
                if logprob > -math.inf
            ]
            best.sort(key=lambda found: -found.score)  # stable: of equals the first found, then the better beam
        each.append(best[: beam.n])
    return each


def _text(steps: tuple[list[list[int]], list[list[int]]], length: int, beam: int) -> list[int]:
    """The ids of the text of so many tokens that ends in this beam, from the ids and parents of every step."""
    ids, parents = steps
    found: list[int] = []
    for at in range(length - 1, -1, -1):
        found.append(ids[at][beam])
        beam = parents[at][beam]
    return found[::-1]


def search(
    model: Transformer | Scorer,
    searches: Sequence[Search],
    beam: Beam,
    *,
    end: int | None,
    stop_ids: frozenset[int] = frozenset(),
    vocab: int = 0,
    banned: Collection[int] = (),
    tick: Callable[[int], None] = lambda done: None,
) -> list[list[Found]]:
    """The `beam.n` best texts for each, best first, found together; each is what it would be alone.

    A text is finished where END (or one of `stop_ids`) is among the best K of its step. Those that are cut off, at
    their number of tokens or the context, compete with the finished ones by the same score. The search ends when no
    live beam can still become better than the worst of the n. Of equal scores the first found is the better: the
    shorter text, the better beam, the lower id. `tick` hears of how many more texts are done.
    """
    scorer = model if isinstance(model, Scorer) else Scorer(model)
    vocab = min(vocab or scorer.vocab, scorer.vocab)
    scorer.check([item.prompt for item in searches], vocab)
    banned = {id for id in banned if id < vocab}
    if len(banned) == vocab:
        raise RequestError(f"banned: all {vocab} ids that could be written are banned; leave at least one")
    if not searches:
        return []
    ends = stop_ids if end is None else stop_ids | {end}
    with evaluating(*scorer.models), torch.inference_mode():
        if poolable(scorer, searches, beam):
            return _pooled(scorer, searches, beam, ends, vocab, banned, tick)
        if scorer.device.type != "cuda":
            pools_of(scorer).clear()  # a model that has left its GPU leaves nothing there
        limits = [limit(item, scorer.context) for item in searches]
        given = rules(beam.beams, vocab, banned, ends, beam.penalties(max(limits)), scorer.device)
        if supports_beam_tokens(*scorer.models):
            return _Beams(scorer, searches, limits, beam, given, tick, Lineage).run()
        found: dict[int, list[Found]] = {}
        lengths = [(len(item.prompt.ids), len(item.prompt.source)) for item in searches]
        for numbers in even_batches(scorer.models, lengths, padding=False):
            some = [searches[number] for number in numbers]
            beams = _Beams(scorer, some, [limits[number] for number in numbers], beam, given, tick, RowBeams)
            found |= zip(numbers, beams.run(), strict=True)
        return [found[number] for number in range(len(searches))]


def poolable(scorer: Scorer, searches: Sequence[Search], beam: Beam) -> bool:
    """Whether texts can be searched in rows that they join and leave: on the GPU in use, if each begins with one id."""
    plain = scorer.family == "encoder-decoder" and not beam.coverage and supports_pool(*scorer.models)
    return plain and is_current_gpu(scorer.device) and all(len(item.prompt.ids) == 1 for item in searches)


def _pooled(
    scorer: Scorer,
    searches: Sequence[Search],
    beam: Beam,
    ends: frozenset[int],
    vocab: int,
    banned: Collection[int],
    tick: Callable[[int], None],
) -> list[list[Found]]:
    wishes = [Wish(item.prompt.source, item.prompt.ids[0], limit(item, scorer.context)) for item in searches]
    room = room_for(scorer, wishes, beam.beams, beam.n)
    penalties = beam.penalties(room.steps)
    given = rules(beam.beams, vocab, banned, ends, penalties, scorer.device)
    same = (beam.beams, beam.alpha, vocab, tuple(sorted(banned)), tuple(sorted(ends)))
    found: dict[int, list[Found]] = {}
    with pools_of(scorer).lent(scorer, given, same, room) as pool:
        for texts, state in together(pool, wishes):
            found |= zip(texts, results(state, [searches[text] for text in texts], beam), strict=True)
            tick(len(texts))
    return [found[text] for text in range(len(searches))]


def limit(item: Search, context: int) -> int:
    """How many tokens a text may have."""
    return min(item.tokens, context - len(item.prompt.ids))


class _Beams:
    """The search of all texts, a row of a batch each; texts that are done leave when that pays."""

    def __init__(
        self,
        scorer: Scorer,
        searches: Sequence[Search],
        limits: Sequence[int],
        beam: Beam,
        rules: Rules,
        tick: Callable[[int], None],
        reader: Callable[[Scorer, Sequence[Prompt], int, int], BeamReader],
    ) -> None:
        self.scorer = scorer
        self.searches = searches
        self.longest = max(limits)
        self.beam = beam
        self.rules = rules
        self.tick = tick
        self.reader = reader
        self.texts = list(range(len(searches)))  # which one each row is
        self.state = frontier(limits, self.longest, rules, beam.n)
        self.found: dict[int, list[Found]] = {}
        # a look at what is done waits for the device, and on the CPU that costs nothing
        self.every = 1 if scorer.device.type == "cpu" else 8

    def run(self) -> list[list[Found]]:
        """Search until every text is done."""
        prompts = [item.prompt for item in self.searches]
        with Coverage(self.scorer, self.beam.coverage) as coverage:
            reading = self.reader(self.scorer, prompts, self.beam.beams, self.longest - 1)  # the last is never read
            for length in range(1, self.longest + 1):
                coverage.look(reading)
                self.state, ids_BK, parents_BK = grow(self.state, self.rules, reading.scores_BJV, coverage.penalties())
                coverage.follow(parents_BK)
                if length % self.every == 0 or length == self.longest:
                    left_B = self._leave()
                    if not self.texts:
                        break
                    if left_B is not None:
                        reading.keep(left_B)
                        coverage.keep(left_B)
                        ids_BK, parents_BK = ids_BK[left_B], parents_BK[left_B]
                reading.next(ids_BK, parents_BK)
        return [self.found[text] for text in range(len(self.searches))]

    def _leave(self) -> Tensor | None:
        """Let the texts that are done go if at least a quarter is; the rows that stay, None if all do."""
        require_finite(self.state.sound)
        done = self.state.done.tolist()
        if sum(done) * 4 < len(done):
            return None
        gone = [row for row, is_done in enumerate(done) if is_done]
        stay = [row for row, is_done in enumerate(done) if not is_done]
        for row, found in zip(gone, self._collect(gone), strict=True):
            self.found[self.texts[row]] = found
        self.texts = [self.texts[row] for row in stay]
        self.tick(len(gone))
        stay_B = torch.tensor(stay, dtype=torch.long, device=self.scorer.device)
        self.state = Frontier(*(one[stay_B] for one in self.state))
        return stay_B

    def _collect(self, rows: Sequence[int]) -> list[list[Found]]:
        """What the search has come to in these rows."""
        rows_B = torch.tensor(rows, device=self.scorer.device)
        state = Frontier(*(one[rows_B].cpu() for one in self.state))
        asked = [self.searches[self.texts[row]] for row in rows]
        return results(state, asked, self.beam)
