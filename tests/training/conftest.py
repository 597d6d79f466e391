"""A run small enough to be repeated twenty times in a test."""

from __future__ import annotations

import gzip
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from trivium.config import load, overrides
from trivium.training.calibrate import fit_micro_batch
from trivium.training.context import RunContext
from trivium.training.events import Event
from trivium.training.recipe import Recipe
from trivium.training.run import Session, open_run
from trivium.training.setup import FitMicroBatch, create_run

ASSETS = Path(__file__).resolve().parents[2] / "trivium" / "assets"

SMALL: dict[str, Any] = {
    "name": "small",
    "device": "cpu",
    "threads": 1,
    "precision": "fp32",
    "log": 5,
    "model.width": 16,
    "model.context": 16,
    "model.decoder.layers": 2,
    "model.decoder.block.attention.heads": 2,
    "model.decoder.block.dropout": 0.1,
    "model.decoder.block.attention.dropout": 0.1,
    "tokenizer.kind": "bytes",
    "data.valid": 0.1,
    "batch.rows": 6,
    "batch.micro": 2,
    "budget.steps": 20,
    "evaluate.every": 5.0,
    "evaluate.rows": 4,
    "checkpoint.every": 5.0,
    "sample.every": 10.0,
    "sample.tokens": 5,
}

FAMILIES: dict[str, dict[str, Any]] = {
    "decoder": {},
    "encoder": {"objective": "masked", "model.encoder.kind": "plain", "model.decoder": "none"},
    "encoder-decoder": {
        "objective": "denoise",
        "model.encoder.kind": "plain",
        "model.decoder.block.cross.kind": "multi-head",
        "model.decoder.block.cross.heads": 2,
        "model.decoder.block.cross.dropout": 0.1,
    },
}


def family(name: str) -> dict[str, Any]:
    """The small settings for a model of another family: the same sides, with what teaches them."""
    values = SMALL if name == "decoder" else SMALL | {"model.context": 32}
    side = {key: value for key, value in values.items() if key.startswith("model.decoder.")}
    rest = {key: value for key, value in values.items() if key not in side}
    if name != "encoder":
        rest |= side
    if name != "decoder":
        rest |= {key.replace("decoder", "encoder", 1): value for key, value in side.items()}
    return rest | FAMILIES[name]


@pytest.fixture(scope="session")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The first 6 kB of Shakespeare: an epoch is a few dozen steps."""
    path = tmp_path_factory.mktemp("text") / "play.txt"
    path.write_bytes(gzip.decompress((ASSETS / "shakespeare-train.txt.gz").read_bytes())[:6000])
    return path


@pytest.fixture
def small(text: Path) -> Callable[..., Recipe]:
    """The small recipe with some settings changed: `small("encoder", seed=1, **{"batch.rows": 4})`."""

    def make(kind: str = "decoder", **changes: Any) -> Recipe:
        values = {**family(kind), "data.paths": [str(text)], **changes}
        return load(Recipe, overrides(values))

    return make


def silent(*_: object) -> None:
    """A watcher that does not watch."""


def create(recipe: Recipe, runs: Path, fit: FitMicroBatch = fit_micro_batch) -> RunContext:
    """The context of a new run of the recipe, for tests that drive its steps themselves."""
    return create_run(recipe, runs, say=silent, tick=silent, fit=fit)


def start(recipe: Recipe, runs: Path) -> Session:
    return open_run(recipe, {}, runs=runs, say=silent, tick=silent)


def resume(folder: Path, **changes: Any) -> Session:
    return open_run(folder, overrides(changes), say=silent, tick=silent)


def finish(session: Session) -> list[Event]:
    return list(session.events())
