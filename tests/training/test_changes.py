"""What may change between two sittings of a run, and what may not (R10, R11)."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.training.conftest import finish, resume, silent, start
from trivium.checkpoints import format
from trivium.config import overrides
from trivium.data.config import DataConfig
from trivium.data.shards import build
from trivium.errors import CheckpointError, ConfigError, DataError
from trivium.text.kinds import Bytes
from trivium.training import device
from trivium.training.events import Progress
from trivium.training.metrics import rows
from trivium.training.recipe import Recipe
from trivium.training.run import open_run

Make = Callable[..., Recipe]


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("model.width", 32),
        ("seed", 5),
        ("tokenizer", "chars"),
        ("batch.rows", 3),
        ("data.valid", 0.2),
        ("objective", "prefix"),
        ("optim", "muon"),
        ("average", "ema"),
        ("start", "elsewhere"),
    ],
)
def test_an_unsafe_change_on_resume_is_refused(small: Make, tmp_path: Path, key: str, value: Any) -> None:
    """R10: nothing but the folder of a created run is needed to say so."""
    session = start(small(), tmp_path)
    with pytest.raises(CheckpointError, match=rf"another configuration: {key}(\.\w+)? was .* start a new run"):
        resume(session.folder, **{key: value})


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("spike", "off", "spike.kind changed from 'rollback' to 'off'"),
        ("spike.margin", 7, "spike.margin changed from 100 to 7"),
        ("nonfinite", "rollback", "nonfinite changed from 'stop' to 'rollback'"),
        ("optim.rate", 0.5, "optim.rate changed from 0.001 to 0.5"),
        ("clip", 0.5, "clip changed from 1.0 to 0.5"),
        ("schedule", "constant", "schedule.kind changed from 'cosine' to 'constant'"),
        ("track", ["csv"], "track changed from [] to ['csv']"),
    ],
)
def test_a_harmless_change_on_resume_is_printed(small: Make, tmp_path: Path, key: str, value: Any, words: str) -> None:
    session = start(small(**{"optim.rate": 0.001}), tmp_path)
    said: list[str] = []
    open_run(session.folder, overrides({key: value}), say=said.append, tick=silent)
    assert words in said


@pytest.mark.parametrize("fast", [False, True])
def test_what_depends_on_the_machine_is_settled_on_resume_too(
    small: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fast: bool
) -> None:
    """Asked to decide again, the run decides as a new one does, tells what changed and writes that down."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    monkeypatch.setattr(device, "native_bf16", lambda _: fast)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    session = start(small(), tmp_path)
    said: list[str] = []
    left_open = {"device": "auto", "precision": "auto", "compile": "auto", "threads": 0}
    again = open_run(session.folder, overrides(left_open), say=said.append, tick=silent)
    found = (again.recipe.device, again.recipe.precision, again.recipe.compile, again.recipe.threads)
    assert found == ("cpu", "bf16" if fast else "fp32", "off", 3)
    assert said == ["precision changed from 'fp32' to 'bf16'"] * fast + ["threads changed from 1 to 3"]


def test_a_run_from_before_there_was_a_residual_dtype_goes_on_as_it_was(small: Make, tmp_path: Path) -> None:
    """Its config.toml says nothing of it, and 1.0 of something that happens every step."""
    session = start(small(**{"checkpoint.every": 1.0, "evaluate.every": 0.5}), tmp_path)
    config = session.folder / "config.toml"
    config.write_text(config.read_text().replace('residual_dtype = "fp32"\n', ""))
    assert "every = 1.0" in config.read_text()
    said: list[str] = []
    again = open_run(session.folder, {}, say=said.append, tick=silent)
    assert (again.recipe.residual_dtype, repr(again.recipe.checkpoint.every)) == ("fp32", "1")
    assert again.recipe.evaluate.every == 0.5
    assert not said


def test_another_precision_on_resume_decides_about_the_residual_dtype_again(small: Make, tmp_path: Path) -> None:
    session = start(small(precision="bf16", residual_dtype="bf16"), tmp_path)
    said: list[str] = []
    again = open_run(session.folder, overrides({"precision": "fp32"}), say=said.append, tick=silent)
    assert (again.recipe.precision, again.recipe.residual_dtype) == ("fp32", "fp32")
    assert said == ["precision changed from 'bf16' to 'fp32'", "residual_dtype changed from 'bf16' to 'fp32'"]


