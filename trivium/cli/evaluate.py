"""`trivium eval`: a model on a corpus by name, and the file of its results."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from trivium.cli.printing import Json, cell, print_json
from trivium.cli.use import Average, Device, Fit, ModelPath, _progress, fit
from trivium.errors import RequestError, shown

if TYPE_CHECKING:  # what an evaluation needs is imported when one is made
    from trivium.api import Model
    from trivium.evaluation.tasks import Settings

_SHOWN = 5  # examples on the screen; the results file has all


def evaluate(
    model: ModelPath,
    name: Annotated[
        str,
        typer.Argument(
            help="ptb, wikitext-2, shakespeare-char, books, multi30k-en-de, tatoeba-en-de (also other directions), "
            "masked-words, span or cloze."
        ),
    ],
    data_dir: Annotated[
        Path | None, typer.Option(help="The folder of the corpus, or one that holds it under its name.")
    ] = None,
    split: Annotated[str, typer.Option(help="valid or test; test is looked at only when asked by name.")] = "",
    stride: Annotated[int, typer.Option(help="How far windows move over a long text; 0 is the context.")] = 0,
    precision: Annotated[str, typer.Option(help="fp32, or bf16 for the layers on a GPU.")] = "fp32",
    beams: Annotated[int, typer.Option(help="Beginnings kept alive in the search for a translation.")] = 4,
    alpha: Annotated[float, typer.Option(help="Length penalty of that search.")] = 0.6,
    seed: Annotated[int, typer.Option(help="Draws the sentences, words and spans.")] = 0,
    sentences: Annotated[int, typer.Option(help="How many sentences of masked-words.")] = 5000,
    average: Average = 0,
    device: Device = "auto",
    memory: Fit = "check",
    as_json: Json = False,
) -> None:
    """Score a model on a corpus; the result is also written to results/ in the model's folder (of a file: beside it).

    Example: trivium eval runs/ptb ptb --data-dir data --stride 32
    """
    from trivium import api
    from trivium.evaluation import results, tasks

    if precision not in ("fp32", "bf16"):
        raise RequestError(f"--precision: {shown(precision)} is neither fp32 nor bf16")
    settings = tasks.Settings(
        stride=stride,
        precision="bf16" if precision == "bf16" else "fp32",
        beams=beams,
        alpha=alpha,
        seed=seed,
        sentences=sentences,
    )
    tasks.named(name)  # before a large model is loaded
    folder = results.place(model)
    m = api.load(model, device=device, average=average, memory=fit(memory))
    told = _evaluated(m, model, name, data_dir, split, settings)
    if as_json:
        print_json({key: value for key, value in told.items() if key != "examples"})
        return
    _print(told)
    typer.echo(f"written to {folder}/{told['name']}-{told['split']}.json", err=True)


def _evaluated(
    m: Model, model: Path, name: str, data_dir: Path | None, split: str, settings: Settings
) -> dict[str, Any]:
    """The results file of one evaluation, which is written now."""
    from trivium.evaluation import results, tasks

    began = time.monotonic()
    outcome = tasks.evaluate(
        m.module,
        m.tokenizer,
        name,
        folder=data_dir,
        split=split,
        settings=settings,
        tick=_progress("evaluated", time.monotonic),
    )
    return results.record(
        model,
        outcome,
        model=m.module,
        tokenizer=m.tokenizer,
        notes=m.notes,
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        seconds=time.monotonic() - began,
    )


def _print(told: dict[str, Any]) -> None:
    """The scores with their signatures, and the first examples; a second look at a test split is told."""
    typer.echo(f"{told['name']}, {told['split']}")
    for name, value in told["scores"].items():
        shown = "none" if value is None else f"{value:,.4f}" if isinstance(value, float) else cell(value)
        signature = told["signatures"].get(name, "")
        typer.echo(f"  {name.replace('_', ' '):<22} {shown:>14}  {signature}".rstrip())
    for example in told["examples"][:_SHOWN]:
        typer.echo("  " + "; ".join(f"{key}: {_shown(value)}" for key, value in example.items() if key != "scores"))
    if told["split"] == "test" and told["looks"] > 1:
        typer.echo(f"this was look {told['looks']} at the test split; choose settings on valid", err=True)


def _shown(value: Any) -> str:
    if isinstance(value, list):
        return " | ".join(map(str, value))
    return ("yes" if value else "no") if isinstance(value, bool) else str(value)
