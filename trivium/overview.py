"""What a run, a checkpoint or a saved model says of itself, from its files alone and without torch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trivium import config as settings
from trivium import records
from trivium.checkpoints.card import card
from trivium.checkpoints.manifest import manifest
from trivium.checkpoints.model_files import has_model, require_there
from trivium.errors import CheckpointError, ConfigError, with_file_errors
from trivium.files import as_path, is_held
from trivium.models.config import ModelConfig
from trivium.training import metrics
from trivium.training.recipes import is_run


@with_file_errors
def show(folder: str | Path, *, parts: Sequence[type[Any]] = ()) -> dict[str, Any]:
    """What a run or a saved model says of itself, as plain values."""
    path = as_path(folder)
    require_there(path)
    if (home := records.run_of(path)) is not None:
        return _checkpoint(path, home, parts)
    if not (is_run(path) or has_model(path)):
        raise CheckpointError(f"{path} holds neither a model nor a run; `trivium runs` lists what is here")
    rows = metrics.rows(path / records.METRICS)
    steps = [row["step"] for row in records.of_kind(rows, "train")]
    facts = card(path) if has_model(path) else {}
    table = facts.get("config") or settings.read_of(path).get("model", {})
    config = _config(path, table, parts)
    tests = records.of_kind(rows, "test")
    state = "running" if is_held(path) else "finished" if facts else "unfinished"
    wrong = records.fault(path, finished=bool(facts)) if is_run(path) else ""
    return {
        "path": str(path),
        **({"state": "broken", "reason": wrong} if wrong else {"state": state}),
        "preset": records.words(records.about(path).get("preset")),
        "family": config.family,
        "parameters": config.parameters(),
        "step": steps[-1] if steps else 0,
        "total": _total(path),
        "best": records.best(rows),
        "test": tests[-1] if tests else None,
        "results": records.results_of(path),
        "notes": facts.get("notes", {}),
    }


def _checkpoint(path: Path, home: Path, parts: Sequence[type[Any]]) -> dict[str, Any]:
    """What one checkpoint of a run is, and how good it was."""
    step = manifest(path).step
    config = _config(path, settings.read_of(home).get("model", {}), parts)
    scored = [row for row in records.of_kind(metrics.rows(home / records.METRICS), "valid") if row["step"] == step]
    return {
        "path": str(path),
        "state": "checkpoint",
        "preset": records.words(records.about(home).get("preset")),
        "family": config.family,
        "parameters": config.parameters(),
        "step": step,
        "total": _total(home),
        "best": scored[-1] if scored else None,
        "test": None,
        "results": records.results_of(path),
        "notes": {"run": str(home), "step": step},
    }


def _total(run: Path) -> int | None:
    try:
        return records.total(settings.read_of(run))
    except (ConfigError, records.Broken):
        return None  # a saved model, or a run whose settings are gone


def _config(path: Path, table: Any, parts: Sequence[type[Any]]) -> ModelConfig:
    try:
        return settings.load(ModelConfig, table, parts=parts)
    except ConfigError as error:
        raise CheckpointError(f"{path} cannot be shown: {error.sentence}") from None
