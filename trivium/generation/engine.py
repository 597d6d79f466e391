"""The one decoding loop: a batch of prompts in, one token per live row and step out."""

# B rows, V vocabulary

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Generator, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from trivium.generation.continuous import Engine, slotted
from trivium.generation.rows import Reason, Request, Row, Token
from trivium.generation.sampling import Sampling, distribution, draw, penalise
from trivium.generation.scorer import Prompt, Reading, Scorer, allowed, evaluating, require_finite
from trivium.generation.sizes import bucket
from trivium.generation.supports import even_batches
from trivium.models.transformer import Transformer

__all__ = ["Reason", "Request", "Stream", "Token", "continuous", "evaluating", "logprobs_of", "stream"]


class Stream(Iterator[Token]):
    """The tokens of a batch as they come; rows can be stopped, and closing it early leaves nothing behind."""

    def __init__(self, tokens: Generator[Token, None, None], stop: Callable[[int], None]) -> None:
        self._tokens = tokens
        self._stop = stop

    def __next__(self) -> Token:
        return next(self._tokens)

    def stop(self, row: int) -> None:
        """No more tokens for this row."""
        self._stop(row)

    def close(self) -> None:
        """Stop all rows and free the cache."""
        self._tokens.close()


def stream(
    model: Transformer | Scorer,
    requests: Sequence[Request],
    *,
    end: int | None,
    slide: bool = False,
    vocab: int = 0,
    banned: Collection[int] = (),
    rows: int = 256,
) -> Stream:
    """Decode all requests together; each row ends at `end`, at its number of tokens or at the model's context.

    With `slide` a row whose context is full goes on from its last context // 2 tokens. `vocab` > 0 forbids ids from
    there on: a model may have more rows in its output than its tokenizer has ids. `banned` ids are never written. On a
    GPU at most `rows` run at a time; others join as rows end. If a mixer ignores masks, requests of equal length are
    decoded together, one such batch after another.
    """
    scorer = model if isinstance(model, Scorer) else Scorer(model)
    vocab = min(vocab or scorer.vocab, scorer.vocab)
    scorer.check([request.prompt for request in requests], vocab, slide=slide)
    if continuous(scorer, requests, slide=slide):
        engine = Engine(
            scorer,
            end=end,
            slots=min(bucket(len(requests)), rows),
            longest=max(len(request.ids) + request.tokens for request in requests),
            source=max(len(request.source) for request in requests),
            vocab=vocab,
            banned=banned,
        )
        for request in requests:
            engine.submit(request)
        stopped: set[int] = set()

        def cancel(row: int) -> None:
            stopped.add(row)
            engine.cancel(row)

        return Stream(_run(engine, stopped), cancel)
    live = [Row(index, request) for index, request in enumerate(requests)]
    lengths = [(len(request.ids), len(request.source)) for request in requests]

    def stop(row: int) -> None:
        live[row].done = True

    def tokens() -> Generator[Token, None, None]:
        for numbers in even_batches(scorer.models, lengths):
            yield from _decode(_Batch(scorer, [live[number] for number in numbers], vocab, banned), end, slide)

    return Stream(tokens(), stop)


def continuous(scorer: Scorer, requests: Sequence[Request], *, slide: bool = False) -> bool:
    """Whether the requests go through slots, if the rows fit into the context; on a GPU by captured graphs."""
    if not scorer.in_slots or not requests or not slotted(scorer, requests):
        return False
    return not slide or all(len(request.ids) + request.tokens <= scorer.context for request in requests)


def _run(engine: Engine, stopped: Collection[int] = ()) -> Generator[Token, None, None]:
    try:
        while engine.busy:
            for token in engine.step():
                if token.row not in stopped:  # it may be stopped by a token of the same step
                    yield token
    finally:
        engine.close()


def _decode(batch: _Batch, end: int | None, slide: bool) -> Generator[Token, None, None]:
    with evaluating(*batch.scorer.models):
        limit = 0 if slide else batch.scorer.context
        while True:
            # per step, not around the loop: the mode belongs to the thread, and the caller runs between two tokens
            with torch.inference_mode():
                step = batch.step() if batch.settle() else None
            if step is None:
                return
            for row, id, logprob, alternatives in zip(batch.rows, step.ids, step.logprobs, step.others, strict=True):
                if not row.done:
                    asked = row.request.logprobs
                    reason = row.add(id, end, limit)
                    others = tuple(pair for pair in alternatives if pair[0] != id)[:asked]
                    yield Token(row.index, id, logprob if asked else math.nan, others, reason)


class _Step(NamedTuple):
    """One new token for every row of the batch, finished rows included."""

    ids: list[int]
    logprobs: list[float]
    others: list[list[tuple[int, float]]]


