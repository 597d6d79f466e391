"""`trivium demo`: from a text to a trained, scored, writing model, in about a minute and a half."""

from __future__ import annotations

import gzip
import sys
from collections.abc import Sequence
from importlib.resources import as_file, files
from pathlib import Path

import typer

from trivium import api, config, report
from trivium.cli.render import watcher
from trivium.evaluation.likelihood import score_text
from trivium.files import write_atomic
from trivium.training.metrics import Journal, rows
from trivium.training.recipe import Recipe
from trivium.training.run import is_run, open_run

NAME = "demo-gpt"
PROMPTS = ("ROMEO:\n", "First Citizen:\n", "To be, or not to be")


def demonstrate(settings: Sequence[str], runs: Path) -> None:
    """Train (or go on with, or show) the demo run, then score the test tenth and print samples."""
    assets = files("trivium") / "assets"
    folder = runs / NAME
    with as_file(assets / "shakespeare-train.txt.gz") as text, as_file(assets / "demo-gpt.toml") as recipe:
        if is_run(folder) and not settings and (folder / "model.json").is_file():
            typer.echo(f"{folder} is trained already; remove the folder to train it again", err=True)
        else:
            _train(folder, recipe, text, settings, runs)
    model = api.load(folder, device="cpu")
    scored = {row.get("step") for row in rows(folder / "metrics.jsonl") if row.get("kind") == "test"}
    if model.notes.get("step") not in scored:
        _score(model, folder, gzip.decompress((assets / "shakespeare-test.txt.gz").read_bytes()).decode())
    facts = api.show(folder)
    test = facts["test"]
    typer.echo(f"\nOn the last tenth of the text, which it never saw: {test['bits_per_byte']:.3f} bits per byte.")
    for index, prompt in enumerate(PROMPTS):
        typer.echo("\n" + "-" * 60)
        typer.echo(prompt, nl=False)
        for piece in model.stream(prompt, tokens=80, temperature=0.8, top_p=0.95, seed=index, slide=True):
            typer.echo(piece, nl=False)
            sys.stdout.flush()
        typer.echo()
    typer.echo("-" * 60)
    typer.echo(f"{facts['parameters']:,} parameters, {facts['step']:,} steps. Try: trivium generate {folder} 'JULIET:'")
    typer.echo(f"The report: {(folder / 'report.html').resolve()}")


def _train(folder: Path, recipe: Path, text: Path, settings: Sequence[str], runs: Path) -> None:
    with watcher() as watch:
        if is_run(folder):
            session = open_run(folder, config.assignments(settings), say=watch.say, tick=watch.tick)
        else:
            layer = {"name": NAME, "data": {"paths": [str(text)]}}
            chosen = config.load(Recipe, config.read(recipe), layer, config.assignments(settings))
            session = open_run(chosen, {}, runs=runs, say=watch.say, tick=watch.tick)
        for event in session.events():
            watch.event(event)


def _score(model: api.Model, folder: Path, text: str) -> None:
    """The test tenth, looked at once: every token scored once, with at least half a context before it."""
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
