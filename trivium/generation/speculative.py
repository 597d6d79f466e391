"""Speculative decoding: cheap guesses of several tokens, which the model reads at once and accepts or corrects.

Greedy texts are those of plain decoding; drawn ones have its distribution (Leviathan 2023), though a seed gives
another text. It pays where a model reads several tokens in hardly more time than one: one row at a time.
"""

# V vocabulary, one row throughout

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Generator, Sequence
from typing import Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from trivium.errors import RequestError, shown
from trivium.fast.graphs import is_current_gpu
from trivium.generation.engine import Request, Stream, Token, logprobs_of
from trivium.generation.rows import Row
from trivium.generation.sampling import Sampling, distribution, draw, penalise
from trivium.generation.scorer import Scorer, allowed, evaluating, require_finite
from trivium.generation.slots import direct
from trivium.generation.supports import require_roll_back, supports_slots
from trivium.generation.verify import SlotReader
from trivium.models.transformer import Transformer

MOST = 16  # guesses at once
_WORDS = (3, 2)  # tokens that must agree with an earlier place, the longest agreement first

Speculate = Literal["lookup"] | Transformer  # earlier places of the text, or a smaller model of the same tokenizer


class Guess(NamedTuple):
    """Tokens that may come next, and the distribution that each was drawn from; None where it was not drawn."""

    ids: list[int]
    drawn_from: list[Tensor] | None = None


class Guesser(Protocol):
    """Whoever guesses what one row goes on with."""

    def guess(self, ids: Sequence[int], count: int, choose: Choose) -> Guess:
        """At most `count` tokens after `ids`."""

    def close(self) -> None:
        """The row is done."""


class Choose(NamedTuple):
    """How a row chooses: its settings, what it may write, and its random numbers."""

    sampling: Sampling
    vocab: int
    banned: Collection[int]
    uniform: Callable[[], float]

    def scores(self, logits_1V: Tensor, seen_1V: Tensor | None) -> Tensor:
        """The scores of what may be written, those of seen tokens lowered."""
        scores_1V = allowed(logits_1V, self.vocab, self.banned)
        if not self.sampling.penalises:
            return scores_1V
        assert seen_1V is not None
        return penalise(scores_1V, seen_1V, self.sampling.repetition_penalty)

    def probabilities(self, logits_1V: Tensor, seen_1V: Tensor | None) -> Tensor:
        """What the next token is drawn from, [V]."""
        return distribution(allowed(logits_1V, self.vocab, self.banned), seen_1V, self.sampling)[0]

    def seen(self, ids: Sequence[int], device: torch.device) -> Tensor | None:
        """Which ids the text has, if that matters."""
        if not self.sampling.penalises:
            return None
        seen_1V = torch.zeros(1, self.vocab, dtype=torch.bool, device=device)
        seen_1V[0, torch.tensor(ids, device=device)] = True
        return seen_1V


class Reader:
    """One model that reads one row and can forget its end again."""

    def __init__(self, model: Transformer, source: Sequence[int], longest: int) -> None:
        self._model = model
        self._cache = model.cache(1, min(longest, model.config.context))
        self._source = tuple(source)

    @property
    def length(self) -> int:
        """Tokens that were read."""
        return self._cache.length

    @property
    def device(self) -> torch.device:
        return self._model.device

    def read(self, ids: Sequence[int], count: int) -> Tensor:
        """The scores [count, V] after each of the last `count` tokens; what was read before must be the same still."""
        inputs: dict[str, Tensor] = {}
        if self._source and self._cache.memory is None:
            inputs["source"] = torch.tensor([self._source], device=self.device)
        new_1T = torch.tensor([ids[self.length :]], device=self.device)
        states = self._model(new_1T, cache=self._cache, **inputs)
        return self._model.head.logits(states.hidden[0, -count:]).float()

    def forget(self, length: int) -> None:
        """Go back to so many tokens."""
        self._cache.roll_back(length)

    def close(self) -> None:
        """There is nothing that others could use."""


def reader_of(model: Transformer, source: Sequence[int], longest: int) -> Reader | SlotReader:
    """Whoever reads a row fastest: on the GPU in use captured graphs: one token costs as many launches as many."""
    if is_current_gpu(model.device) and supports_slots(model) and direct(model):
        return SlotReader(model, source, longest, MOST + 1)
    return Reader(model, source, longest)


