"""The encoder-decoder of the demo: short English sentences that it never saw, in German."""

from __future__ import annotations

from pathlib import Path
from random import Random

import typer

from trivium import api
from trivium.cli.demos.assets import digests, text_of
from trivium.cli.demos.look import look
from trivium.evaluation.tasks import Outcome
from trivium.evaluation.translation import translate_and_score
from trivium.generation.beam import Beam

NAME = "tatoeba-short-en-de"
TEST = "tatoeba-test.tsv.gz"
SEED, SHOWN, BEAM = 0, 8, Beam(beams=4, alpha=0.6)
CREDIT = "Sentences from tatoeba.org by way of www.manythings.org/anki, CC BY 2.0."


def show(model: api.Model, folder: Path) -> None:
    """Translate the held-out sentences, print their scores and some of them, drawn by seed."""
    told = look(model, folder, NAME, lambda: _measured(model))
    scores = told["scores"]
    typer.echo(
        f"\n{scores['sentences']:,} English sentences, none of them among those it learned from, in German: "
        f"BLEU {scores['bleu']:.1f}, chrF {scores['chrf']:.1f};\n{scores['exact']:,} are word for word as a reference."
    )
    for name in ("bleu", "chrf"):
        typer.echo(f"  {told['signatures'][name]}")
    typer.echo(f"\nThe first {SHOWN} of an order drawn by seed {SEED}, good or bad:")
    for example in told["examples"][:SHOWN]:
        typer.echo(f"\n  {example['source']}")
        typer.echo(f"  said:      {example['translation']}")
        typer.echo(f"  reference: {' | '.join(example['references'])}")
    typer.echo(f"\n{CREDIT}")


def held_out() -> dict[str, list[str]]:
    """Every held-out English sentence with its German ones, in an order drawn by seed."""
    references: dict[str, list[str]] = {}
    for line in text_of(TEST).splitlines():
        english, german = line.split("\t")
        references.setdefault(english, []).append(german)
    order = list(references)
    Random(SEED).shuffle(order)
    return {english: references[english] for english in order}


def _measured(model: api.Model) -> Outcome:
    asked = held_out()
    found = translate_and_score(model.module, model.tokenizer, list(asked), list(asked.values()), beam=BEAM)
    examples = [
        {"source": english, "translation": said, "references": references}
        for (english, references), said in zip(asked.items(), found.texts, strict=True)
    ]
    exact = sum(said in references for references, said in zip(asked.values(), found.texts, strict=True))
    return Outcome(
        name=NAME,
        split="test",
        metric="bleu",
        score=found.quality["bleu"].score,
        scores={
            **{name: quality.score for name, quality in found.quality.items()},
            "exact": exact,
            "sentences": len(asked),
        },
        signatures={name: quality.signature for name, quality in found.quality.items()},
        settings={"seed": SEED, "beams": BEAM.beams, "alpha": BEAM.alpha},
        data=digests(TEST),
        examples=examples,
    )
