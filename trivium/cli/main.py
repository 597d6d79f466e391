"""`trivium`: the verbs and their options. Each command imports what it needs, so that `--help` answers at once."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from trivium import __version__
from trivium.cli import evaluate, exchange, generate, runs, use
from trivium.cli.printing import Json, bits, cell, print_json, print_table
from trivium.cli.text import data_app, tokenizer_app
from trivium.errors import ConfigError, FileError, Interrupted, TriviumError, file_error, printable

app = typer.Typer(
    name="trivium",
    help="One workshop for every Transformer: build it, train it, use it.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.add_typer(data_app, name="data")
app.add_typer(tokenizer_app, name="tokenizer")

Settings = Annotated[list[str] | None, typer.Argument(metavar="KEY=VALUE", help="Settings laid over the file.")]
Runs = Annotated[Path, typer.Option("--runs", help="The folder of runs.")]
DataDir = Annotated[
    Path | None, typer.Option(help="Where the recipe's data lies, if not in the current folder.", metavar="FOLDER")
]
RUNS = Path("runs")
_ClickError: Any = typer.BadParameter.__mro__[2]  # ClickException, wherever this version of typer has it
_DEEPEST = 4  # tables inside each other
_WIDEST = 80  # characters of a note


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"trivium {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_version, is_eager=True)
    ] = False,
) -> None:
    """One workshop for every Transformer: build it, train it, use it."""


@app.command()
def demo(
    settings: Settings = None,
    family: Annotated[str, typer.Option(help="gpt, bert, t5, or all one after the other.")] = "gpt",
    runs: Runs = RUNS,
) -> None:
    """Train a small model for about 90 seconds, score it on text it never saw, and show what it does there.

    gpt writes Shakespeare, bert guesses words hidden in him, t5 translates short sentences into German.
    """
    from trivium.cli.demo import demonstrate

    demonstrate(family, settings or [], runs)


@app.command()
def train(
    source: Annotated[Path, typer.Argument(help="A recipe (TOML), or a run's folder to go on with.")],
    settings: Settings = None,
    runs: Runs = RUNS,
    data_dir: DataDir = None,
) -> None:
    """Train a model from a recipe, or go on with a run exactly where it stopped."""
    from trivium import config, records
    from trivium.training.checks import check_source

    layer = config.assignments(settings or [])
    check_source(source, layer, runs=runs, data_dir=data_dir)  # before torch is imported: a refusal comes at once
    from trivium.cli.training import show_training
    from trivium.report import use_of

    folder = show_training(source, layer, runs=runs, data_dir=data_dir)
    try_it = use_of(records.about(folder), folder)
    typer.echo(f"{folder} is done; open {folder / 'report.html'}, or type: {try_it}", err=True)


app.command()(generate.generate)
app.command()(use.fill)
app.command()(use.translate)
app.command()(use.embed)
app.command("eval")(evaluate.evaluate)
app.command("import")(exchange.bring)
app.command()(exchange.export)
app.command()(generate.chat)


@app.command()
def presets(as_json: Json = False) -> None:
    """The named systems, their families and exact parameter counts."""
    from trivium.models.presets import PRESETS

    rows = []
    for name, make in PRESETS.items():
        config = make()
        parts = {part: cost.parameters for part, cost in config.costs().items()}
        rows.append(
            {"name": name, "family": config.family, "layers": config.layers, "width": config.width,
             "context": config.context, "vocab": config.vocab, "parameters": config.parameters(), "parts": parts}
        )  # fmt: skip
    if as_json:
        print_json(rows)
        return
    columns = ["name", "family", "layers", "width", "context", "vocab", "parameters"]
    print_table(columns, [[cell(row[key]) for key in columns] for row in rows])
    typer.echo("A vocabulary of 0 is filled in from the tokenizer; its embedding is not counted yet.")


@app.command()
def config(
    source: Annotated[Path, typer.Argument(help="A recipe.")],
    settings: Settings = None,
    runs: Runs = RUNS,
    data_dir: DataDir = None,
    as_json: Json = False,
) -> None:
    """Check a recipe as `train` would, and print every setting it resolves to."""
    from trivium import config as loader
    from trivium.training.checks import check_recipe, taken

    recipe = check_recipe(source, loader.assignments(settings or []), runs=None, data_dir=data_dir)
    folder = runs / recipe.name
    if folder.exists():  # no fault of the recipe: somebody may want to see what a run was made from
        typer.echo(f"note: {taken(folder)}", err=True)
    if as_json:
        print_json(loader.dump(recipe))
    else:
        typer.echo(loader.write(recipe), nl=False)


app.command()(runs.runs)


def _show_classes(path: Path, as_json: bool) -> None:
    """The modules of a loaded model with their classes."""
    from trivium import api
    from trivium.fast.choose import chosen

    rows = [{"module": name, "class": kind, "why": why} for name, kind, why in chosen(api.load(path).module)]
    if as_json:
        print_json(rows)
        return
    print_table(["module", "class", "why"], [[row["module"], row["class"], row["why"]] for row in rows])


@app.command()
def show(
    model: use.ModelPath,
    as_json: Json = False,
    fast: Annotated[
        bool, typer.Option("--fast", help="Which class each module of the loaded model has, and why.")
    ] = False,
) -> None:
    """What a run or a model is, how far it came and how good it is."""
    from trivium.training.recipes import is_run

    if fast:
        _show_classes(model, as_json)
        return
    facts = _facts(model)
    trained = is_run(model) or facts["state"] == "checkpoint"
    if as_json:
        print_json(facts)
        return
    state = ": ".join([facts["state"], *([facts["reason"]] if "reason" in facts else [])])
    lines = {"run": facts["path"], "state": state} if trained else {"model": facts["path"]}
    lines |= {
        "preset": facts.get("preset", ""),
        "family": facts["family"],
        "parameters": cell(facts["parameters"]),
    }
    if trained:
        report = model / "report.html"
        lines |= {
            "steps": cell(facts["step"]) + (f" of {cell(facts['total'])}" if facts["total"] else ""),
            "best validation" if is_run(model) else "validation": bits(facts["best"]),
            "test": bits(facts["test"]),
            "report": str(report) if report.is_file() else "",
            "go on with": f"trivium train {model}" if facts["state"] == "unfinished" else "",
        }
    else:
        lines |= {name.replace("_", " "): _note(value) for name, value in facts["notes"].items() if name != "valid"}
        lines["validation"] = bits(facts["notes"].get("valid"))
    for found in facts["results"]:
        lines[f"{found['name']} {found['split']}"] = f"{found['metric']} {cell(found['score'])}"
    for name, value in lines.items():
        if value:
            typer.echo(f"{printable(name):<16} {printable(value)}")


def _facts(model: Path) -> dict[str, Any]:
    """What `overview.show` says; a file of another program says it when it is opened, without its weights."""
    from trivium import overview, records
    from trivium.checkpoints.model_files import has_model
    from trivium.training.recipes import is_run

    if is_run(model) or has_model(model) or not (model.is_file() or (model / "config.json").is_file()):
        return overview.show(model)
    from trivium.interop.load import open_foreign

    found = open_foreign(model, say=lambda text: None, tick=lambda what, done, of: None, fill=False)
    config = found.module.config
    facts = {"state": "published", "family": config.family, "parameters": config.parameters()}
    nothing = {"step": 0, "best": None, "test": None}
    return {
        "path": str(model),
        **facts,
        **nothing,
        "results": records.results_of(model),
        "notes": dict(found.notes),
    }


def _note(value: Any, depth: int = 0) -> str:
    """A note in a line: what is long or deep is only begun."""
    if depth > _DEEPEST:
        text = "..."
    elif isinstance(value, Mapping):
        text = "; ".join(f"{name} {_note(item, depth + 1)}" for name, item in value.items())
    elif isinstance(value, list):
        text = ", ".join(_note(item, depth + 1) for item in value)
    else:
        text = " ".join(str(value).split())
    return text if len(text) <= _WIDEST else f"{text[:_WIDEST]}..."


@app.command()
def doctor(runs: Runs = RUNS, as_json: Json = False) -> None:
    """What this machine offers, and where trivium keeps things."""
    from trivium.cli.doctor import facts

    found = facts(runs)
    if as_json:
        print_json(found)
        return
    for name, value in found.items():
        typer.echo(f"{name:<16} {value}")


def main() -> None:
    """Run a command; every error is one sentence on standard error, with the exit code that says whose turn it is."""
    debug = "--debug" in sys.argv[1:]
    sys.argv[1:] = [argument for argument in sys.argv[1:] if argument != "--debug"]
    try:
        code = app(standalone_mode=False)  # else typer prints its own errors, which may be of any length
        sys.exit(code if isinstance(code, int) else 0)
    except _ClickError as error:
        ctx = getattr(error, "ctx", None)
        if ctx is None or error.message != ctx.get_help():  # which is shown where nothing was typed
            error.message = printable(error.message)
        error.show()
        sys.exit(error.exit_code)
    except typer.Abort:
        print("Aborted!", file=sys.stderr)
        sys.exit(1)
    except OSError as error:  # no space, no permission: the file or folder is named, and nothing is half-written
        if debug:
            raise
        print(f"error: {file_error(error, _unnamed(error))}", file=sys.stderr)
        sys.exit(FileError.exit_code)
    except TriviumError as error:
        if debug:
            raise
        word = "" if isinstance(error, Interrupted) else "error: "
        lines = error.problems if isinstance(error, ConfigError) else (str(error),)
        for line in lines:
            print(f"{word}{line}", file=sys.stderr)
        sys.exit(error.exit_code)


def _unnamed(error: OSError) -> str:
    """What an error that names no file is about: commands print, and leave the writing of files to others."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    module = str(frames[-1].f_globals.get("__name__", ""))
    return "standard output" if module.startswith(("typer.", "click.", "trivium.cli.")) else ""