class Lookup:
    """What followed the last two or three tokens the last time they came, in the source or in the text itself."""

    def __init__(self, source: Sequence[int]) -> None:
        self._text = list(source)
        self._before = len(source)
        self._after: dict[tuple[int, ...], int] = {}  # where the text goes on behind the last place of some tokens
        self._known = 0

    def guess(self, ids: Sequence[int], count: int, choose: Choose) -> Guess:
        text = self._text
        text += ids[len(text) - self._before :]
        for end in range(self._known, len(text)):
            for words in _WORDS:
                if end >= words:
                    self._after[tuple(text[end - words : end])] = end
        self._known = len(text)
        for words in _WORDS:
            place = self._after.get(tuple(text[-words:]))
            if place is not None and len(ids) >= words:
                return Guess(text[place : place + count])
        return Guess([])

    def close(self) -> None:
        """There is nothing to give back."""


class Draft:
    """A smaller model of the same tokenizer that writes ahead."""

    def __init__(self, model: Transformer, source: Sequence[int], longest: int) -> None:
        self._reader = reader_of(model, source, longest)
        self._context = model.config.context
        self._read: list[int] = []

    def guess(self, ids: Sequence[int], count: int, choose: Choose) -> Guess:
        same = next((at for at, (a, b) in enumerate(zip(self._read, ids, strict=False)) if a != b), len(self._read))
        self._reader.forget(min(same, len(ids) - 1))
        text, drawn_from = list(ids), []
        seen_1V = choose.seen(ids, self._reader.device)
        for _ in range(min(count, self._context - len(ids))):
            logits_1V = self._reader.read(text, 1)
            if choose.sampling.greedy:
                text.append(int(choose.scores(logits_1V, seen_1V).argmax()))
            else:
                drawn_from.append(choose.probabilities(logits_1V, seen_1V))
                text.append(_drawn(drawn_from[-1], choose.uniform))
            if seen_1V is not None:
                seen_1V[0, text[-1]] = True
        self._read = text[: self._reader.length]
        return Guess(text[len(ids) :], None if choose.sampling.greedy else drawn_from)

    def close(self) -> None:
        self._reader.close()


def settle(
    probabilities_V: Tensor, guessed: int, drawn_from_V: Tensor | None, uniform: Callable[[], float]
) -> tuple[int, bool]:
    """The token that is written, and whether it is the guess.

    A guess is accepted with probability min(1, p / q), else the token is drawn from what p has more than q: together
    that is a draw from p, whatever q is. A guess that was not drawn has q = 1.
    """
    p = float(probabilities_V[guessed])
    q = 1.0 if drawn_from_V is None else float(drawn_from_V[guessed])
    if uniform() * q < p:
        return guessed, True
    rest_V = probabilities_V.clone()
    if drawn_from_V is None:
        rest_V[guessed] = 0.0
    else:
        rest_V = (rest_V - drawn_from_V).clamp(min=0.0)
    if not float(rest_V.sum()) > 0:  # p and q are the same up to rounding
        rest_V = probabilities_V
    return _drawn(rest_V, uniform), False


def _drawn(weights_V: Tensor, uniform: Callable[[], float]) -> int:
    return int(draw(weights_V[None], torch.tensor([uniform()], dtype=torch.float64)))


def speculative(
    model: Transformer | Scorer,
    requests: Sequence[Request],
    speculate: Speculate,
    *,
    end: int | None,
    vocab: int = 0,
    banned: Collection[int] = (),
) -> Stream:
    """As `stream`, one row after another, each with guesses by `speculate`."""
    scorer = model if isinstance(model, Scorer) else Scorer(model)
    if len(scorer.models) > 1:
        raise RequestError("speculate: several models that vote are not decoded so; leave it out")
    if isinstance(speculate, Transformer):
        small, large = speculate.config, scorer.models[0].config
        if small.family != large.family or speculate.device != scorer.device:
            raise RequestError(
                f"speculate: the draft is a {small.family} on {speculate.device}, the model a {large.family} on "
                f"{scorer.device}; they must be alike"
            )
        if small.vocab != large.vocab:
            raise RequestError(
                f"speculate: the draft has {small.vocab} ids and the model {large.vocab}; both need one tokenizer"
            )
    elif not (isinstance(speculate, str) and speculate == "lookup"):
        raise RequestError(f'speculate: {shown(speculate)} is neither "lookup" nor a model')
    vocab = min(vocab or scorer.vocab, scorer.vocab)
    scorer.check([request.prompt for request in requests], vocab)
    require_roll_back(*scorer.models, *([speculate] if isinstance(speculate, Transformer) else []))
    longest = max((len(request.source) for request in requests), default=0)
    if isinstance(speculate, Transformer) and longest > speculate.config.context:
        raise RequestError(
            f"speculate: a source has {longest} tokens, the draft reads at most {speculate.config.context}; shorten it "
            "or take another draft"
        )
    rows = [Row(index, request) for index, request in enumerate(requests)]

    def tokens() -> Generator[Token, None, None]:
        models = [scorer.models[0], *([speculate] if isinstance(speculate, Transformer) else [])]
        with evaluating(*models):
            for row in rows:
                choose = Choose(row.request.sampling, vocab, banned, row.uniforms.next)
                yield from _decode(scorer.models[0], row, speculate, choose, end)

    def stop(row: int) -> None:
        rows[row].done = True

    return Stream(tokens(), stop)


