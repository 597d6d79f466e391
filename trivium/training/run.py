"""The one way from a recipe to a trained run: its folder is created or opened again, and its events are yielded."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from trivium import config as settings
from trivium.data import shards as data
from trivium.data.pairs import build
from trivium.errors import RequestError
from trivium.text.tokenizer import open_tokenizer
from trivium.training.context import open_context
from trivium.training.device import settle
from trivium.training.events import Event, Opened
from trivium.training.recipe import Recipe
from trivium.training.recipes import RUNS, is_run, laid_over, read_recipe, resumed_recipe, with_data_below
from trivium.training.scratch import sweep
from trivium.training.session import Session
from trivium.training.setup import create_run
from trivium.training.signals import to_standard_error
from trivium.training.stages import Say, Tick

__all__ = ["Exists", "Session", "open_run", "train_run"]

Exists = Literal["refuse", "resume", "replace"]


def train_run(
    source: Path | Recipe,
    layer: Mapping[str, Any],
    *,
    runs: Path = RUNS,
    data_dir: Path | None = None,
    parts: Sequence[type[Any]] = (),
    exists: Exists = "refuse",
    say: Say,
    tick: Tick,
    alert: Say = to_standard_error,
) -> Generator[Event, None, None]:
    """Open or create a run as `open_run` does and train it; its events, of which `Opened` is the first.

    While a run is created, `say` receives sentences and `tick` how far the text is read. `alert` is called by another
    thread with what cannot wait for the step that is under way. Closing the iterator early leaves a valid run behind.
    """
    session = open_run(source, layer, runs=runs, data_dir=data_dir, parts=parts, exists=exists, say=say, tick=tick)
    session.alert = alert
    yield Opened(session.folder, session.recipe)
    yield from session.events()


def open_run(
    source: Path | Recipe,
    layer: Mapping[str, Any],
    *,
    runs: Path = RUNS,
    data_dir: Path | None = None,
    parts: Sequence[type[Any]] = (),
    exists: Exists = "refuse",
    say: Say,
    tick: Tick,
) -> Session:
    """A session on a new run (from a recipe or its file) or on an old one (from its folder).

    The recipe's relative paths of data are below `data_dir`, or else below the current folder. `exists` says what
    becomes of a run of the same name.
    """
    if isinstance(source, Path) and source.is_dir():
        if exists == "replace":
            raise RequestError(f"exists: {source} is a run; give the recipe of the one that shall replace it")
        recipe = resumed_recipe(source, layer, settle, parts=parts, say=say)
        sweep(source.absolute().parent)
        _check_data(source, recipe, say, tick)
        return Session(open_context(source, recipe))
    recipe = read_recipe(source, layer, parts=parts) if isinstance(source, Path) else laid_over(source, layer, parts)
    recipe = with_data_below(recipe, data_dir)
    folder = runs / recipe.name
    if exists == "resume" and recipe.name and is_run(folder):
        say(f"{folder} exists and goes on")
        return open_run(folder, _changes(folder, recipe, layer, parts), parts=parts, say=say, tick=tick)
    tables = [*([settings.read(source)] if isinstance(source, Path) else []), layer]
    again = exists == "replace" and bool(recipe.name) and is_run(folder)
    context = create_run(recipe, runs, parts=parts, tables=tables, again=again, say=say, tick=tick)
    return Session(context)


def _changes(folder: Path, recipe: Recipe, layer: Mapping[str, Any], parts: Sequence[type[Any]]) -> dict[str, Any]:
    """What was asked for explicitly, is not as a run began, and is not data, which is resolved by then."""
    before = settings.flat(settings.load(Recipe, settings.read_of(folder), parts=parts))
    now = settings.flat(recipe)
    asked = [key for key in before.keys() & now.keys() if _is_set(layer, key) and not key.startswith(("data.", "name"))]
    return settings.overrides({key: now[key] for key in asked if repr(before[key]) != repr(now[key])})


def _is_set(layer: Mapping[str, Any], key: str) -> bool:
    """Whether a layer sets a leaf by its own name."""
    value: Any = layer
    for step in key.split("."):
        if not isinstance(value, Mapping) or step not in value:
            return False
        value = value[step]
    return True


def _check_data(folder: Path, recipe: Recipe, say: Say, tick: Tick) -> None:
    """Refuse ids that are not those the run began with; those of a folder that was made again are built again."""
    built = data.built_shards(recipe.data)
    own = folder / "data"
    if built is None and not own.exists():
        tokenizer = open_tokenizer(folder)
        build(recipe.data, tokenizer, own, progress=lambda at, of: tick("data", at, of), say=say)
    data.open_shards(built or own, verify=True)
