"""What a run writes, tells and refuses."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.training.conftest import finish, resume, silent, start
from trivium import api
from trivium.checkpoints import format
from trivium.checkpoints.store import Store
from trivium.data.config import DataConfig
from trivium.data.shards import build
from trivium.errors import BusyError, CheckpointError, ConfigError, DataError, Diverged, OutOfMemory
from trivium.evaluation.likelihood import score_text
from trivium.files import Lock
from trivium.parts.output import SoftmaxOutput
from trivium.text.kinds import Chars
from trivium.training.build_job import build_job
from trivium.training.calibrate import time_validation
from trivium.training.events import Progress, Said, Sampled, Saved, Validated
from trivium.training.metrics import JsonLines, rows
from trivium.training.recipe import Evaluate, Recipe
from trivium.training.setup import create_run
from trivium.training.step import Update

Make = Callable[..., Recipe]


def test_a_run_leaves_everything_that_was_promised(small: Make, tmp_path: Path) -> None:
    session = start(small(), tmp_path)
    events = finish(session)
    names = {path.name for path in session.folder.iterdir()}
    assert {"config.toml", "env.json", "metrics.jsonl", "samples.jsonl", "model.safetensors", "model.json"} <= names
    assert {"tokenizer.json", "checkpoints", "report.html"} <= names
    assert {type(event) for event in events} >= {Progress, Validated, Sampled, Saved}
    report = (session.folder / "report.html").read_text()
    assert "<svg" in report
    assert "http" not in report.replace("http-equiv", "")  # self-contained: nothing is fetched
    trained = [row for row in rows(session.folder / "metrics.jsonl") if row["kind"] == "train"]
    assert [row["step"] for row in trained] == list(range(1, 21))
    assert trained[-1]["loss"] < trained[0]["loss"]


def test_only_the_newest_and_the_best_checkpoints_are_kept(small: Make, tmp_path: Path) -> None:
    session = start(small(**{"checkpoint.every": 1, "checkpoint.keep": 3, "spike": "off"}), tmp_path)
    finish(session)
    kept = [item.step for item in Store(session.folder / "checkpoints").checkpoints()]
    scored = [row for row in rows(session.folder / "metrics.jsonl") if row["kind"] == "valid"]
    best = min(scored, key=lambda row: row["loss"])["step"]
    assert set(kept) == {18, 19, 20, best}


def test_validation_bits_per_byte_agree_with_scoring_the_same_text(small: Make, tmp_path: Path, text: Path) -> None:
    """The trainer's number against the evaluation package's, which cuts windows in its own way."""
    session = start(small(**{"evaluate.rows": 0, "checkpoint.use": "last"}), tmp_path)
    found = [event for event in finish(session) if isinstance(event, Validated)][-1]
    model = api.load(session.folder, device="cpu")
    shards = session.context.shards
    held = model.tokenizer.decode(shards.valid.ids[1:-1].tolist())
    assert text.read_text().endswith(held)
    score = score_text(model.module, model.tokenizer, held)
    end = _closing_end(model, shards.valid.ids)
    assert found.bits_per_byte == pytest.approx((score.nll + end) / math.log(2) / len(held.encode()), rel=1e-4)


def _closing_end(model: api.Model, ids: Any) -> float:
    """The price of the END that closes the stream: the trainer counts it, a text's score does not."""
    context = model.config.context
    start = (len(ids) - 2) // context * context
    row = np.asarray(ids[start:]).astype(np.int64)
    logits = model.logits(torch.from_numpy(row[:-1]))
    return float(-logits.float().log_softmax(-1)[-1, int(row[-1])])


