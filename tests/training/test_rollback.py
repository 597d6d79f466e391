"""R9 and the rollback half of R8, in whole runs: spikes are left behind, their batches left out, all of it recorded."""

from __future__ import annotations

import errno
import gzip
import itertools
import math
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pytest
import torch

from tests.training.conftest import ASSETS, SMALL, finish, resume, start
from tests.training.test_resume import assert_equal_ends, assert_goes_on_exactly, losses
from trivium.checkpoints import format
from trivium.checkpoints.store import Store
from trivium.config import load, overrides
from trivium.data.batch import Batch
from trivium.data.packing import RowBatch, Rows
from trivium.errors import CheckpointError, Diverged
from trivium.parts.losses import Losses
from trivium.parts.output import SoftmaxOutput
from trivium.training import loop, rollback
from trivium.training.build_job import build_job
from trivium.training.events import Event, Progress, Said, Saved, Validated
from trivium.training.job import Job
from trivium.training.metrics import rows
from trivium.training.readout import AsyncCopy
from trivium.training.recipe import Recipe
from trivium.training.rollback import History
from trivium.training.session import Session
from trivium.training.spikes import Alarm, Rollback
from trivium.training.step import StepResult, StepScalars

Make = Callable[..., Recipe]

SPIKY: dict[str, Any] = {
    "budget.steps": 100,
    "batch.rows": 4,
    "batch.micro": 0,
    "log": 10,
    "optim.rate": 3e-3,
    "checkpoint.every": 20.0,
    "evaluate.every": 50.0,
    "evaluate.rows": 0,
    "sample.every": 0.0,
    "spike": Rollback(window=32, margin=30),
    "model.decoder.block.dropout": 0.0,
    "model.decoder.block.attention.dropout": 0.0,
}


@pytest.fixture(scope="module")
def spiky(tmp_path_factory: pytest.TempPathFactory) -> Make:
    """A recipe of 100 steps whose text is longer than that: what is left out does not come back in a later epoch."""
    path = tmp_path_factory.mktemp("text") / "play.txt"
    path.write_bytes(gzip.decompress((ASSETS / "shakespeare-train.txt.gz").read_bytes())[:20_000])
    values = {**SMALL, **SPIKY, "data.paths": [str(path)]}
    return lambda **changes: load(Recipe, overrides({**values, **changes}))


@pytest.fixture(scope="module")
def rolled(spiky: Make, tmp_path_factory: pytest.TempPathFactory) -> Session:
    """A finished run that went back once."""
    session = start(spiky(**{"checkpoint.keep": 30}), tmp_path_factory.mktemp("rolled"))
    with pytest.MonkeyPatch.context() as patch:
        Seen(patch, batch_of(session, 71), 100.0)
        finish(session)
    assert len(rows(session.folder / "events.jsonl")) == 1
    return session


