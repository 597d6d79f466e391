"""The GPT of the demo: how well it predicts text that it never saw, and what it writes."""

from __future__ import annotations

import sys
from pathlib import Path

import typer

from trivium import api, report
from trivium.cli.demos.assets import text_of
from trivium.evaluation.likelihood import score_text
from trivium.files import write_atomic
from trivium.training.metrics import Journal, rows

PROMPTS = ("ROMEO:\n", "First Citizen:\n", "To be, or not to be")


def show(model: api.Model, folder: Path) -> None:
    """Score the test tenth, print its bits per byte and three samples."""
    scored = {row.get("step") for row in rows(folder / "metrics.jsonl") if row.get("kind") == "test"}
    if model.notes.get("step") not in scored:
        _score(model, folder)
    test = api.show(folder)["test"]
    typer.echo(f"\nOn the last tenth of the text, which it never saw: {test['bits_per_byte']:.3f} bits per byte.")
    for index, prompt in enumerate(PROMPTS):
        typer.echo("\n" + "-" * 60)
        typer.echo(prompt, nl=False)
        for piece in model.stream(prompt, tokens=80, temperature=0.8, top_p=0.95, seed=index, slide=True):
            typer.echo(piece, nl=False)
            sys.stdout.flush()
        typer.echo()


def _score(model: api.Model, folder: Path) -> None:
    """The test tenth, looked at once: every token scored once, with at least half a context before it."""
    text = text_of("shakespeare-test.txt.gz")
    score = score_text(model.module, model.tokenizer, text, stride=model.config.context // 2)
    row = {
        "kind": "test",
        "step": model.notes.get("step", 0),
        "loss": score.nll / score.tokens,
        "bits_per_byte": score.bits_per_byte,
        "stride": score.stride,
    }
    journal = Journal(folder / "metrics.jsonl")
    journal.write([row])
    journal.close()
    write_atomic(folder / "report.html", report.page(folder).encode())
