"""A saved model, a finished run and an unfinished one, made once, for tests that spoil their files."""

from __future__ import annotations

import gzip
from pathlib import Path

from tests.generation import tiny
from tests.training.conftest import ASSETS, SMALL, finish, start
from trivium.checkpoints.model_files import withdraw
from trivium.config import load, overrides
from trivium.handle import Model
from trivium.training.recipe import Recipe


def saved_model(folder: Path) -> Path:
    """What `m.save` writes."""
    notes = {
        "run": "small",
        "labels": ["one", "two"],
        "ids": {"eos": [256]},
        "sentences": {"pooling": "mean", "normalize": True},
        "chat_template": "{% for m in messages %}{{'<|im_start|>' + m['role'] + m['content']}}{% endfor %}",
    }
    return Model(tiny.model("gpt-mini", tiny.BYTES), tiny.BYTES, notes).save(folder)


def recipe(folder: Path) -> Recipe:
    text = folder / "text.txt"
    folder.mkdir(parents=True, exist_ok=True)
    text.write_bytes(gzip.decompress((ASSETS / "shakespeare-test.txt.gz").read_bytes())[:20_000])
    few = {"budget.steps": 4, "log": 1, "checkpoint.every": 2.0, "evaluate.every": 2.0, "sample.every": 2.0}
    return load(Recipe, overrides({**SMALL, **few, "model.decoder.layers": 1, "data.paths": [str(text)]}))


def run(folder: Path, *, finished: bool) -> Path:
    """The folder of a small run of four steps."""
    session = start(recipe(folder), folder / "runs")
    finish(session)
    if not finished:
        withdraw(session.folder)
    return session.folder
