"""A run in its folder: started from a recipe or gone on with; what changed is told or refused."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from trivium import config as settings
from trivium.data import shards as data
from trivium.data.pairs import build
from trivium.errors import CheckpointError, ConfigError
from trivium.text.tokenizer import open_tokenizer
from trivium.training import prepare
from trivium.training.device import settle
from trivium.training.prepare import Ground, Say, Tick
from trivium.training.recipe import FIXED, Recipe
from trivium.training.scratch import sweep
from trivium.training.session import Session

__all__ = ["RUNS", "Session", "is_run", "open_run", "read_recipe"]

RUNS = Path("runs")


def is_run(path: Path) -> bool:
    """Whether a folder holds a run."""
    return (path / "config.toml").is_file()


def read_recipe(source: Path, *layers: Mapping[str, Any], parts: Sequence[type[Any]] = ()) -> Recipe:
    """The recipe in a TOML file with `layers` laid over it, named after the file unless it says otherwise."""
    recipe = settings.load(Recipe, _replanned(settings.read(source), *layers), *layers, parts=parts)
    return recipe if recipe.name else replace(recipe, name=source.stem)


def with_data_below(recipe: Recipe, folder: Path | None) -> Recipe:
    """The recipe with its relative paths of data below a folder, if one is given."""
    if folder is None:
        return recipe
    if not folder.is_dir():
        raise ConfigError(f"--data-dir: {folder} is not a folder; name the one that holds the recipe's data")
    return replace(recipe, data=recipe.data.below(folder))


def open_run(
    source: Path | Recipe,
    layer: Mapping[str, Any],
    *,
    runs: Path = RUNS,
    data_dir: Path | None = None,
    parts: Sequence[type[Any]] = (),
    say: Say,
    tick: Tick,
) -> Session:
    """A session on a new run (from a recipe or its file) or on an old one (from its folder).

    The recipe's relative paths of data are below `data_dir`, or else below the current folder.
    """
    if isinstance(source, Path) and source.is_dir():
        if not is_run(source):
            raise ConfigError(f"{source} is not a run: it has no config.toml; name a recipe or a run's folder")
        sweep(source.absolute().parent)
        return Session(_resumed(source, layer, parts, say, tick), say)
    recipe = read_recipe(source, layer, parts=parts) if isinstance(source, Path) else source
    if not isinstance(source, Path) and layer:
        recipe = settings.load(Recipe, layer, parts=parts, start=recipe)
    recipe = with_data_below(recipe, data_dir)
    tables = [*([settings.read(source)] if isinstance(source, Path) else []), layer]
    return Session(prepare.lay(recipe, runs, parts=parts, tables=tables, say=say, tick=tick), say)


def _resumed(folder: Path, layer: Mapping[str, Any], parts: Sequence[type[Any]], say: Say, tick: Tick) -> Ground:
    """The ground of a stopped run; harmless changes are told, others refused."""
    written = _explicit(settings.read(folder / "config.toml"))
    asked = layer.get("budget", {})
    if isinstance(asked, Mapping) and {"minutes", "tokens"} & set(asked):
        steps = written.get("budget", {}).get("steps")
        now = f" (now {steps})" if steps else ""
        raise ConfigError(f"budget: a run that has begun goes on for a number of steps; set budget.steps=N{now}")
    model = layer.get("model", {})
    if isinstance(model, str) or "preset" in model:
        raise CheckpointError(
            f"{folder} holds checkpoints for another configuration: its model is not a preset any more"
        )
    # it was settled for a precision that is another one now
    again = {"stream": "auto"} if "precision" in layer and "stream" not in layer else {}
    recipe = settle(settings.load(Recipe, {**_replanned(written, layer), **again}, layer, parts=parts))
    before = settings.flat(settings.load(Recipe, written, parts=parts))
    # as they are written: an `every` of 1 is not one of 1.0
    changed = {key: value for key, value in settings.flat(recipe).items() if repr(before.get(key)) != repr(value)}
    unsafe = [key for key in changed if key.startswith(FIXED)]
    if unsafe:
        key = unsafe[0]
        was = f"{key} was {before[key]!r}, not {changed[key]!r}" if key in before else f"it had no {key}"
        raise CheckpointError(
            f"{folder} holds checkpoints for another configuration: {was}; start a new run with name=NAME"
        )
    if not (recipe.budget.steps or recipe.budget.planned):
        raise ConfigError("budget.steps: a run goes on for a number of steps; set budget.steps")
    decided = ("budget.planned", "budget.knots", "budget.shares")
    for key, value in ((key, value) for key, value in changed.items() if key not in decided):
        say(f"{key} changed from {before[key]!r} to {value!r}" if key in before else f"{key} is {value!r} now")
    _check_data(folder, recipe, say, tick)
    return prepare.reopen(folder, recipe)


def _replanned(written: dict[str, Any], *layers: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a file; if a layer has another budget, without what was decided for the file's own."""
    own = written.get("budget")
    if not isinstance(own, Mapping) or not any("budget" in layer for layer in layers):
        return written
    decided = ("planned", "knots", "shares")
    return {**written, "budget": {name: value for name, value in own.items() if name not in decided}}


def _explicit(written: dict[str, Any]) -> dict[str, Any]:
    """The settings of a run, with what one from before there was a `stream` meant without saying so."""
    if "stream" in written:
        return written
    often = {
        name: {**written[name], "every": 1}  # 1.0 was a number of steps too
        for name in ("evaluate", "checkpoint", "sample")
        if written.get(name, {}).get("every") == 1
    }
    return {**written, **often, "stream": "fp32"}


def _check_data(folder: Path, recipe: Recipe, say: Say, tick: Tick) -> None:
    """Refuse ids that are not those the run began with; those of a folder that was made again are built again."""
    built = data.built_shards(recipe.data)
    own = folder / "data"
    if built is None and not own.exists():
        tokenizer = open_tokenizer(folder / "tokenizer.json")
        build(recipe.data, tokenizer, own, progress=lambda at, of: tick("data", at, of), say=say)
    data.open_shards(built or own, verify=True)
