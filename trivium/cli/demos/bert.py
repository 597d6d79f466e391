"""The BERT of the demo: which word is missing, in sentences that it never saw."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import typer

from trivium import api
from trivium.cli.demos.assets import digests, text_of
from trivium.cli.demos.look import look
from trivium.evaluation import words
from trivium.evaluation.gaps import gap
from trivium.evaluation.tasks import Outcome
from trivium.evaluation.words import Question

NAME = "shakespeare-words"
TRAIN, TEST = "shakespeare-train.txt.gz", "shakespeare-test.txt.gz"
SEED, SENTENCES, SHOWN = 0, 1000, 8
_WORD = re.compile(r"[^\W_]+")


def show(model: api.Model, folder: Path) -> None:
    """Hide a word in each of many sentences of the test tenth, print how many were guessed and the first examples."""
    told = look(model, folder, NAME, lambda: _measured(model))
    scores = told["scores"]
    typer.echo(
        f"\nOne word hidden in each of {scores['sentences']:,} sentences of the last tenth of the text, drawn by seed "
        f"{SEED}, none of them in the text it learned from: {scores['top1']:.1%} guessed\n"
        f"(always the most frequent word: {scores['unigram']:.1%}); beyond the {words.FREQUENT} most frequent words "
        f"{scores['top1_beyond_100']:.1%} ({scores['unigram_beyond_100']:.1%})."
    )
    typer.echo(f"\nThe first {SHOWN}, right or wrong:")
    for example in told["examples"][:SHOWN]:
        mark = "\u2713" if example["right"] else "\u2717"
        typer.echo(f"\n  {example['before']}[MASK]{example['after']}")
        typer.echo(f"  {mark} said: {example['said']}   was: {example['word']}")


def unseen(asked: Sequence[Question], train: str) -> list[Question]:
    """The questions whose sentence stands nowhere in a text, whatever its case, punctuation and line ends."""
    learned = _spelled(train)
    return [question for question in asked if _spelled(question.text) not in learned]


def _spelled(text: str) -> str:
    return f" {' '.join(_WORD.findall(text.lower()))} "


def _measured(model: api.Model) -> Outcome:
    train, tokenizer = text_of(TRAIN), model.tokenizer
    every = words.questions([text_of(TEST)], words.ranks([train]), count=0, seed=SEED)
    found = words.guess(model.module, tokenizer, unseen(every, train), count=SENTENCES)
    examples: list[dict[str, Any]] = []
    for (text, first, last, _), said in found.examples:
        # as the tokenizer spells it: one in lower case cannot say a capital
        right = said == tokenizer.decode(gap(tokenizer, text, first, last).pieces).strip()
        examples.append(
            {"before": text[:first], "word": text[first:last], "after": text[last:], "said": said, "right": right}
        )
    return Outcome(
        name=NAME,
        split="test",
        metric="top1",
        score=found.every.accuracy,
        scores=found.scores,
        signatures={},
        settings={"seed": SEED, "sentences": SENTENCES},
        data=digests(TRAIN, TEST),
        examples=examples,
    )