def test_the_best_checkpoint_becomes_the_model(small: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from trivium.training import session as sitting
    from trivium.training.validate import Result

    told = iter([3.0, 1.0, 2.0, 2.5])
    monkeypatch.setattr(sitting, "validate", lambda *_, **__: Result(next(told), 1.0))
    session = start(small(), tmp_path)
    events = finish(session)
    assert any("step 10" in event.text for event in events if isinstance(event, Said))
    best = format.tensors(session.folder / "checkpoints" / "step-00000010", "model")
    model = api.load(session.folder, device="cpu").module
    assert all(torch.equal(p.detach(), best[name]) for name, p in model.named_parameters())


def test_an_unfinished_run_opens_at_its_newest_checkpoint(small: Make, tmp_path: Path) -> None:
    session = start(small(), tmp_path)
    events = session.events()
    for event in events:
        if isinstance(event, Saved):
            break
    events.close()  # type: ignore[attr-defined]
    model = api.load(session.folder, device="cpu")
    assert model.notes["step"] == 5
    assert len(model.generate("the", tokens=3).ids) <= 3


# R8 ----------------------------------------------------------------------------------------------------------------


@pytest.fixture
def poisoned(monkeypatch: pytest.MonkeyPatch) -> Callable[[set[int], float], None]:
    """Make the loss of some micro-batches a number that is not finite."""

    def poison(calls: set[int], value: float) -> None:
        honest, seen = SoftmaxOutput.loss, iter(range(10**9))

        def loss(self: SoftmaxOutput, hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            result = honest(self, hidden, labels)
            training = torch.is_grad_enabled()
            return result * value if training and next(seen) in calls else result

        monkeypatch.setattr(SoftmaxOutput, "loss", loss)

    return poison


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_bad_loss_stops_the_run_and_never_reaches_the_weights(
    small: Make, tmp_path: Path, poisoned: Callable[[set[int], float], None], value: float, optimizer: str
) -> None:
    recipe = small(**{"checkpoint.every": 1, "checkpoint.keep": 30, "log": 20, "optim.kind": optimizer})
    healthy = start(recipe, tmp_path / "healthy")
    finish(healthy)
    poisoned({3 * 6 + 1}, value)  # the second micro-batch of step 7
    session = start(recipe, tmp_path / "ill")
    with pytest.raises(Diverged, match=r"at step 7;.*step 6"):
        finish(session)
    stems = ("model", "optimizer")
    for stem in stems:
        good = format.tensors(healthy.folder / "checkpoints" / "step-00000006", stem)
        last = format.tensors(session.folder / "checkpoints" / "step-00000006", stem)
        assert all(torch.equal(good[name], last[name]) for name in good)
    assert not (session.folder / "checkpoints" / "step-00000007").exists()


def test_skipping_leaves_weights_and_moments_as_they_were(
    small: Make, tmp_path: Path, poisoned: Callable[[set[int], float], None]
) -> None:
    poisoned({3 * 6 + 1}, math.nan)
    recipe = small(**{"checkpoint.every": 1, "checkpoint.keep": 30, "nonfinite": "skip"})
    session = start(recipe, tmp_path)
    events = finish(session)
    assert any("step 7" in event.text for event in events if isinstance(event, Said))
    for stem in ("model", "optimizer"):
        before = format.tensors(session.folder / "checkpoints" / "step-00000006", stem)
        after = format.tensors(session.folder / "checkpoints" / "step-00000007", stem)
        assert all(torch.equal(before[name], after[name]) for name in before)
    bad = [row["step"] for row in rows(session.folder / "metrics.jsonl") if row.get("skipped")]
    assert bad == [7]
    final = format.tensors(session.folder / "checkpoints" / "step-00000020", "model")
    assert all(torch.isfinite(tensor).all() for tensor in final.values())


def test_stopping_freezes_the_weights_even_if_the_host_notices_late(
    small: Make, tmp_path: Path, poisoned: Callable[[set[int], float], None]
) -> None:
    """Between the bad step and the next look at the device nothing may move: no wait is needed for that."""
    from trivium.training.loop import updates

    context = create_run(small(**{"batch.micro": 0}), tmp_path, say=silent, tick=silent)
    poisoned({4}, math.nan)
    trial = build_job(context, 20)
    kept: list[dict[str, torch.Tensor]] = []
    done: list[Update] = []
    for update in updates(trial):
        done.append(update)
        kept.append({name: p.detach().clone() for name, p in trial.model.named_parameters()})
    assert [bool(update.finite) for update in done] == [True] * 4 + [False] * 16
    assert all(torch.equal(kept[3][name], kept[-1][name]) for name in kept[0])


# Refusals ----------------------------------------------------------------------------------------------------------


def test_a_folder_in_use_is_refused(small: Make, tmp_path: Path) -> None:
    """R16."""
    session = start(small(), tmp_path)
    with Lock(session.folder), pytest.raises(BusyError, match="in use by process"):
        finish(session)
    finish(session)


def test_a_finished_run_says_so_and_changes_nothing(small: Make, tmp_path: Path) -> None:
    session = start(small(), tmp_path)
    finish(session)
    before = (session.folder / "model.safetensors").read_bytes()
    events = finish(resume(session.folder))
    assert any("all 20 steps are done" in event.text for event in events if isinstance(event, Said))
    assert (session.folder / "model.safetensors").read_bytes() == before


def test_a_name_that_is_taken_is_refused(small: Make, tmp_path: Path) -> None:
    finish(start(small(), tmp_path))
    with pytest.raises(ConfigError, match="exists already; go on with"):
        start(small(), tmp_path)


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"data.paths": ["missing.txt"]}, DataError, "missing.txt"),
        ({"data.paths": []}, ConfigError, "no text is named"),
        ({"budget.steps": 0}, ConfigError, "how long to train"),
        ({"device": "cuda:9"}, ConfigError, "there is no cuda here"),
        ({"device": "abacus"}, ConfigError, "not a device"),
        ({"name": "a/b"}, ConfigError, "plain folder name"),
    ],
)
def test_a_bad_recipe_writes_nothing(
    small: Make,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    change: dict[str, Any],
    error: type[Exception],
    words: str,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)  # as on a machine without a GPU
    with pytest.raises(error, match=words):
        start(small(**change), tmp_path / "runs")
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(("content", "words"), [(b"", "is empty"), (b"abc\xff\xfe", "UTF-8")])
def test_bad_text_writes_nothing(small: Make, tmp_path: Path, content: bytes, words: str) -> None:
    path = tmp_path / "bad.txt"
    path.write_bytes(content)
    with pytest.raises(DataError, match=words):
        start(small(**{"data.paths": [str(path)]}), tmp_path / "runs")
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(("train", "valid"), [(1, 3), (3, 1)])
def test_what_only_a_batch_shows_is_refused_before_anything_is_made(
    small: Make, tmp_path: Path, train: int, valid: int
) -> None:
    """Next sentences need a second document, for training and for validation."""
    paths = [tmp_path / "train.txt", tmp_path / "valid.txt"]
    for path, documents in zip(paths, (train, valid), strict=True):
        path.write_text("\f".join(f"document {number}: {'to be or not to be ' * 40}" for number in range(documents)))
    pairs = {"objective.frame": "pair", "model.embedding.segments": 2, "model.sentence": "pooler"}
    data = {"data.paths": [str(paths[0])], "data.valid": str(paths[1])}
    with pytest.raises(DataError, match=r"objective\.frame: .* needs at least two documents"):
        start(small("encoder", **pairs, **data), tmp_path / "runs")
    assert not (tmp_path / "runs").exists()


