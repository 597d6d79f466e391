"""What the files of a run say, read with the standard library alone and without trusting them.

A file may be missing, torn by a crash or written by somebody else: the functions here give what they can use of it, or
a `Broken` that says in a few words which file is wrong and how.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from trivium.files import read_inside

ABOUT, CARD, CONFIG, METRICS, SAMPLES = "about.json", "model.json", "config.toml", "metrics.jsonl", "samples.jsonl"
RESULTS, MANIFEST = "results", "manifest.json"
_MOST = 2**63
_HUGE = 1e300  # no number that was measured; a whole number in JSON may be beyond every float
_LARGEST = 1 << 30  # bytes of a file
Row = dict[str, Any]


class Broken(Exception):
    """A file of a run that cannot be used, in a few words."""


def rows(path: Path) -> list[Row]:
    """The rows of a file of JSON lines; what is no row is left out, as a last line torn by a crash."""
    return list(_parsed(_bytes(path).split(b"\n")))  # not splitlines: a text may hold a line separator of its own


def rows_in(content: bytes) -> list[Row]:
    """The rows of JSON lines in memory."""
    return list(_parsed(content.split(b"\n")))


def _parsed(lines: Iterable[bytes]) -> Iterator[Row]:
    for line in lines:
        try:
            row = json.loads(line.decode("utf-8", errors="replace"))
        except (ValueError, RecursionError):
            continue
        if isinstance(row, dict):
            yield row


def table(path: Path) -> Row:
    """The JSON object in a file."""
    try:
        found = json.loads(_bytes(path))
    except (ValueError, RecursionError):
        raise Broken(f"{path.name} is not JSON") from None
    if not isinstance(found, dict):
        raise Broken(f"{path.name} is not a JSON object")
    return found


def settings(run: Path) -> Row:
    """The tables of a run's config.toml."""
    try:
        return tomllib.loads(_bytes(run / CONFIG).decode())
    except (ValueError, RecursionError):
        raise Broken(f"{CONFIG} is not TOML") from None


def about(run: Path) -> Row:
    """What a run wrote down of its model and its data when it began; {} of one that did not."""
    try:
        return table(run / ABOUT)
    except Broken:
        return {}


def results(folder: Path) -> list[Row]:
    """The evaluations in a folder of results files, without their examples; a damaged one is said to be so."""
    found: list[Row] = []
    for path in sorted(folder.glob("*.json")) if folder.is_dir() else []:
        try:
            content = table(path)
            sound = all(isinstance(content.get(key), str) for key in ("name", "metric"))
        except Broken:
            content, sound = {}, False
        if not (sound and isinstance(content.get("looks"), int)):
            content = {"name": path.stem, "split": "", "metric": "damaged", "score": None}
        found.append({key: value for key, value in content.items() if key != "examples"})
    return found


def run_of(path: Path) -> Path | None:
    """The run that the checkpoint at `path` belongs to; None if there is no checkpoint, or it lies in no run."""
    home = path.absolute().parent.parent  # RUN/checkpoints/step-N
    whole = path.absolute().parent.name == "checkpoints" and (path / MANIFEST).is_file()
    return home if whole and (home / CONFIG).is_file() else None


def results_folder(model: Path) -> Path:
    """Where the results files of a model lie."""
    if (run := run_of(model)) is not None:  # a checkpoint is sealed, and deleted when it is old
        return run / RESULTS / model.name
    return model.parent / RESULTS / model.name if model.is_file() else model / RESULTS


def results_of(model: Path) -> list[Row]:
    """The evaluations of a model, as `results` gives them."""
    return results(results_folder(model))


def of_kind(found: Iterable[Row], kind: str) -> list[Row]:
    """The rows of one kind that have a step and a finite loss."""
    return [row for row in found if row.get("kind") == kind and is_count(row.get("step")) and _is_number(row, "loss")]


def best(found: Iterable[Row]) -> Row | None:
    """The validation with the lowest loss."""
    return min(of_kind(found, "valid"), key=lambda row: float(row["loss"]), default=None)


def score(row: Row | None, evaluations: Iterable[Row] = ()) -> tuple[float, str] | None:
    """How good a model is, and in which unit: BLEU if it was measured, else the validation of `row`."""
    for found in evaluations:
        if found.get("metric") == "bleu" and _is_number(found, "score"):
            return float(found["score"]), "BLEU"
    if row is None:
        return None
    if _is_number(row, "bits_per_byte"):
        return float(row["bits_per_byte"]), "bits/byte"
    return float(row["loss"]), "nats"


def _is_number(row: Row, key: str) -> bool:
    value = row.get(key)
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < _HUGE


def is_count(value: object) -> bool:
    """Whether it is a whole number that counts something."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < _MOST


def _bytes(path: Path) -> bytes:
    """The content of a regular file in its folder; of a pipe or a device nothing is waited for."""
    try:
        return read_inside(path.parent, path.name, _LARGEST)
    except FileNotFoundError:
        raise Broken(f"{path.name} is missing") from None
    except OSError as error:
        raise Broken(f"{path.name} cannot be read ({error.strerror})") from None
