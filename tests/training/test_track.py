"""The numbers of a run for other tools."""

from __future__ import annotations

import builtins
import csv
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.training.conftest import finish, resume, start
from tests.training.test_resume import cut_back
from trivium.errors import ConfigError
from trivium.training.metrics import rows
from trivium.training.recipe import Recipe
from trivium.training.track import COLUMNS, Csv, trackers

Make = Callable[..., Recipe]


def table(path: Path) -> list[dict[str, str]]:
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def assert_told(folder: Path) -> None:
    """metrics.csv says what metrics.jsonl says, row by row."""
    lines, told = rows(folder / "metrics.jsonl"), table(folder / "metrics.csv")
    assert len(lines) == len(told) > 20
    for line, row in zip(lines, told, strict=True):
        assert tuple(row) == COLUMNS
        assert {name: str(value) for name, value in line.items() if value is not None} == {
            name: value for name, value in row.items() if value
        }


def test_the_csv_has_the_numbers_of_the_journal(small: Make, tmp_path: Path) -> None:
    session = start(small(track="csv"), tmp_path)
    finish(session)
    assert_told(session.folder)


def test_a_resumed_run_leaves_no_line_twice(small: Make, tmp_path: Path) -> None:
    straight = start(small(track="csv", **{"checkpoint.keep": 30}), tmp_path / "straight")
    finish(straight)
    copy = tmp_path / "copy" / "small"
    shutil.copytree(straight.folder, copy)
    cut_back(copy, 10)
    with (copy / "metrics.csv").open("a") as file:
        file.write("1")  # what a crash leaves of step 10 and the like
    finish(resume(copy))
    assert_told(copy)


def test_no_file_is_written_unless_asked_for(small: Make, tmp_path: Path) -> None:
    session = start(small(), tmp_path)
    finish(session)
    assert not (session.folder / "metrics.csv").exists()
    assert not (session.folder / "tensorboard").exists()


def test_cutting_a_table_that_is_not_there_is_nothing(tmp_path: Path) -> None:
    Csv(tmp_path / "metrics.csv").cut(5)
    assert not (tmp_path / "metrics.csv").exists()


def test_a_missing_tensorboard_is_a_sentence(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    real = builtins.__import__

    def without(name: str, *arguments: Any, **options: Any) -> Any:
        if name.startswith(("tensorboard", "torch.utils.tensorboard")):
            raise ImportError(name)
        return real(name, *arguments, **options)

    monkeypatch.setattr(builtins, "__import__", without)
    monkeypatch.delitem(sys.modules, "torch.utils.tensorboard", raising=False)
    with pytest.raises(ConfigError, match=r"track: tensorboard is not installed; type `pip install trivium\[track\]`"):
        trackers(tmp_path, ["tensorboard"])


def test_tensorboard_reads_the_curves_back(small: Make, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    straight = start(small(track=["csv", "tensorboard"], **{"checkpoint.keep": 30}), tmp_path / "straight")
    finish(straight)
    copy = tmp_path / "copy" / "small"
    shutil.copytree(straight.folder, copy)
    cut_back(copy, 10)
    finish(resume(copy))
    for folder in (straight.folder, copy):
        seen = EventAccumulator(str(folder / "tensorboard"))
        seen.Reload()
        curve = [(event.step, event.value) for event in seen.Scalars("train/loss")]
        lines = [row for row in rows(folder / "metrics.jsonl") if row["kind"] == "train"]
        assert curve == [(row["step"], pytest.approx(row["loss"])) for row in lines]


def test_an_unknown_tracker_is_refused(small: Make) -> None:
    with pytest.raises(ConfigError, match="track: 'wandb' is not one of csv, tensorboard"):
        small(track="wandb")
