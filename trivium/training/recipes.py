"""Recipes from their files, and what may change when a run goes on; none of it needs torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from trivium import config as settings
from trivium.errors import CheckpointError, ConfigError, shown
from trivium.training.recipe import FIXED, Recipe

RUNS = Path("runs")
_DECIDED = ("planned", "knots", "shares", "skipped")  # of a budget, by the clock of a run


def is_run(path: Path) -> bool:
    """Whether a folder holds a run."""
    return (path / "config.toml").is_file()


def read_recipe(source: Path, *layers: Mapping[str, Any], parts: Sequence[type[Any]] = ()) -> Recipe:
    """The recipe in a TOML file with `layers` laid over it, named after the file unless it says otherwise."""
    return _loaded(source, settings.read(source), *layers, parts=parts)


def _loaded(source: Path, table: dict[str, Any], *layers: Mapping[str, Any], parts: Sequence[type[Any]] = ()) -> Recipe:
    recipe = settings.load(Recipe, _replanned(table, *layers), *layers, parts=parts)
    return recipe if recipe.name else replace(recipe, name=source.stem)


def repaired_recipe(
    source: Path, layer: Mapping[str, Any], error: ConfigError
) -> tuple[Recipe | None, list[ConfigError]]:
    """The recipe without the settings that are refused, if there is one, and what else is refused on the way to it.

    So a mistake in one place hides none in another. What may be wrong only because a setting is left out is not told.
    """
    tables, gone, further = [settings.read(source), dict(layer)], set[str](), list[ConfigError]()
    while True:
        keys = {problem.split(":")[0] for problem in error.problems}
        left = [settings.without(table, keys) for table in tables]
        while left == tables and any("." in key for key in keys):  # it may be a preset's: then the table around it
            keys = {key.rpartition(".")[0] or key for key in keys}
            left = [settings.without(table, keys) for table in tables]
        if left == tables:
            return None, further
        tables, gone = left, gone | keys
        try:
            return _loaded(source, *tables), further
        except ConfigError as found:
            error = found
        further += [ConfigError(problem) for problem in error.problems if not is_about(problem, gone)]


def is_about(problem: str, keys: Iterable[str]) -> bool:
    """Whether a problem may come of settings that were left out: they have its key, or are judged by one another."""
    key = problem.split(":")[0]
    near = [*keys, *(_TOGETHER if any(name.split(".")[0] in _TOGETHER for name in keys) else ())]
    return any(f"{key}.".startswith(f"{name}.") or f"{name}.".startswith(f"{key}.") for name in near)


_TOGETHER = ("model", "objective", "tokenizer", "start")


def with_data_below(recipe: Recipe, folder: Path | None) -> Recipe:
    """The recipe with its relative paths of data below a folder, if one is given."""
    if folder is None:
        return recipe
    if not folder.is_dir():
        raise ConfigError(f"--data-dir: {folder} is not a folder; name the one that holds the recipe's data")
    return replace(recipe, data=recipe.data.below(folder))


def resumed_recipe(
    folder: Path,
    layer: Mapping[str, Any],
    settle: Callable[[Recipe], Recipe],
    *,
    parts: Sequence[type[Any]] = (),
    say: Callable[[str], None] = lambda text: None,
) -> Recipe:
    """The recipe of a run that goes on with other settings; harmless changes are said, others refused.

    `settle` decides what depends on the machine.
    """
    if not is_run(folder):
        raise ConfigError(f"{folder} is not a run: it has no config.toml; name a recipe or a run's folder")
    written = _explicit(settings.read_of(folder))
    asked = layer.get("budget", {})
    if isinstance(asked, Mapping) and {"minutes", "tokens"} & set(asked):
        budget = written.get("budget")
        steps = budget.get("steps") if isinstance(budget, dict) else None
        now = f" (now {shown(steps)})" if steps else ""
        raise ConfigError(f"budget: a run that has begun goes on for a number of steps; set budget.steps=N{now}")
    model = layer.get("model", {})
    if isinstance(model, str) or (isinstance(model, Mapping) and "preset" in model):
        raise CheckpointError(
            f"{folder} holds checkpoints for another configuration: its model is not a preset any more"
        )
    # it was settled for a precision that is another one now
    again = {"residual_dtype": "auto"} if "precision" in layer and "residual_dtype" not in layer else {}
    recipe = settle(settings.load(Recipe, {**_replanned(written, layer), **again}, layer, parts=parts))
    before = settings.flat(settings.load(Recipe, written, parts=parts))
    # as they are written: an `every` of 1 is not one of 1.0
    changed = {key: value for key, value in settings.flat(recipe).items() if repr(before.get(key)) != repr(value)}
    unsafe = [key for key in changed if key.startswith(FIXED)]
    if unsafe:
        key = unsafe[0]
        was = f"{key} was {shown(before[key])}, not {shown(changed[key])}" if key in before else f"it had no {key}"
        raise CheckpointError(
            f"{folder} holds checkpoints for another configuration: {was}; start a new run with name=NAME"
        )
    if not (recipe.budget.steps or recipe.budget.planned):
        raise ConfigError("budget.steps: a run goes on for a number of steps; set budget.steps")
    decided = tuple(f"budget.{name}" for name in _DECIDED)
    for key, value in ((key, value) for key, value in changed.items() if key not in decided):
        was = f"changed from {shown(before[key])} to {shown(value)}" if key in before else f"is {shown(value)} now"
        say(f"{key} {was}")
    return recipe


def _replanned(written: dict[str, Any], *layers: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a file; if a layer has another budget, without what was decided for the file's own."""
    own = written.get("budget")
    if not isinstance(own, Mapping) or not any("budget" in layer for layer in layers):
        return written
    return {**written, "budget": {name: value for name, value in own.items() if name not in _DECIDED}}


def laid_over(recipe: Recipe, layer: Mapping[str, Any], parts: Sequence[type[Any]] = ()) -> Recipe:
    """A recipe with a layer over it; another budget begins without what was decided for the old one."""
    if "budget" in layer:
        fresh = replace(recipe.budget, planned=0, knots=(), shares=(), skipped=())
        recipe = replace(recipe, budget=fresh)
    return settings.load(Recipe, layer, parts=parts, start=recipe) if layer else recipe


def _explicit(written: dict[str, Any]) -> dict[str, Any]:
    """The settings of a run, with what one from before there was a `residual_dtype` meant without saying so."""
    if "residual_dtype" in written:
        return written
    tables = {name: written.get(name) for name in ("evaluate", "checkpoint", "sample")}
    often = {
        name: {**table, "every": 1}  # 1.0 was a number of steps too
        for name, table in tables.items()
        if isinstance(table, dict) and table.get("every") == 1
    }
    return {**written, **often, "residual_dtype": "fp32"}
