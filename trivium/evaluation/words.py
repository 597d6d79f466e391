"""One whole word masked in each of many sentences: how often an encoder says exactly that word.

A word is a run of letters, apostrophes inside it included; words are ranked by how often they occur in the training
text, in lower case. A sentence ends at . ! or ? with the quotes and brackets behind it, before white space, or where
a paragraph ends (a blank line); line ends inside it are spaces. Every sentence of at least five words that fits the
context and has a word of the asked ranks can be drawn; the word is drawn among its occurrences in the sentence, all
equally likely. Each of its pieces becomes one [MASK], all are predicted at once, and the word is right if the
likeliest piece is the right one at every mask: so the model knows how many pieces it has, and nothing else.
"""

# B sentences, N masks, V vocabulary

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from trivium.errors import DataError
from trivium.evaluation.gaps import gap, mask_of
from trivium.evaluation.likelihood import Tick
from trivium.generation.states import frame_of, framed, read
from trivium.models.transformer import Transformer
from trivium.text.tokenizer import Tokenizer

RANKS = 2000
FREQUENT = 100  # words of the grammar: what is right beyond them says more
_SHORTEST = 5
_WORD = re.compile(r"[^\W\d_]+(?:['\u2019][^\W\d_]+)*")
_PARAGRAPH = re.compile(r"\n\s*\n")
_END = re.compile(r"[.!?][\"'\u201d\u2019)\]]*\s+")


def ranks(texts: Iterable[str], most: int = RANKS) -> dict[str, int]:
    """The `most` most frequent words of some texts and their ranks from 1 on; of equals the first by spelling."""
    counts: Counter[str] = Counter()
    for text in texts:
        counts.update(word.lower() for word in _WORD.findall(text))
    frequent = sorted(counts, key=lambda word: (-counts[word], word))[:most]
    return {word: rank for rank, word in enumerate(frequent, start=1)}


def sentences(text: str) -> Iterator[str]:
    """The sentences of a text, each on one line."""
    for paragraph in _PARAGRAPH.split(text):
        line = " ".join(paragraph.split())
        start = 0
        for end in _END.finditer(line):
            yield line[start : end.end()].rstrip()
            start = end.end()
        if start < len(line):
            yield line[start:]


class Question(NamedTuple):
    """A sentence, and the word in it that is to be masked."""

    text: str
    first: int
    last: int
    rank: int


def questions(texts: Iterable[str], ranked: Mapping[str, int], *, count: int, seed: int) -> list[Question]:
    """`count` different sentences (0 or too many: all), in an order drawn by the seed, with a word of each."""
    rng = np.random.default_rng(seed)
    able: list[Question] = []
    for sentence in dict.fromkeys(sentence for text in texts for sentence in sentences(text)):
        words = list(_WORD.finditer(sentence))
        known = [word for word in words if word[0].lower() in ranked]
        if len(words) >= _SHORTEST and known:
            word = known[int(rng.integers(len(known)))]
            able.append(Question(sentence, *word.span(), ranked[word[0].lower()]))
    return [able[at] for at in rng.permutation(len(able))[: count or None]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Said:
    """How often the word was right, of how many; `unigram` is always answering with the most frequent word."""

    right: int
    asked: int
    unigram: int  # how often that would be right

    @property
    def accuracy(self) -> float:
        return self.right / self.asked if self.asked else float("nan")

    @property
    def baseline(self) -> float:
        return self.unigram / self.asked if self.asked else float("nan")


class Guessed(NamedTuple):
    """All words, those beyond the most frequent, and what was asked with the text that was said for it."""

    every: Said
    rarer: Said
    examples: list[tuple[Question, str]]

    @property
    def scores(self) -> dict[str, float]:
        """The numbers as results and reports name them."""
        return {
            "top1": self.every.accuracy,
            "top1_beyond_100": self.rarer.accuracy,
            "unigram": self.every.baseline,
            "unigram_beyond_100": self.rarer.baseline,
            "sentences": self.every.asked,
            "sentences_beyond_100": self.rarer.asked,
        }


def guess(
    model: Transformer,
    tokenizer: Tokenizer,
    asked: Sequence[Question],
    *,
    count: int = 0,
    batch: int = 64,
    tick: Tick = lambda done, of: None,
) -> Guessed:
    """Mask the word of each question and compare what an encoder says; the first `count` that fit (0: all)."""
    mask, frame = mask_of(model, tokenizer), frame_of(model, tokenizer)
    room = model.config.context - len(frame.before) - len(frame.after)
    found = ((question, gap(tokenizer, question.text, question.first, question.last)) for question in asked)
    able = ((question, each) for question, each in found if each.places and len(each.ids) <= room)
    fit = list(itertools.islice(able, count or None))
    if not fit:
        raise DataError(f"no sentence with a frequent word fits the context of {model.config.context}; give more text")
    rows = framed(model, frame, [each.masked(mask) for _, each in fit])
    specials = torch.tensor(sorted(tokenizer.specials.values()), device=model.device)
    said: dict[int, list[int]] = {}
    for part in read(model, rows, batch=batch):
        places = [(row, at) for row, number in enumerate(part.texts) for at in fit[number][1].places]
        row_N, at_N = torch.tensor(places, device=model.device).T
        with torch.inference_mode():
            logits_NV = model.head.logits(part.hidden[row_N, at_N + len(frame.before)])[:, : tokenizer.size]
            best = logits_NV.index_fill(1, specials, -torch.inf).argmax(-1).tolist()
        for (row, _), id in zip(places, best, strict=True):
            said.setdefault(part.texts[row], []).append(id)
        tick(len(said), len(rows))
    outcomes = [(question, each.pieces == said[number]) for number, (question, each) in enumerate(fit)]
    return Guessed(
        _said(outcomes, 1),
        _said([(question, right) for question, right in outcomes if question.rank > FREQUENT], FREQUENT + 1),
        [(question, tokenizer.decode(said[number]).strip()) for number, (question, _) in enumerate(fit)],
    )


def _said(outcomes: Sequence[tuple[Question, bool]], first: int) -> Said:
    """What was right, and what the word of rank `first`, the most frequent of these, would have been."""
    return Said(
        right=sum(right for _, right in outcomes),
        asked=len(outcomes),
        unigram=sum(question.rank == first for question, _ in outcomes),
    )
