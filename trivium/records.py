"""What the files of a run say, read with the standard library alone and without trusting them.

A file may be missing, torn by a crash or written by somebody else: the functions here give what they can use of it, or
a `Broken` that says in a few words which file is wrong and how.
"""

from __future__ import annotations

import json
import os
import re
import tomllib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, TypeGuard

from trivium.files import read_inside

ABOUT, CARD, CONFIG, METRICS, SAMPLES = "about.json", "model.json", "config.toml", "metrics.jsonl", "samples.jsonl"
RESULTS, MANIFEST = "results", "manifest.json"
_MOST = 2**63
TOML_BYTES = 4 << 20  # the most that is read of a TOML file
# Texts and comments. Whatever begins matches, closed or not, and nothing is tried twice: the time is linear.
_QUOTED = re.compile(
    r'"""(?:[^\\]|\\.?)*?(?:"""|\Z)|'
    r"'''.*?(?:'''|\Z)|"
    r'"(?:[^"\\\n]|\\.)*+"?|'
    r"'[^'\n]*+'?|#[^\n]*+",
    re.DOTALL,
)
_LONG_KEY = re.compile(r"(?<![\w.-])[\w-]++(?:[ \t]*+\.[ \t]*+[\w-]++){100}")
_WIDEST = 40  # characters of a word or two in a table
_HUGE = 1e30  # no number that was measured; a whole number in JSON may be beyond every float
_LARGEST = 1 << 30  # bytes of a file
Row = dict[str, Any]


class Broken(Exception):
    """A file of a run that cannot be used, in a few words."""


def rows(path: Path) -> list[Row]:
    """The rows of a file of JSON lines; what is no row is left out, as a last line torn by a crash."""
    return rows_in(_bytes(path))


def rows_in(content: bytes) -> list[Row]:
    """The rows of JSON lines in memory."""
    return list(_parsed(content.split(b"\n")))  # not splitlines: a text may hold a line separator of its own


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
        return parse_toml(_bytes(run / CONFIG, TOML_BYTES).decode())
    except ValueError:
        raise Broken(f"{CONFIG} is not TOML") from None


def parse_toml(text: str) -> Row:
    """The tables of a TOML text; a ValueError says in a few words what is wrong with it.

    Keys have at most 100 parts: the parser takes a time that grows with the square of their number.
    """
    if _LONG_KEY.search(_QUOTED.sub(lambda found: "" if found[0].startswith("#") else "q", text)):
        raise ValueError("it has a key of more than 100 parts")
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError:
        raise
    except RecursionError:
        raise ValueError("its tables or lists are nested too deep") from None
    except ValueError:
        raise ValueError("it has a number of more than 4,300 digits") from None


def about(run: Path) -> Row:
    """What a run wrote down of its model and its data when it began; {} of one that did not."""
    try:
        return table(run / ABOUT)
    except Broken:
        return {}


def require_about(run: Path) -> Row:
    """The same, but what is there has to be readable."""
    return table(run / ABOUT) if os.path.lexists(run / ABOUT) else {}


def require_rows(run: Path, *, finished: bool) -> list[Row]:
    """The metrics of a run, of which only a last line may be torn; one that is `finished` has some."""
    there = finished or os.path.lexists(run / METRICS)
    lines = _bytes(run / METRICS).split(b"\n") if there else []
    found = list(_parsed(lines[:-1]))
    if len(found) < len(lines) - 1 or any(_is_odd(row) for row in found):
        raise Broken(f"{METRICS} is damaged")
    found += _parsed(lines[-1:])
    if finished and not found:
        raise Broken(f"{METRICS} is empty")
    return found


def _is_odd(row: Row) -> bool:
    return row.get("kind") in ("train", "valid", "test") and not is_count(row.get("step"))


def fault(run: Path, *, finished: bool) -> str:
    """What is wrong with the files of a run, in a few words; "" if nothing is."""
    try:
        total(settings(run))
        require_about(run)
        require_rows(run, finished=finished)
    except Broken as error:
        return str(error)
    return ""


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
        score = content.get("score") if _is_number(content, "score") else None
        plain = {"score": score, "split": str(content.get("split", ""))}
        found.append({key: value for key, value in content.items() if key != "examples"} | plain)
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


def total(settings: Row) -> int | None:
    """The steps of a run by its settings; of a budget in minutes or tokens only when it is known."""
    budget = settings.get("budget")
    if not isinstance(budget, dict):
        raise Broken(f"{CONFIG} has no budget")
    knots, shares = budget.get("knots"), budget.get("shares")
    if isinstance(knots, list) and knots and isinstance(shares, list) and shares[-1:] == [1.0]:
        return count(knots[-1])  # a budget in minutes that is over
    return count(budget.get("steps")) or None


def words(value: object) -> str:
    """A short text in one line, whatever a file holds."""
    text = " ".join(value.split())[:_WIDEST] if isinstance(value, str) else ""
    return text if text.isprintable() else ""


def count(value: object) -> int | None:
    """A number of things, if that is what a file holds."""
    return value if isinstance(value, int) and is_count(value) else None


def of_kind(found: Iterable[Row], kind: str) -> list[Row]:
    """The rows of one kind that have a step and a finite loss."""
    return [row for row in found if row.get("kind") == kind and is_count(row.get("step")) and _is_number(row, "loss")]


def best(found: Iterable[Row]) -> Row | None:
    """The validation with the lowest loss."""
    return min(of_kind(found, "valid"), key=lambda row: float(row["loss"]), default=None)


def score(row: object, evaluations: Iterable[Row] = ()) -> tuple[float, str] | None:
    """How good a model is, and in which unit: BLEU if it was measured, else the validation of `row`."""
    for found in evaluations:
        if found.get("metric") == "bleu" and _is_number(found, "score"):
            return float(found["score"]), "BLEU"
    if not isinstance(row, dict):
        return None
    for name, unit in (("bits_per_byte", "bits/byte"), ("loss", "nats")):
        if _is_number(row, name):
            return float(row[name]), unit
    return None


def _is_number(row: Row, key: str) -> bool:
    return is_number(row.get(key))


def is_number(value: object) -> TypeGuard[int | float]:
    """Whether it is a number that somebody may have measured."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < _HUGE


def is_count(value: object) -> bool:
    """Whether it is a whole number that counts something."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < _MOST


def _bytes(path: Path, most: int = _LARGEST) -> bytes:
    """The content of a regular file in its folder; of a pipe or a device nothing is waited for."""
    try:
        return read_inside(path.parent, path.name, most)
    except FileNotFoundError:
        raise Broken(f"{path.name} is missing") from None
    except OSError as error:
        raise Broken(f"{path.name} cannot be read ({error.strerror})") from None