class Seen:
    """Plants garbage into the data and writes down which rows trained the model."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, bad: set[int], factor: float) -> None:
        self.batches: list[tuple[int, ...]] = []
        self.garbage = False
        take, honest = Rows.take, SoftmaxOutput.loss

        def taken(this: Rows, indices: Any) -> RowBatch:
            batch = take(this, indices)
            if not torch.is_inference_mode_enabled():
                numbers = tuple(indices.tolist())
                self.batches.append(numbers)
                self.garbage = bool(bad & set(numbers))
                if self.garbage:
                    dice = np.random.default_rng(0)
                    batch = batch._replace(labels=dice.integers(0, 256, batch.labels.shape))
            return batch

        def lossy(this: SoftmaxOutput, hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            loss = honest(this, hidden, labels)
            return loss * factor if self.garbage and not torch.is_inference_mode_enabled() else loss

        monkeypatch.setattr(Rows, "take", taken)
        monkeypatch.setattr(SoftmaxOutput, "loss", lossy)


def batch_of(session: Session, step: int) -> set[int]:
    """The row numbers that a healthy run sees at `step`."""
    order = build_job(session.context, 1).order
    return set(order.batch((step - 1) * session.recipe.batch.rows).tolist())


def valid_loss(events: list[Event]) -> float:
    return [event for event in events if isinstance(event, Validated)][-1].loss


def test_a_garbage_batch_is_rolled_back_and_left_out(
    spiky: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """R9, spec training §6: a batch of garbage with a hundredfold gradient, for SGD without clipping.

    The clean run is the oracle, and so is the unguarded one, which must end worse.
    """
    plain = {"clip": 0.0, "optim": "sgd", "optim.rate": 0.3}
    recipe = spiky(**plain)
    clean = valid_loss(finish(start(recipe, tmp_path / "clean")))
    ruined = start(spiky(**plain, spike="off"), tmp_path / "unguarded")
    bad = batch_of(ruined, 71)
    with monkeypatch.context() as patch:
        Seen(patch, bad, 100.0)
        assert valid_loss(finish(ruined)) > 1.02 * clean
        assert not (ruined.folder / "events.jsonl").exists()
    session = start(recipe, tmp_path / "guarded")
    seen = Seen(monkeypatch, bad, 100.0)
    events = finish(session)
    assert abs(valid_loss(events) - clean) < 0.02 * clean
    [entry] = rows(session.folder / "events.jsonl")
    assert (entry["step"], entry["to"], entry["checkpoint"]) == (71, 40, "step-00000040")
    assert (entry["trigger"], entry["action"]) == ("norm", "skip")
    assert entry["found"] - 71 < 5
    assert any("went back to step 40" in event.text for event in events if isinstance(event, Said))
    # the metrics are those of one history, and every row of the epochs was seen at most once in it
    assert [row["step"] for row in rows(session.folder / "metrics.jsonl") if row["kind"] == "train"] == [*range(1, 101)]
    history = seen.batches[:40] + seen.batches[entry["found"] :]
    assert len(history) == 100
    assert not bad & {row for batch in history for row in batch}
    first, end = entry["rows"]
    order = session.context.recipe.batch.rows
    assert first <= 70 * order < end
    assert_each_once(history, first, end, len(session.context.train))


def assert_each_once(history: list[tuple[int, ...]], first: int, end: int, size: int) -> None:
    """Each example at most once per epoch: the positions that were used are distinct, epoch by epoch."""
    rows_seen = [row for batch in history for row in batch]
    positions = [*range(first), *range(end, end + len(rows_seen) - first)]
    for _, group in itertools.groupby(zip(positions, rows_seen, strict=True), key=lambda pair: pair[0] // size):
        numbers = [row for _, row in group]
        assert len(numbers) == len(set(numbers))


def test_resuming_after_a_rollback_gives_the_same_bits(
    rolled: Session, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Seen(monkeypatch, batch_of(rolled, 71), 100.0)
    for step in (40, 60, 80):
        assert_goes_on_exactly(rolled.folder, step, tmp_path, 100)


@pytest.mark.parametrize("moment", ["before the log", "after the log", "while discarding"])
def test_a_crash_in_the_middle_of_a_rollback_loses_nothing(
    rolled: Session, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    """The run goes on to the same bits as the one that was not killed."""
    Seen(monkeypatch, batch_of(rolled, 71), 100.0)
    session = start(rolled.recipe, tmp_path)

    class Killed(BaseException):
        pass

    def killed(*_: Any) -> NoReturn:
        raise Killed

    def half(_: Store, items: Any) -> None:
        if listed := sorted(items, key=lambda item: item.step):
            shutil.rmtree(listed[-1].path)
            raise Killed

    with monkeypatch.context() as patch:
        match moment:
            case "before the log":
                patch.setattr(History, "write", killed)
            case "after the log":
                patch.setattr(Store, "discard", lambda _, items: any(items) and killed())
            case _:
                patch.setattr(Store, "discard", half)
        with pytest.raises(Killed):
            finish(session)
    assert (session.folder / "events.jsonl").exists() is (moment != "before the log")
    assert max(item.step for item in session.store.checkpoints()) > 40  # what was given up is still there
    finish(resume(session.folder))
    assert_equal_ends(rolled.folder, session.folder, 100)


def test_a_run_that_keeps_failing_stops_at_a_good_checkpoint_and_names_the_region(
    spiky: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Trouble that is not in the data does not go away by leaving data out: three attempts, then the end."""
    recipe = spiky()
    honest = build_job

    def enlarged(*args: Any, **kwargs: Any) -> Job:
        job = honest(*args, **kwargs)
        compute = job.compute

        def worse(batch: Batch) -> Losses:
            factor = 100 if job.step >= 70 and job.model.training else 1
            return {name: loss._replace(sum=loss.sum * factor) for name, loss in compute(batch).items()}

        job.compute = worse
        return job

    monkeypatch.setattr("trivium.training.session.build_job", enlarged)
    session = start(recipe, tmp_path)
    with pytest.raises(Diverged, match=r"near step 71 .* 3 rollbacks did not help"):
        finish(session)
    entries = rows(session.folder / "events.jsonl")
    assert [entry["action"] for entry in entries] == ["skip"] * 3 + ["stop"]
    newest = Store(session.folder / "checkpoints").newest(say=print)
    assert newest is None or newest.step <= entries[-1]["to"]
    widths = [entry["rows"][1] - entry["rows"][0] for entry in entries]
    assert widths[0] < widths[1] < widths[2]


