"""`trivium demo`: from a text to a trained, scored, working model of each family, in about a minute and a half."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from importlib.resources import as_file
from pathlib import Path
from typing import Any, NamedTuple

import typer

from trivium import api, config
from trivium.checkpoints.model_files import has_model
from trivium.cli.demos import bert, gpt, t5
from trivium.cli.demos.assets import ASSETS
from trivium.cli.training import show_training
from trivium.errors import ConfigError, RequestError, shown
from trivium.training.recipe import Recipe
from trivium.training.recipes import is_run


class Demo(NamedTuple):
    """What a family learns from and under which key, how its trained model is shown, and what to type next."""

    key: str
    asset: str
    show: Callable[[api.Model, Path], None]
    then: str


DEMOS = {
    "gpt": Demo("paths", "shakespeare-train.txt.gz", gpt.show, "trivium generate {} 'JULIET:'"),
    "bert": Demo("paths", "shakespeare-train.txt.gz", bert.show, "trivium fill {} 'Good [MASK], my lord.'"),
    "t5": Demo("pairs", "tatoeba-train.tsv.gz", t5.show, "trivium translate {} 'Where is my book?'"),
}
ALL = "all"


def demonstrate(family: str, settings: Sequence[str], runs: Path) -> None:
    """Train (or go on with, or show) the demo of a family, or of all of them, one after the other."""
    if family not in (*DEMOS, ALL):
        raise RequestError(f"--family: there is no demo {shown(family)}; name {', '.join(DEMOS)} or {ALL}")
    asked = list(DEMOS) if family == ALL else [family]
    layer = config.assignments(settings)
    with ExitStack() as stack:
        assets = {name: stack.enter_context(as_file(ASSETS / demo.asset)) for name, demo in DEMOS.items()}
        recipes = {
            name: _recipe(name, assets[name], layer) for name in asked if not is_run(_folder(runs, name))
        }  # all of them before the first begins: a wrong setting is told at once
        for name in asked:
            if len(asked) > 1:
                typer.echo(f"\n=== {name} ===", err=True)
            _one(name, recipes.get(name), layer, runs)


def _one(name: str, recipe: Recipe | None, layer: dict[str, Any], runs: Path) -> None:
    folder = _folder(runs, name)
    if recipe is None and not layer and has_model(folder):
        typer.echo(f"{folder} is trained already; `trivium demo --runs FOLDER` trains another one", err=True)
    else:
        source, over = (folder, layer) if recipe is None else (recipe, {})  # a new recipe has its settings already
        show_training(source, over, runs=runs)
    DEMOS[name].show(api.load(folder, device="cpu"), folder)
    facts = api.show(folder)
    typer.echo("-" * 60)
    typer.echo(f"{facts['parameters']:,} parameters, {facts['step']:,} steps. Try: {DEMOS[name].then.format(folder)}")
    typer.echo(f"The report: {(folder / 'report.html').resolve()}")


def _folder(runs: Path, name: str) -> Path:
    return runs / f"demo-{name}"


def _recipe(name: str, asset: Path, layer: dict[str, Any]) -> Recipe:
    """The recipe of a demo with settings laid over it; its name and text stay, since it is shown on the rest of it."""
    own = {"name": f"demo-{name}", "data": {DEMOS[name].key: str(asset)}}
    with as_file(ASSETS / f"demo-{name}.toml") as path:
        recipe = config.load(Recipe, config.read(path), own, layer)
    kept, given = (config.flat(each) for each in (config.load(Recipe, own), recipe))
    for key in ("name", "data.paths", "data.pairs", "data.source"):
        if given[key] != kept[key]:
            raise ConfigError(f"{key}: the demo has its own; to train on other text: trivium train RECIPE")
    return recipe