class _Batch:
    """The rows that share a cache, left-padded to one length; rows that are done leave when that pays."""

    def __init__(self, scorer: Scorer, rows: list[Row], vocab: int, banned: Collection[int]) -> None:
        self.scorer = scorer
        self.rows = rows
        self.vocab = vocab
        self.banned = banned
        self.reading: Reading | None = None
        self.last_B: Tensor | None = None  # drawn, but not read by the model yet
        self.seen_BV: Tensor | None = None
        self.groups: list[tuple[Sampling, list[int], Tensor | None]] = []
        self.asked = 0  # the most logprobs that a row wants
        self.plain = False  # every row takes the likeliest token as it is

    def settle(self) -> bool:
        """Before a step: let finished rows go if at least half are; False if no row is left."""
        live = [index for index, row in enumerate(self.rows) if not row.done]
        if self.reading is None:
            self.rows = [self.rows[index] for index in live]
        elif len(live) * 2 <= len(self.rows) and live:
            self._keep(live)
        return bool(live)

    def step(self) -> _Step:
        """The next token of every row."""
        if self.reading is None or self.reading.length == self.scorer.context:
            logits_BV = self._read()
        else:
            assert self.last_B is not None
            logits_BV = self.reading.next(self.last_B[:, None])
        allowed_BV = allowed(logits_BV, self.vocab, self.banned)
        best = allowed_BV.max(-1)
        require_finite(best.values)
        last_B = best.indices if self.plain else self._choose(allowed_BV)
        self.last_B = last_B
        if self.seen_BV is not None:
            self.seen_BV.scatter_(1, last_B[:, None], True)
        ids = last_B.tolist()
        if not self.asked:
            return _Step(ids, [math.nan] * len(ids), [[]] * len(ids))
        return _Step(ids, *logprobs_of(logits_BV, last_B, self.asked))

    def _read(self) -> Tensor:
        """The scores of all live rows, read from the beginning of what they may still see."""
        self.reading = None  # before the new one is made: only one is in memory
        self.rows = [row for row in self.rows if not row.done]
        context = self.scorer.context
        for row in self.rows:
            if len(row.ids) - row.start > context:  # it slides: without that it would be done
                row.start = len(row.ids) - max(1, context // 2)
        self._group()
        if any(row.request.sampling.penalises for row in self.rows):
            device = self.scorer.device
            self.seen_BV = torch.zeros(len(self.rows), self.vocab, dtype=torch.bool, device=device)
            for index, row in enumerate(self.rows):
                self.seen_BV[index, torch.tensor(row.ids, device=device)] = True
        prompts = [Prompt(ids=tuple(row.ids[row.start :]), source=row.request.source) for row in self.rows]
        room = max(row.left for row in self.rows) - 1  # the last token is never read
        self.reading, logits_BV = self.scorer.open(prompts, room)
        return logits_BV

    def _keep(self, live: list[int]) -> None:
        assert self.reading is not None
        assert self.last_B is not None
        index = torch.tensor(live, device=self.scorer.device)
        self.reading.keep(index)
        self.last_B = self.last_B[index]
        self.rows = [self.rows[row] for row in live]
        if self.seen_BV is not None:
            self.seen_BV = self.seen_BV[index]
        self._group()

    def _group(self) -> None:
        """Rows by how they sample, so that each way runs once; the usual single group needs no index."""
        self.asked = max(row.request.logprobs for row in self.rows)
        self.plain = all(row.request.sampling.greedy and not row.request.sampling.penalises for row in self.rows)
        groups: dict[Sampling, list[int]] = {}
        for index, row in enumerate(self.rows):
            groups.setdefault(row.request.sampling, []).append(index)
        device = self.scorer.device
        self.groups = [
            (sampling, rows, torch.tensor(rows, device=device) if len(groups) > 1 else None)
            for sampling, rows in groups.items()
        ]

    def _choose(self, logits_BV: Tensor) -> Tensor:
        if len(self.groups) == 1:
            sampling, rows, _ = self.groups[0]
            return self._choose_alike(logits_BV, self.seen_BV, sampling, rows)
        last_B = torch.empty(len(self.rows), dtype=torch.long, device=logits_BV.device)
        for sampling, rows, index in self.groups:
            seen = self.seen_BV[index] if self.seen_BV is not None else None
            last_B[index] = self._choose_alike(logits_BV[index], seen, sampling, rows)
        return last_B

    def _choose_alike(self, logits_BV: Tensor, seen_BV: Tensor | None, sampling: Sampling, rows: list[int]) -> Tensor:
        if sampling.greedy:  # no softmax over the vocabulary
            if sampling.penalises:
                assert seen_BV is not None
                logits_BV = penalise(logits_BV, seen_BV, sampling.repetition_penalty)
            return logits_BV.argmax(-1)
        uniform_B = torch.tensor([self.rows[row].uniforms.next() for row in rows], dtype=torch.float64)
        probabilities_BV = distribution(logits_BV, seen_BV, sampling)
        return draw(probabilities_BV, uniform_B)


def logprobs_of(logits_BV: Tensor, ids_B: Tensor, count: int) -> tuple[list[float], list[list[tuple[int, float]]]]:
    """The log-probability of each chosen id, and the `count` + 1 best ids: the chosen one may be among them."""
    all_BV = logits_BV.log_softmax(-1)
    best = all_BV.topk(min(count + 1, all_BV.shape[-1]), dim=-1)
    others = [
        list(zip(ids, values, strict=True))
        for ids, values in zip(best.indices.tolist(), best.values.tolist(), strict=True)
    ]
    return all_BV.gather(-1, ids_B[:, None])[:, 0].tolist(), others