def _decode(
    model: Transformer, row: Row, speculate: Speculate, choose: Choose, end: int | None
) -> Generator[Token, None, None]:
    request, context = row.request, model.config.context
    longest = len(row.ids) + request.tokens + MOST
    reader = reader_of(model, request.source, longest)
    guesser: Guesser
    guesser = Lookup(request.source) if speculate == "lookup" else Draft(speculate, request.source, longest)
    ahead = 4
    try:
        while not row.done:
            with torch.no_grad():  # not inference_mode: a slot's tensors are used outside of it too
                count = min(ahead, row.left - 1, context - len(row.ids) - 1)
                guess = guesser.guess(row.ids, count, choose)
                logits_kV = reader.read([*row.ids, *guess.ids], len(guess.ids) + 1)
                written = _settled(logits_kV, row.ids, guess, choose)
                told = _told(logits_kV, written, request)
            accepted = len(written) - 1
            # few were right: guess less; all were: guess more
            ahead = min(MOST, 2 * ahead) if accepted == len(guess.ids) > 0 else max(1, min(ahead, accepted + 1))
            for id, (logprob, others) in zip(written, told, strict=True):
                if row.done:
                    return
                reason = row.add(id, end, context)
                yield Token(row.index, id, logprob, others, reason)
            reader.forget(len(row.ids) - 1)
    finally:
        reader.close()
        guesser.close()


def _settled(logits_kV: Tensor, ids: Sequence[int], guess: Guess, choose: Choose) -> list[int]:
    """The guesses that are right, and one more token: the correction of the next one, or what follows them all."""
    allowed_kV = allowed(logits_kV, choose.vocab, choose.banned)
    best = allowed_kV.max(-1)
    require_finite(best.values)
    if choose.sampling.greedy and not choose.sampling.penalises:  # all at once: on a GPU each look at a number waits
        likeliest: list[int] = best.indices.tolist()
        right = [a == b for a, b in zip(likeliest, guess.ids, strict=False)]
        return likeliest[: [*right, False].index(False) + 1]
    written: list[int] = []
    seen_1V = choose.seen(ids, logits_kV.device)
    for at, logits_V in enumerate(logits_kV):
        guessed = guess.ids[at] if at < len(guess.ids) else None
        if choose.sampling.greedy:
            id = int(choose.scores(logits_V[None], seen_1V).argmax())
            same = id == guessed
        else:
            probabilities_V = choose.probabilities(logits_V[None], seen_1V)
            if guessed is None:
                id, same = _drawn(probabilities_V, choose.uniform), False
            else:
                drawn_from = None if guess.drawn_from is None else guess.drawn_from[at]
                id, same = settle(probabilities_V, guessed, drawn_from, choose.uniform)
        written.append(id)
        if not same:
            break
        if seen_1V is not None:
            seen_1V[0, id] = True
    return written


def _told(logits_kV: Tensor, ids: list[int], request: Request) -> list[tuple[float, tuple[tuple[int, float], ...]]]:
    """The log-probability of each token and of the likeliest others, if they are asked for."""
    if not request.logprobs:
        return [(math.nan, ())] * len(ids)
    ids_k = torch.tensor(ids, device=logits_kV.device)
    own, best = logprobs_of(logits_kV[: len(ids)], ids_k, request.logprobs)
    others = [
        tuple(pair for pair in pairs if pair[0] != id)[: request.logprobs] for id, pairs in zip(ids, best, strict=True)
    ]
    return list(zip(own, others, strict=True))