@pytest.mark.parametrize(("name", "words"), [("bogus", "'bogus' is not a device; try"), ("cuda", "there is no cuda")])
@pytest.mark.parametrize("written", [False, True])
def test_a_device_that_is_not_there_is_refused_on_resume(
    small: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, words: str, written: bool
) -> None:
    """Asked for, or that of the machine on which the run began."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    folder = start(small(), tmp_path).folder
    config = folder / "config.toml"
    if written:
        config.write_text(config.read_text().replace('device = "cpu"', f'device = "{name}"'))
    before = config.read_text()
    assert (name in before) is written
    with pytest.raises(ConfigError, match=f"device: {words}"):
        resume(folder, **({} if written else {"device": name}))
    assert config.read_text() == before
    if written:
        finish(resume(folder, device="cpu"))


@pytest.mark.parametrize("optimizer", ["adamw", "muon", "sgd"])
def test_the_values_of_the_recipe_win_over_those_of_the_checkpoint(small: Make, tmp_path: Path, optimizer: str) -> None:
    """R10: with a new rate of nearly nothing the weights stay where the checkpoint has them."""
    session = start(small(**{"optim.kind": optimizer, "budget.steps": 10, "checkpoint.keep": 9}), tmp_path)
    finish(session)
    rates = ["rate", "adam_rate", "head_rate"] if optimizer == "muon" else ["rate"]
    tiny = {f"optim.{name}": 1e-12 for name in rates}
    finish(resume(session.folder, **tiny, **{"budget.steps": 20, "optim.decay": 0.0}))
    before, after = (
        format.tensors(session.folder / "checkpoints" / f"step-000000{step}", "model") for step in (10, 20)
    )
    assert all(torch.allclose(before[name], after[name], rtol=0, atol=1e-9) for name in before)
    told = [row["rate"] for row in rows(session.folder / "metrics.jsonl") if row["kind"] == "train"]
    assert max(told[10:]) <= 1e-12 < min(told[1:10])


def test_a_safe_change_on_resume_is_said_and_kept(small: Make, tmp_path: Path) -> None:
    session = start(small(), tmp_path)
    finish(session)
    said: list[str] = []
    again = open_run(session.folder, {"budget": {"steps": 30}}, say=said.append, tick=silent)
    finish(again)
    assert said == ["budget.steps changed from 20 to 30"]
    assert rows(session.folder / "metrics.jsonl")[-1]["step"] == 30
    assert "steps = 30" in (session.folder / "config.toml").read_text()


def test_a_checkpoint_of_another_run_is_refused(small: Make, tmp_path: Path) -> None:
    one, two = start(small(), tmp_path / "one"), start(small(seed=3), tmp_path / "two")
    finish(one)
    finish(two)
    shutil.rmtree(one.folder / "checkpoints")
    shutil.copytree(two.folder / "checkpoints", one.folder / "checkpoints")
    with pytest.raises(CheckpointError, match="another configuration"):
        finish(resume(one.folder))


def test_text_that_changed_since_the_run_began_is_refused(small: Make, tmp_path: Path, text: Path) -> None:
    """R11."""
    copy = tmp_path / "copy.txt"
    copy.write_text(text.read_text())
    session = start(small(**{"data.paths": [str(copy)]}), tmp_path / "runs")
    finish(session)
    copy.write_text(text.read_text() + "More.")
    with pytest.raises(CheckpointError, match=r"copy\.txt has changed"):
        finish(resume(session.folder, **{"budget.steps": 25}))


@pytest.mark.parametrize("name", ["train.bin", "valid.bin", "train.docs.bin"])
@pytest.mark.parametrize("built", [False, True])
def test_ids_that_changed_since_the_run_began_are_refused(
    small: Make, tmp_path: Path, text: Path, name: str, built: bool
) -> None:
    """R11: a single byte, in a file of the same size, of the run's own shards or of shards built before."""
    recipe = small()
    shards = tmp_path / "shards"
    if built:
        build(DataConfig(paths=(str(text),), valid=0.1), Bytes().build([]), shards, progress=silent, say=silent)
        recipe = small(**{"data.paths": [str(shards)]})
    session = start(recipe, tmp_path / "runs")
    path = (shards if built else session.folder / "data") / name
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    with pytest.raises(DataError, match=rf"{name} has changed since it was built"):
        resume(session.folder)


def test_the_number_of_threads_is_obeyed_on_resume(small: Make, tmp_path: Path) -> None:
    """One and two threads give different bits."""
    session = start(small(threads=1), tmp_path)
    torch.set_num_threads(2)
    try:
        finish(session)
        used = {torch.get_num_threads() for _ in resume(session.folder, **{"budget.steps": 21}).events()}
        assert used == {1}
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(1)


def test_a_change_before_the_first_checkpoint_is_written_down(small: Make, tmp_path: Path) -> None:
    session = start(small(), tmp_path)
    events = resume(session.folder, **{"optim.rate": 0.5}).events()
    next(event for event in events if isinstance(event, Progress))
    events.close()  # type: ignore[attr-defined]
    assert "rate = 0.5" in (session.folder / "config.toml").read_text()


@pytest.mark.parametrize("change", [{"budget.minutes": 1.0}, {"budget.tokens": 100}])
def test_a_run_goes_on_for_a_number_of_steps(small: Make, tmp_path: Path, change: dict[str, Any]) -> None:
    session = start(small(), tmp_path)
    with pytest.raises(ConfigError, match=r"set budget\.steps=N \(now 20\)"):
        resume(session.folder, **change)


def test_a_preset_on_resume_is_refused(small: Make, tmp_path: Path) -> None:
    session = start(small(), tmp_path)
    with pytest.raises(CheckpointError, match="another configuration"):
        resume(session.folder, model="gpt2")


def test_fewer_steps_than_a_run_has_made_are_refused(small: Make, tmp_path: Path) -> None:
    session = start(small(), tmp_path)
    finish(session)
    before = (session.folder / "config.toml").read_text()
    with pytest.raises(CheckpointError, match=r"has reached step 20 already, and 12 is less; set budget.steps=20"):
        finish(resume(session.folder, **{"budget.steps": 12}))
    assert (session.folder / "config.toml").read_text() == before
    finish(resume(session.folder, **{"budget.steps": 20}))