def test_out_of_memory_ends_in_a_sentence_that_names_the_setting(
    small: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def loss(*_: object) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    monkeypatch.setattr(SoftmaxOutput, "loss", loss)
    with pytest.raises(OutOfMemory, match=r"with 2 rows of 16 tokens at a time; set batch\.micro=1"):
        finish(start(small(), tmp_path))


def test_out_of_memory_while_timing_is_a_sentence_too(
    small: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def loss(*_: object) -> torch.Tensor:
        raise RuntimeError("[enforce fail at alloc_cpu.cpp] . DefaultCPUAllocator: can't allocate memory: you tried")

    monkeypatch.setattr(SoftmaxOutput, "loss", loss)
    with pytest.raises(OutOfMemory, match=r"smaller model\.context or model\.width"):
        start(small(**{"budget.steps": 0, "budget.minutes": 1.0, "batch.micro": 1}), tmp_path / "runs")
    assert not (tmp_path / "runs").exists()


def test_a_finished_run_without_checkpoints_is_not_trained_again(small: Make, tmp_path: Path) -> None:
    session = start(small(), tmp_path)
    finish(session)
    shutil.rmtree(session.folder / "checkpoints")
    with pytest.raises(CheckpointError, match="no checkpoint to go on from"):
        finish(resume(session.folder, **{"budget.steps": 30}))
    assert (session.folder / "model.json").is_file()


def test_a_run_that_is_extended_is_unfinished_until_it_ends(small: Make, tmp_path: Path) -> None:
    session = start(small(), tmp_path)
    finish(session)
    assert api.show(session.folder)["state"] == "finished"
    events = resume(session.folder, **{"budget.steps": 40}).events()
    next(event for event in events if isinstance(event, Saved))
    events.close()  # type: ignore[attr-defined]
    assert api.show(session.folder)["state"] == "unfinished"
    assert api.load(session.folder, device="cpu").notes["step"] > 20


def test_shards_bring_their_own_tokenizer(small: Make, tmp_path: Path, text: Path) -> None:
    chars = Chars().build([text.read_text()])
    build(DataConfig(paths=(str(text),)), chars, tmp_path / "shards", progress=silent, say=silent)
    session = start(small(**{"data.paths": [str(tmp_path / "shards")]}), tmp_path / "runs")
    assert session.context.tokenizer.digest == chars.digest
    finish(session)
    assert api.load(session.folder, device="cpu").tokenizer.kind == "chars"


# Pieces ------------------------------------------------------------------------------------------------------------


def test_a_budget_in_tokens_becomes_steps(small: Make, tmp_path: Path) -> None:
    session = start(small(**{"budget.steps": 0, "budget.tokens": 1000}), tmp_path)
    assert session.recipe.budget.steps == math.ceil(1000 / (6 * 16))
    finish(session)


def test_compiling_the_validation_is_not_taken_for_its_time(
    small: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first validation of a compiled model compiles (100 s), each later one takes 2 s."""
    context = start(small(), tmp_path).context
    now, calls = 0.0, 0

    def validate(*_: object, **__: object) -> None:
        nonlocal now, calls
        calls += 1
        now += 102.0 if calls == 1 else 2.0

    monkeypatch.setattr("trivium.training.calibrate.validate", validate)
    trial = build_job(context, 10)
    context = replace(context, recipe=replace(context.recipe, compile="on", evaluate=Evaluate(rows=4)))
    assert time_validation(trial, context, 4, lambda: now) == 2.0


def test_a_torn_last_line_of_a_journal_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    journal = JsonLines(path)
    journal.write([{"step": 1, "loss": 2.0}, {"step": 2, "loss": 1.0}])
    journal.close()
    with path.open("a") as file:
        file.write('{"step": 3, "lo')
    assert [row["step"] for row in rows(path)] == [1, 2]
    journal.cut(1)
    assert path.read_text() == json.dumps({"step": 1, "loss": 2.0}) + "\n"
