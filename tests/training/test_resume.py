"""R3: a run that is stopped anywhere and started again ends with the same bits."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.training.conftest import finish, resume, start
from trivium.checkpoints import format
from trivium.checkpoints.store import Store
from trivium.config import write
from trivium.training.metrics import rows
from trivium.training.recipe import Recipe
from trivium.training.signals import SENTENCE

Make = Callable[..., Recipe]


def losses(folder: Path) -> list[tuple[Any, ...]]:
    """Everything that was logged, but for the clock."""
    return [tuple((k, v) for k, v in row.items() if k != "seconds") for row in rows(folder / "metrics.jsonl")]


def assert_equal_ends(one: Path, two: Path, step: int) -> None:
    """Weights, optimizer, data position, logged losses and samples, bit for bit."""
    for stem in ("model", "optimizer"):
        first, second = (format.tensors(run / "checkpoints" / f"step-{step:08d}", stem) for run in (one, two))
        assert first.keys() == second.keys()
        for name, tensor in first.items():
            assert torch.equal(tensor, second[name]), f"{stem} {name}"
    states = [format.document(run / "checkpoints" / f"step-{step:08d}", "state") for run in (one, two)]
    for state in states:
        del state["seconds"]
    assert states[0] == states[1]
    assert losses(one) == losses(two)
    assert rows(one / "samples.jsonl") == rows(two / "samples.jsonl")
    assert (one / "model.safetensors").read_bytes() == (two / "model.safetensors").read_bytes()


def cut_back(folder: Path, step: int) -> None:
    """The folder as a process killed after saving `step` leaves it, but for journals that ran ahead."""
    for item in Store(folder / "checkpoints").checkpoints():
        if item.step > step:
            shutil.rmtree(item.path)
    for name in ("model.json", "model.safetensors", "report.html"):
        (folder / name).unlink(missing_ok=True)


def cut_copy(run: Path, step: int, below: Path) -> Path:
    """A copy of a finished run, cut back to `step`."""
    copy = below / f"from-{step}" / run.name
    shutil.copytree(run, copy)
    cut_back(copy, step)
    return copy


def assert_goes_on_exactly(run: Path, step: int, below: Path, last: int = 20) -> Path:
    """Stopped after `step` and started again, a run ends as in one go; gives the folder of the one that was stopped."""
    copy = cut_copy(run, step, below)
    finish(resume(copy))
    assert_equal_ends(run, copy, last)
    return copy


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_resuming_from_every_step_gives_the_same_bits(small: Make, tmp_path: Path, optimizer: str) -> None:
    recipe = small(**{"checkpoint.every": 1, "checkpoint.keep": 30, "optim.kind": optimizer})
    straight = start(recipe, tmp_path / "straight")
    finish(straight)
    for step in range(1, 21):
        assert_goes_on_exactly(straight.folder, step, tmp_path)


def test_a_run_without_a_checkpoint_starts_over_to_the_same_bits(small: Make, tmp_path: Path) -> None:
    straight = start(small(), tmp_path / "straight")
    finish(straight)
    assert_goes_on_exactly(straight.folder, 0, tmp_path)


def test_the_resolved_configuration_repeats_the_run(small: Make, tmp_path: Path) -> None:
    """R19: same seed, same losses; the file that a run writes is a recipe for the same run."""
    first = start(small(), tmp_path / "first")
    finish(first)
    from trivium.training.recipes import read_recipe

    second = start(read_recipe(first.folder / "config.toml"), tmp_path / "second")
    finish(second)
    assert_equal_ends(first.folder, second.folder, 20)
    assert (first.folder / "config.toml").read_text() == (second.folder / "config.toml").read_text()


def test_another_seed_gives_another_run(small: Make, tmp_path: Path) -> None:
    one, two = start(small(), tmp_path / "one"), start(small(seed=1), tmp_path / "two")
    finish(one)
    finish(two)
    assert losses(one.folder) != losses(two.folder)


def test_accumulation_changes_the_order_of_sums_only(small: Make, tmp_path: Path) -> None:
    """Without dropout, micro-batches of any size give the same losses up to rounding."""
    still = {"model.decoder.block.dropout": 0.0, "model.decoder.block.attention.dropout": 0.0}
    found = []
    for micro in (1, 4, 6):
        session = start(small(**still, **{"batch.micro": micro}), tmp_path / str(micro))
        finish(session)
        found.append([row["loss"] for row in rows(session.folder / "metrics.jsonl") if row["kind"] == "train"])
    for other in found[1:]:
        assert other == pytest.approx(found[0], rel=1e-4)


def _spawn(recipe: Recipe, runs: Path, source: Path | None = None) -> subprocess.Popen[str]:
    if source is None:
        source = runs.parent / "recipe.toml"
        source.write_text(write(recipe))
    command = [sys.executable, "-m", "trivium", "train", str(source), "--runs", str(runs)]
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True, cwd=Path(__file__).resolve().parents[2])


def _wait_for(path: Path, process: subprocess.Popen[str]) -> None:
    for _ in range(600):
        if path.exists():
            return
        assert process.poll() is None, process.stderr.read() if process.stderr else ""
        time.sleep(0.05)
    raise AssertionError(f"{path} never appeared")


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_leaves_a_checkpoint_and_the_run_goes_on_exactly(
    small: Make, tmp_path: Path, number: signal.Signals, code: int
) -> None:
    """R14."""
    recipe = small(**{"budget.steps": 200, "checkpoint.every": 20.0, "evaluate.every": 100.0, "sample.every": 0.0})
    straight = start(recipe, tmp_path / "straight")
    finish(straight)
    process = _spawn(recipe, tmp_path / "runs")
    folder = tmp_path / "runs" / "small"
    _wait_for(folder / "checkpoints" / "step-00000020", process)
    process.send_signal(number)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == code, errors
    assert "go on with" in errors
    assert SENTENCE in errors
    assert "Traceback" not in errors
    stopped = Store(folder / "checkpoints").newest(say=print)
    assert stopped is not None
    assert rows(folder / "metrics.jsonl")[-1]["step"] == stopped.step
    finish(resume(folder))
    assert_equal_ends(straight.folder, folder, 200)


def test_a_killed_run_goes_on_exactly(small: Make, tmp_path: Path, count: Callable[[int, int], int]) -> None:
    recipe = small(**{"budget.steps": 150, "checkpoint.every": 7.0, "evaluate.every": 50.0, "sample.every": 0.0})
    straight = start(recipe, tmp_path / "straight")
    finish(straight)
    for attempt in range(count(1, 10)):
        base = tmp_path / f"attempt-{attempt}"
        base.mkdir()
        folder = base / "runs" / "small"
        process = _spawn(recipe, base / "runs")
        _wait_for(folder / "checkpoints" / "step-00000007", process)
        time.sleep(0.05 * attempt)
        os.kill(process.pid, signal.SIGKILL)
        process.communicate()
        finish(resume(folder))
        assert_equal_ends(straight.folder, folder, 150)


@pytest.mark.parametrize("step", [5, 10, 20])
def test_a_stop_on_a_step_with_work_due_leaves_nothing_out(small: Make, tmp_path: Path, step: int) -> None:
    """Stopping skips validation and sample of that step, to be quick; going on makes up for them."""
    straight = start(small(**{"checkpoint.keep": 30}), tmp_path / "straight")
    finish(straight)
    copy = cut_copy(straight.folder, step, tmp_path)
    for name in ("metrics.jsonl", "samples.jsonl"):
        kept = [row for row in rows(copy / name) if row["step"] < step or row.get("kind") == "train"]
        (copy / name).write_text("".join(json.dumps(row) + "\n" for row in kept))
    finish(resume(copy))
    assert_equal_ends(straight.folder, copy, 20)


def test_a_damaged_checkpoint_is_skipped_and_said(small: Make, tmp_path: Path) -> None:
    """R5: the run falls back to the newest whole checkpoint and still ends with the same bits."""
    straight = start(small(), tmp_path / "straight")
    finish(straight)
    copy = cut_copy(straight.folder, 20, tmp_path)
    newest = copy / "checkpoints" / "step-00000020" / "model.safetensors"
    content = bytearray(newest.read_bytes())
    content[len(content) // 2] ^= 1
    newest.write_bytes(content)
    events = finish(resume(copy))
    assert any("skipped a checkpoint" in str(event) for event in events)
    assert any("step-00000015" in str(event) for event in events)
    assert_equal_ends(straight.folder, copy, 20)