def test_nothing_is_given_up_before_the_log_is_on_the_disk(
    rolled: Session, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk that is full has no room for the log but lets files be deleted: killed then, the run loses no step."""
    Seen(monkeypatch, batch_of(rolled, 71), 100.0)
    session = start(rolled.recipe, tmp_path)
    kept = tmp_path / "killed" / "small"
    with monkeypatch.context() as patch:
        patch.setattr(rollback, "write_atomic", full)
        events = session.events()
        next(event for event in events if isinstance(event, Said) and "went back to step 40" in event.text)
        assert not (session.folder / "events.jsonl").exists()
        shutil.copytree(session.folder, kept, ignore=shutil.ignore_patterns(".lock"))
        assert [item.step for item in Store(kept / "checkpoints").checkpoints()] == [20, 40, 50, 60]
    list(events)
    # with room again the log comes first, and what it gives up is gone before the next checkpoint
    assert rows(session.folder / "events.jsonl") == rows(rolled.folder / "events.jsonl")
    assert_equal_ends(rolled.folder, session.folder, 100)
    finish(resume(kept))
    assert_equal_ends(rolled.folder, kept, 100)


def test_a_checkpoint_that_was_given_up_is_never_gone_back_to(
    rolled: Session, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor is one saved that knows of a rollback which the log does not."""
    Seen(monkeypatch, batch_of(rolled, 71), 100.0)
    session = start(rolled.recipe, tmp_path)
    monkeypatch.setattr(rollback, "write_atomic", full)
    events = session.events()
    next(event for event in events if isinstance(event, Said) and "went back to step 40" in event.text)
    until = itertools.takewhile(lambda event: not (isinstance(event, Progress) and event.step == 90), events)
    assert not [event for event in until if isinstance(event, Saved)]
    assert 60 in [item.step for item in session.store.checkpoints()]
    _, found = session.history.decide(Alarm(100, 101, "loss", ""), [], print)
    assert found is not None
    assert found.step == 40


def full(*_: Any) -> NoReturn:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_going_back_is_not_taken_for_a_checkpoint_that_was_saved(
    rolled: Session, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What could not be saved before a rollback is said to be saved when it is, and not when others are deleted."""
    Seen(monkeypatch, batch_of(rolled, 71), 100.0)
    session = start(rolled.recipe, tmp_path)
    save, back = Store.save, False

    def refusing(this: Store, step: int, **rest: Any) -> Path:
        return save(this, step, **rest) if back or step <= 50 else full()

    monkeypatch.setattr(Store, "save", refusing)
    told: list[str] = []
    for event in session.events():
        if isinstance(event, Said):
            told.append(event.text)
            back = back or "went back to step 40" in event.text
    refused, went, worked = [text for text in told if text.startswith(("the checkpoint", "the gradient"))]
    assert refused.startswith("the checkpoint could not be written at step 60")
    assert "went back to step 40" in went
    assert worked == "the checkpoint could be written again at step 60"
    assert_equal_ends(rolled.folder, session.folder, 100)


@pytest.mark.parametrize("phase", [70, 71, 72])
def test_a_rise_is_found_in_five_steps_even_if_the_numbers_come_as_late_as_they_may(
    spiky: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, phase: int
) -> None:
    """As on a GPU, and without a large norm; the batch two steps before the rise is left out too."""
    honest, made = loop.train_step, list[int]()

    def worse(job: Job, batches: Sequence[Batch], scalars: StepScalars) -> StepResult:
        result = honest(job, batches, scalars)
        made.append(job.step + 1)
        rise = torch.tensor([0.0 if job.skipped or job.step < phase else 3.0, 0.0, 0.0, 0.0])
        return result._replace(numbers=result.numbers + rise)

    monkeypatch.setattr(loop, "train_step", worse)
    monkeypatch.setattr(AsyncCopy, "has_arrived", lambda *_, **__: False)
    session = start(spiky(**{"budget.steps": 80, "log": 80, "checkpoint.every": 30.0, "evaluate.every": 0.0}), tmp_path)
    finish(session)
    [entry] = rows(session.folder / "events.jsonl")
    assert (entry["step"], entry["trigger"], entry["to"]) == (phase + 1, "loss", 30)
    assert made[made.index(31) + 1 :].index(31) == phase + 5 - 31  # step phase + 5 was the last before it went back
    assert entry["rows"][0] <= (phase - 2) * 4


def test_a_spike_before_the_first_checkpoint_leads_back_to_the_beginning(
    spiky: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = spiky(**{"checkpoint.every": 0.0, "evaluate.every": 0.0})
    clean = start(recipe, tmp_path / "clean")
    finish(clean)
    session = start(recipe, tmp_path / "ill")
    Seen(monkeypatch, batch_of(session, 60), 100.0)
    finish(session)
    [entry] = rows(session.folder / "events.jsonl")
    assert (entry["step"], entry["to"], entry["checkpoint"]) == (60, 0, "")
    before = entry["rows"][0] // 4
    assert 0 < before < 60
    assert losses(session.folder)[:before] == losses(clean.folder)[:before]  # the very same beginning
    assert losses(session.folder)[before] != losses(clean.folder)[before]


@pytest.mark.parametrize("start_is_there", [True, False])
def test_a_run_that_began_with_another_goes_back_to_that_or_says_that_it_is_gone(
    spiky: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, start_is_there: bool
) -> None:
    """Never to random weights; and without it nothing is given up."""
    first = start(spiky(**{"budget.steps": 4, "evaluate.every": 0.0, "checkpoint.use": "last"}), tmp_path / "first")
    finish(first)
    late = {"evaluate.every": 0.0, "checkpoint.every": 58.0, "optim.rate": 1e-4}  # nothing before the spike at 60
    session = start(spiky(start=str(first.folder), **late), tmp_path / "second")
    Seen(monkeypatch, batch_of(session, 60), 100.0)
    events = session.events()
    next(event for event in events if isinstance(event, Saved))
    if start_is_there:
        list(events)
        [entry] = rows(session.folder / "events.jsonl")
        assert entry["to"] == 0
        again = [row["loss"] for row in rows(session.folder / "metrics.jsonl") if row["kind"] == "train"]
        straight = start(spiky(start=str(first.folder), **late), tmp_path / "straight")
        assert again[0] == float(next(loop.updates(build_job(straight.context, 100))).loss)
        return
    shutil.rmtree(first.folder)
    with pytest.raises(CheckpointError, match=r"back to its beginning, and its start is gone .*restore that and go on"):
        list(events)
    assert not (session.folder / "events.jsonl").exists()
    assert [item.step for item in session.store.checkpoints()] == [58]


def test_a_rollback_to_the_beginning_that_was_cut_short_needs_the_start_too(
    spiky: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed between the log and the deletion: the checkpoints that are still there do not stand for the start."""
    first = start(spiky(**{"budget.steps": 4, "evaluate.every": 0.0}), tmp_path / "first")
    finish(first)
    late = {"evaluate.every": 0.0, "checkpoint.every": 58.0}
    session = start(spiky(start=str(first.folder), **late), tmp_path / "second")
    Seen(monkeypatch, batch_of(session, 60), 100.0)
    with monkeypatch.context() as patch:
        patch.setattr(Store, "discard", lambda _, items: any(items) and full())
        events = session.events()
        next(event for event in events if isinstance(event, Said) and "went back to the beginning" in event.text)
        events.close()  # type: ignore[attr-defined]
    assert [item.step for item in session.store.checkpoints()] == [58]
    shutil.rmtree(first.folder)
    with pytest.raises(CheckpointError, match="holds no model"):
        finish(resume(session.folder))


@pytest.mark.parametrize("spike", ["off", "rollback"])
def test_a_number_that_is_not_finite_can_lead_back_too(
    spiky: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spike: str
) -> None:
    """R8, the policy `rollback`, watched or not for spikes: the oldest checkpoint, since none is 100 steps old."""
    recipe = spiky(nonfinite="rollback", spike=spike)
    session = start(recipe, tmp_path)
    Seen(monkeypatch, batch_of(session, 71), math.nan)
    finish(session)
    [entry] = rows(session.folder / "events.jsonl")
    assert (entry["step"], entry["found"], entry["trigger"], entry["to"]) == (
        71,
        71,
        "nonfinite",
        20,
    )
    last = format.tensors(session.folder / "checkpoints" / "step-00000100", "model")
    assert all(torch.isfinite(tensor).all() for tensor in last.values())
    state = format.document(session.folder / "checkpoints" / "step-00000100", "state")
    assert state["skipped"] == [entry["rows"]]
    assert state["cursor"] == 100 * 4 + entry["rows"][1] - entry["rows"][0]
