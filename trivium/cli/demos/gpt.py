"""The GPT of the demo: how well it predicts text that it never saw, and how it goes on with speeches from there."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import NamedTuple

import numpy as np
import typer

from trivium import api, report
from trivium.cli.demos.assets import text_of
from trivium.cli.demos.bert import TEST, TRAIN
from trivium.evaluation.likelihood import score_text
from trivium.files import write_atomic
from trivium.training.metrics import JsonLines, rows

PROMPT = "ROMEO:\n"
SEED, SPEECHES, LINES = 0, 3, 2
_LONGEST = 300  # characters of a speech that are shown


class Speech(NamedTuple):
    """A speech of the test tenth: its speaker with the first lines, and how it goes on."""

    beginning: str
    rest: str


def show(model: api.Model, folder: Path) -> None:
    """Score the test tenth, print its bits per byte, speeches of it that the model goes on with, and a sample."""
    scored = {row.get("step") for row in rows(folder / "metrics.jsonl") if row.get("kind") == "test"}
    if model.notes.get("step") not in scored:
        _score(model, folder)
    test = api.show(folder)["test"]
    typer.echo(f"\nOn the last tenth of the text, which it never saw: {test['bits_per_byte']:.3f} bits per byte.")
    typer.echo(f"{SPEECHES} speeches from there, drawn by seed {SEED}; the model goes on after {LINES} lines:")
    for number, speech in enumerate(speeches(text_of(TEST), text_of(TRAIN))):
        typer.echo("-" * 60)
        typer.echo(speech.beginning, nl=False)
        _write(model, speech.beginning, seed=number, stop=["\n\n"])
        typer.echo(f"(Shakespeare: {speech.rest})")
    typer.echo("-" * 60)
    typer.echo(PROMPT, nl=False)
    _write(model, PROMPT, seed=SPEECHES, stop=[])


def speeches(test: str, train: str) -> list[Speech]:
    """Speeches of a text, drawn by seed, of which no line stands in another text."""
    learned = set(train.splitlines())
    able = []
    for block in test.split("\n\n"):
        lines = block.strip().splitlines()
        if len(lines) > LINES + 1 and lines[0].endswith(":") and learned.isdisjoint(lines[1:]):
            rest = "\n".join(lines[LINES + 1 :])
            able.append(Speech("\n".join(lines[: LINES + 1]) + "\n", rest[:_LONGEST]))
    chosen = np.random.default_rng(SEED).permutation(len(able))[:SPEECHES]
    return [able[number] for number in chosen]


def _write(model: api.Model, prompt: str, *, seed: int, stop: list[str]) -> None:
    for piece in model.stream(prompt, tokens=80, temperature=0.8, top_p=0.95, seed=seed, stop=stop, slide=True):
        typer.echo(piece, nl=False)
        sys.stdout.flush()
    typer.echo()


def _score(model: api.Model, folder: Path) -> None:
    """The test tenth, looked at once: every token scored once, with at least half a context before it."""
    text = text_of(TEST)
    score = score_text(model.module, model.tokenizer, text, stride=model.config.context // 2)
    row = {
        "kind": "test",
        "step": model.notes.get("step", 0),
        "loss": score.nll / score.tokens,
        "bits_per_byte": score.bits_per_byte,
        "stride": score.stride,
    }
    journal = JsonLines(folder / "metrics.jsonl")
    journal.write([row])
    journal.close()
    write_atomic(folder / "report.html", report.page(folder).encode())
