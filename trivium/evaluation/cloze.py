"""The cloze probes of the CS224N slides: does a model prefer the answer to what could stand there (spec §2)?"""

# N pieces behind masks, D width, V vocabulary

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from trivium.errors import RequestError
from trivium.evaluation.gaps import gap, mask_of
from trivium.evaluation.likelihood import score_many
from trivium.generation.states import frame_of, framed, read
from trivium.models.transformer import Transformer
from trivium.text.tokenizer import Tokenizer

BLANK = "___"


@dataclass(frozen=True, kw_only=True, slots=True)
class Probe:
    """A text with one blank, what belongs there, and what could stand there but does not."""

    kind: str
    text: str
    answers: tuple[str, ...]
    distractors: tuple[str, ...]

    @property
    def candidates(self) -> tuple[str, ...]:
        return self.answers + self.distractors

    def filled(self, candidate: str) -> tuple[str, int, int]:
        """The text with a candidate in the blank, and the first and the last (exclusive) character of it."""
        before, after = self.text.split(BLANK)
        return before + candidate + after, len(before), len(before) + len(candidate)


PROBES = (
    Probe(
        kind="fact",
        text="Stanford University is located in ___, California.",
        answers=("Palo Alto", "Stanford"),
        distractors=("Boston", "London", "New York", "Chicago"),
    ),
    Probe(
        kind="syntax",
        text="I put ___ fork down on the table.",
        answers=("my", "the"),
        distractors=("me", "them", "of", "is"),
    ),
    Probe(
        kind="coreference",
        text="The woman walked across the street, checking for traffic over ___ shoulder.",
        answers=("her",),
        distractors=("his", "its", "my", "their"),
    ),
    Probe(
        kind="lexical field",
        text="I went to the ocean to see the fish, turtles, seals, and ___.",
        answers=("whales", "dolphins", "sharks", "crabs"),
        distractors=("lions", "chairs", "horses", "books"),
    ),
    Probe(
        kind="sentiment",
        text=(
            "Overall, the value I got from the two hours watching it was the sum total of the popcorn and the drink. "
            "The movie was ___."
        ),
        answers=("bad", "terrible"),
        distractors=("good", "great", "wonderful", "excellent"),
    ),
    Probe(
        kind="reasoning",
        text=(
            "Iroh went into the kitchen to make some tea. Standing next to Iroh, Zuko pondered his destiny. "
            "Zuko left the ___."
        ),
        answers=("kitchen",),
        distractors=("garden", "street", "church", "ship"),
    ),
    Probe(
        kind="sequence",
        text="I was thinking about the sequence that goes 1, 1, 2, 3, 5, 8, 13, 21, ___",
        answers=("34",),
        distractors=("22", "29", "35", "42"),
    ),
)


class Tried(NamedTuple):
    """A probe and how a model took it."""

    probe: Probe
    scores: dict[str, float]  # the log-probability of each candidate
    rank: int  # of the best answer among the candidates; 1 is right
    # Of the best answer among all pieces at the mask; 0 where it has several pieces or the model is a decoder.
    place: int

    @property
    def said(self) -> str:
        """The candidate that the model prefers."""
        return max(self.scores, key=self.scores.__getitem__)


def try_probes(model: Transformer, tokenizer: Tokenizer, probes: Sequence[Probe] = PROBES) -> list[Tried]:
    """Every probe: an encoder fills the blank, a decoder scores each candidate and all that follows it."""
    _check(model, tokenizer, probes)
    if model.config.family == "encoder":
        return [_fill(model, tokenizer, probe) for probe in probes]
    if model.config.family == "decoder":
        return [_continue(model, tokenizer, probe) for probe in probes]
    raise RequestError("the probes ask an encoder or a decoder; an encoder-decoder takes neither a gap nor a prefix")


def _check(model: Transformer, tokenizer: Tokenizer, probes: Sequence[Probe]) -> None:
    """Refuse a probe that would have to be cut: what is cut away may be what the answer rests on."""
    room = model.config.context - sum(map(len, frame_of(model, tokenizer)[:2]))
    for probe in probes:
        longest = max(len(tokenizer.encode(probe.filled(candidate)[0])) for candidate in probe.candidates)
        if longest > room:
            raise RequestError(
                f"the {probe.kind} probe has {longest} tokens, the model reads at most {room}; "
                "probe one with a longer context"
            )


def _fill(model: Transformer, tokenizer: Tokenizer, probe: Probe) -> Tried:
    """Sum over the pieces of a candidate: each with those before it filled in and those behind it masked."""
    mask = mask_of(model, tokenizer)
    gaps = {candidate: gap(tokenizer, *probe.filled(candidate)) for candidate in probe.candidates}
    asked = [(candidate, known) for candidate, each in gaps.items() for known in range(len(each.places))]
    frame = frame_of(model, tokenizer)
    rows = framed(model, frame, [gaps[candidate].masked(mask, known) for candidate, known in asked])
    # without a piece of its own it cannot be said
    scores = {candidate: 0.0 if each.places else -math.inf for candidate, each in gaps.items()}
    places = dict.fromkeys(probe.candidates, 0)
    for part in read(model, rows):
        for row, number in enumerate(part.texts):
            candidate, known = asked[number]
            at, id = gaps[candidate].places[known], gaps[candidate].pieces[known]
            with torch.inference_mode():
                logits_V = model.head.logits(part.hidden[row, len(frame.before) + at]).float()[: tokenizer.size]
            scores[candidate] += float(logits_V.log_softmax(-1)[id])
            if len(gaps[candidate].places) == 1:
                places[candidate] = 1 + int((logits_V > logits_V[id]).sum())
    return _tried(probe, scores, places)


def _continue(model: Transformer, tokenizer: Tokenizer, probe: Probe) -> Tried:
    """The log-probability of a candidate and of all that follows it, given what stands before."""
    texts = [probe.filled(candidate) for candidate in probe.candidates]
    found = score_many(model, [tokenizer.encode(text) for text, _, _ in texts], end=tokenizer.begin)
    scores = {}
    for candidate, (text, first, _), nll in zip(probe.candidates, texts, found, strict=True):
        pieces = gap(tokenizer, text, first, len(text)).places
        scores[candidate] = -float(nll[min(pieces) :].double().sum()) if pieces else -math.inf
    return _tried(probe, scores, dict.fromkeys(probe.candidates, 0))


def _tried(probe: Probe, scores: dict[str, float], places: dict[str, int]) -> Tried:
    best = max(probe.answers, key=scores.__getitem__)
    return Tried(probe, scores, 1 + sum(score > scores[best] for score in scores.values()), places[best])
