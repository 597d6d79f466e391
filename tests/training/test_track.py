"""The numbers of a run for other tools."""

from __future__ import annotations

import builtins
import csv
import errno
import os
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.training.conftest import finish, resume, start
from tests.training.test_resume import cut_copy
from trivium.errors import ConfigError
from trivium.training import track
from trivium.training.metrics import rows
from trivium.training.recipe import Recipe
from trivium.training.track import COLUMNS, Csv, TensorBoard, trackers

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
    copy = cut_copy(straight.folder, 10, tmp_path)
    with (copy / "metrics.csv").open("a") as file:
        file.write("1")  # what a crash leaves of step 10 and the like
    finish(resume(copy))
    assert_told(copy)


def test_tracking_that_begins_on_resume_has_the_past_too(small: Make, tmp_path: Path) -> None:
    session = start(small(), tmp_path)
    finish(session)
    for steps in (20, 30):
        finish(resume(session.folder, track="csv", **{"budget.steps": steps}))
        assert table(session.folder / "metrics.csv")[-1]["step"] == str(steps)
        assert_told(session.folder)


class Unsteady:
    """A tracker that fails the first time that it is to write each kind of row."""

    def __init__(self) -> None:
        self.failed: set[str] = set()
        self.rows: list[Mapping[str, Any]] = []

    def write(self, rows: Iterable[Mapping[str, Any]]) -> None:
        for row in rows:
            if row["kind"] not in self.failed:
                self.failed.add(row["kind"])
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            self.rows.append(row)

    def restart(self, rows: Iterable[Mapping[str, Any]]) -> None:
        self.rows.clear()
        self.write(rows)

    def close(self) -> None:
        pass


def test_no_line_is_told_twice_because_another_tracker_failed(
    small: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The validation of a step is told after the step itself: knowing a step is not knowing all of its rows."""
    other = Unsteady()
    monkeypatch.setattr(track, "trackers", lambda folder, names: [Csv(folder / "metrics.csv"), other])
    session = start(small(), tmp_path)
    finish(session)
    assert other.failed == {"train", "valid"}
    assert_told(session.folder)
    assert other.rows == rows(session.folder / "metrics.jsonl")


def test_no_file_is_written_unless_asked_for(small: Make, tmp_path: Path) -> None:
    session = start(small(), tmp_path)
    finish(session)
    assert not (session.folder / "metrics.csv").exists()
    assert not (session.folder / "tensorboard").exists()


def test_a_missing_tensorboard_is_a_sentence(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    real = builtins.__import__

    def without(name: str, *arguments: Any, **options: Any) -> Any:
        if name.startswith(("tensorboard", "torch.utils.tensorboard")):
            raise ImportError(name)
        return real(name, *arguments, **options)

    monkeypatch.setattr(builtins, "__import__", without)
    monkeypatch.delitem(sys.modules, "torch.utils.tensorboard", raising=False)
    with pytest.raises(ConfigError, match=r"track: tensorboard is not installed; type `.* -m pip install tensorboard`"):
        trackers(tmp_path, ["tensorboard"])


def test_tensorboard_reads_the_curves_back(small: Make, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    straight = start(small(track=["csv", "tensorboard"], **{"checkpoint.keep": 30}), tmp_path / "straight")
    finish(straight)
    copy = cut_copy(straight.folder, 10, tmp_path)
    finish(resume(copy))
    for folder in (straight.folder, copy):
        seen = EventAccumulator(str(folder / "tensorboard"))
        seen.Reload()
        curve = [(event.step, event.value) for event in seen.Scalars("train/loss")]
        lines = [row for row in rows(folder / "metrics.jsonl") if row["kind"] == "train"]
        assert curve == [(row["step"], pytest.approx(row["loss"])) for row in lines]


def test_tensorboard_begins_again_without_its_old_files(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """With a stand-in for its writer, so that this is seen where it is not installed: each file is one curve."""

    class Writer:
        def __init__(self, folder: str, purge_step: int | None = None) -> None:
            Path(folder).mkdir(exist_ok=True)
            taken = len(list(Path(folder).iterdir()))
            self.path = Path(folder) / f"events.out.tfevents.{taken}.{purge_step}"
            self.lines: list[str] = []

        def add_scalar(self, name: str, value: float, step: int) -> None:
            self.lines.append(f"{step} {name} {value}\n")

        def flush(self) -> None:
            self.path.write_text("".join(self.lines))

        def close(self) -> None:
            self.flush()

    monkeypatch.setattr(track, "_summary_writer", lambda: Writer)
    board = TensorBoard(tmp_path / "tensorboard")
    lines = [{"kind": "train", "step": step, "loss": 0.5, "seconds": 1.0} for step in (1, 2, 3)]
    board.write(lines)
    (tmp_path / "tensorboard" / "note.txt").write_text("mine")
    board.restart(lines[:2])
    board.close()
    [file] = (tmp_path / "tensorboard").glob("events*")
    assert file.name.endswith(".0")  # purged from step 0 on, for those who have seen the old file
    assert file.read_text() == "1 train/loss 0.5\n2 train/loss 0.5\n"
    assert (tmp_path / "tensorboard" / "note.txt").is_file()


def test_an_unknown_tracker_is_refused(small: Make) -> None:
    with pytest.raises(ConfigError, match="track: 'wandb' is not one of csv, tensorboard"):
        small(track="wandb")


def test_losses_with_names_are_columns_and_curves(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    plain = [{"kind": "train", "step": step, "loss": 0.5} for step in (1, 2)]
    named = [{"kind": "train", "step": 3, "loss": 0.5, "losses": {"tokens": 0.25, "balance": "nan"}}]
    file = Csv(tmp_path / "metrics.csv")
    for lines in (plain[:1], plain[1:], named, named):  # the last two after a part with a loss was added
        file.write(lines)
    told = table(tmp_path / "metrics.csv")
    assert [(row["step"], row["losses/tokens"], row["losses/balance"]) for row in told] == [
        ("1", "", ""),
        ("2", "", ""),
        ("3", "0.25", "nan"),
        ("3", "0.25", "nan"),
    ]
    file.restart(plain)
    assert tuple(table(tmp_path / "metrics.csv")[0]) == COLUMNS
    curves: list[tuple[str, float]] = []

    class Writer:
        def __init__(self, *_: object, **__: object) -> None: ...

        def add_scalar(self, name: str, value: float, step: int) -> None:
            curves.append((name, value))

        def flush(self) -> None: ...

    monkeypatch.setattr(track, "_summary_writer", lambda: Writer)
    TensorBoard(tmp_path / "tensorboard").write(named)
    assert curves == [("train/loss", 0.5), ("train/losses/tokens", 0.25)]
