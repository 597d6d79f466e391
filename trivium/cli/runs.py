"""`trivium runs`: a table of what is in a folder of runs, whatever state they are in; torch is not needed for it."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import typer

from trivium import records
from trivium.checkpoints.model_files import home_of
from trivium.cli.printing import Json, cell, print_json, print_table
from trivium.files import is_held
from trivium.records import Broken

_HEAD = ("run", "state", "started", "preset", "parameters", "steps", "score")


def runs(
    folder: Annotated[Path, typer.Argument(help="The folder of runs.")] = Path("runs"), as_json: Json = False
) -> None:
    """List the runs here: state, date, preset, size, steps and best score.

    What killed processes left behind in hidden folders is removed on the way.
    """
    from trivium.training.scratch import sweep

    sweep(folder)
    found = [_described(path) for path in sorted(_candidates(folder))]
    if as_json:
        print_json(found)
        return
    if not found:
        hint = f"`trivium show {folder}` shows this one" if (folder / records.CONFIG).is_file() else ""
        typer.echo(f"No runs in {folder}; {hint or 'start one with `trivium train RECIPE` or `trivium demo`'}.")
        return
    print_table(list(_HEAD), [_cells(row) for row in found])


def _candidates(folder: Path) -> list[Path]:
    """The folders that are runs, or were: one without its config.toml is worth a line too."""
    traces = (records.CONFIG, records.METRICS, "checkpoints")
    try:
        return [
            path
            for path in folder.iterdir()
            if not path.name.startswith(".") and path.is_dir() and any((path / name).exists() for name in traces)
        ]
    except OSError:
        return []


def _described(path: Path) -> dict[str, Any]:
    """A run as plain values; of one with an unusable file its name, and what is wrong."""
    try:
        return _facts(path)
    except Broken as error:
        return {"path": str(path), "state": "broken", "reason": str(error)}
    except OSError as error:
        return {"path": str(path), "state": "broken", "reason": error.strerror or "it cannot be read"}


def _facts(path: Path) -> dict[str, Any]:
    settings, about = records.settings(path), records.require_about(path)
    card = home_of(path, records.CARD) / records.CARD
    told = records.table(card) if card.exists() else {}
    metrics = records.require_rows(path, finished=bool(told))
    steps = records.of_kind(metrics, "train")
    tests = records.of_kind(metrics, "test")
    best = records.best(metrics)
    evaluations = records.results(path / records.RESULTS)
    score = records.score(best, evaluations)
    return {
        "path": str(path),
        "state": "running" if is_held(path) else "finished" if told else "unfinished",
        "started": _started(path, about),
        "preset": records.words(about.get("preset")),
        "family": records.words(about.get("family")) or _family(settings.get("model")),
        "parameters": records.count(about.get("parameters")),
        "step": steps[-1]["step"] if steps else 0,
        "total": records.total(settings),
        "score": None if score is None else {"value": score[0], "unit": score[1]},
        "best": best,
        "test": tests[-1] if tests else None,
        "results": evaluations,
        "notes": told.get("notes", {}),
    }


def _started(path: Path, about: dict[str, Any]) -> str:
    """When a run began; of one that did not write it down, when its folder was made."""
    try:
        return datetime.fromisoformat(about["started"]).astimezone(UTC).isoformat(timespec="seconds")
    except (KeyError, TypeError, ValueError, OverflowError):
        file = next((path / name for name in ("env.json", records.CONFIG) if (path / name).exists()), path)
        return datetime.fromtimestamp(file.stat().st_mtime, UTC).isoformat(timespec="seconds")


def _family(model: object) -> str:
    """Encoder, decoder or both, by what config.toml says of the two stacks."""
    sides = model if isinstance(model, dict) else {}
    tables = {side: sides.get(side, {}) for side in ("encoder", "decoder")}
    there = [side for side, table in tables.items() if isinstance(table, dict) and table.get("kind", "none") != "none"]
    return "-".join(there)


def _cells(row: dict[str, Any]) -> list[str]:
    name = Path(row["path"]).name
    if row["state"] == "broken":
        return [name, f"broken: {row['reason']}", *[""] * (len(_HEAD) - 2)]
    local = datetime.fromisoformat(row["started"]).astimezone()
    score = row["score"]
    return [
        name,
        row["state"],
        f"{local:%Y-%m-%d %H:%M}",
        row["preset"] or row["family"],
        "" if row["parameters"] is None else cell(row["parameters"]),
        cell(row["step"]) + ("" if row["total"] is None else f"/{cell(row['total'])}"),
        "" if score is None else f"{score['value']:.4g} {score['unit']}",
    ]
