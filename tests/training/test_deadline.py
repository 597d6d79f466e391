"""A budget in minutes is a deadline: the clock decides, and what it decided is written down and obeyed."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.training.conftest import create, finish, resume, silent, start
from trivium.checkpoints import format
from trivium.config import load, overrides
from trivium.errors import CheckpointError, Interrupted
from trivium.training import calibrate, session
from trivium.training.build_job import build_job
from trivium.training.calibrate import plan_budget
from trivium.training.context import RunContext, open_context
from trivium.training.events import Progress, Said, Validated
from trivium.training.job import Job
from trivium.training.loop import updates
from trivium.training.recipe import Budget, Recipe
from trivium.training.recipes import laid_over
from trivium.training.samples import samples
from trivium.training.session import Session
from trivium.training.setup import create_run
from trivium.training.signals import Signals
from trivium.training.step import Update
from trivium.training.validate import Result, validate

Make = Callable[..., Recipe]
MINUTES: dict[str, Any] = {"budget.steps": 0, "budget.minutes": 0.1, "evaluate.every": 0.25, "checkpoint.every": 0.25}


class Clock:
    """A clock that only steps and validations move."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, step: float, validation: float = 0.0) -> None:
        self.now, self.step, self.validation = 0.0, step, validation

        def timed(job: Job, ahead: int | None = None) -> Iterator[Update]:
            for update in updates(job, ahead):
                self.now += self.step
                yield update

        def validated(*arguments: Any, **named: Any) -> Result:
            self.now += self.validation
            return validate(*arguments, **named)

        for module in (session, calibrate):
            monkeypatch.setattr(module, "updates", timed)
        for target in (session, calibrate):
            monkeypatch.setattr(target, "validate", validated)

    def __call__(self) -> float:
        return self.now


def begin(recipe: Recipe, runs: Path, clock: Clock, said: list[str] | None = None) -> Session:
    say = silent if said is None else said.append
    return Session(create_run(recipe, runs, say=say, tick=silent, clock=clock), clock)


def again(context: RunContext, clock: Clock) -> Session:
    recipe = load(Recipe, tomllib.loads((context.folder / "config.toml").read_text()))
    return Session(open_context(context.folder, recipe), clock)


def weights(run: Session) -> dict[str, Any]:
    tensors = format.read_tensors(run.folder / "model.safetensors")
    return {name: tensor.numpy() for name, tensor in tensors.items()}


def same(one: Session, other: Session) -> None:
    mine, theirs = weights(one), weights(other)
    assert mine.keys() == theirs.keys()
    for name, array in mine.items():
        np.testing.assert_array_equal(array, theirs[name])


@pytest.mark.parametrize("length", [0.05, 0.11])
def test_a_run_ends_when_its_minutes_are_over(
    small: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, length: float
) -> None:
    clock = Clock(monkeypatch, step=length, validation=0.1)
    run = begin(small(**MINUTES), tmp_path, clock)
    events = finish(run)
    assert clock.now == pytest.approx(6, rel=0.05)
    progress = [event for event in events if isinstance(event, Progress)]
    assert progress[-1].step == progress[-1].total
    assert progress[-1].seconds_left < 0.3
    assert sum(isinstance(event, Validated) for event in events) == 4
    assert json.loads((run.folder / "timeline.jsonl").read_text().splitlines()[-1])["share"] == 1


def test_a_machine_that_turns_slow_makes_fewer_steps_in_the_same_time(
    small: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The measuring at the start saw steps of 0.02 s; the rate at the end is that of the end of the schedule."""
    clock = Clock(monkeypatch, step=0.02)
    run = begin(small(**MINUTES, schedule="linear"), tmp_path, clock)
    planned = run.recipe.budget.planned
    clock.step = 0.08
    events = finish(run)
    steps = [event.step for event in events if isinstance(event, Progress)]
    assert clock.now == pytest.approx(6, rel=0.05)
    assert steps[-1] < 0.35 * planned
    rows = [json.loads(line) for line in (run.folder / "metrics.jsonl").read_text().splitlines()]
    rates = [row["rate"] for row in rows if row["kind"] == "train"]
    assert rates[-1] == pytest.approx(0, abs=1e-9)
    assert max(rates) == pytest.approx(run.recipe.optim.rate, rel=0.05)


def test_validation_takes_at_most_a_tenth_and_says_so(
    small: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of four validations of 4 rows would take 0.4 s, 27 % of the time in all."""
    clock, said = Clock(monkeypatch, step=0.05, validation=0.4), list[str]()
    run = begin(small(**MINUTES), tmp_path, clock, said)
    assert run.recipe.evaluate.rows == 1
    assert [line for line in said if "each validation reads 1 of 4 rows" in line]
    clock.validation = 0.1
    finish(run)
    assert 0.3 < run.deadline.validating <= 0.6
    assert clock.now == pytest.approx(6, rel=0.05)


def test_validations_that_turn_slow_are_left_out(small: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch, step=0.05, validation=0.02)
    run = begin(small(**MINUTES | {"evaluate.every": 0.05}), tmp_path, clock)
    clock.validation = 0.2
    events = finish(run)
    assert clock.now == pytest.approx(6, rel=0.06)
    validated = [event.step for event in events if isinstance(event, Validated)]
    assert run.deadline.validating < 0.6 + 0.21  # the last one is made in any case
    assert len(validated) == 4
    assert validated[-1] == max(event.step for event in events if isinstance(event, Progress))


@pytest.mark.parametrize("at", [1, 7, 13, 40])
def test_a_run_that_is_stopped_and_resumed_ends_with_the_same_bits(
    small: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    straight = begin(small(**MINUTES, name="straight"), tmp_path, Clock(monkeypatch, step=0.125))
    finish(straight)
    clock = Clock(monkeypatch, step=0.125)  # a power of two: sums of it are exact
    run = begin(small(**MINUTES, name="stopped"), tmp_path, clock)

    class Stopping(Signals):
        @property
        def received(self) -> int:
            return 2 if clock.now >= 0.125 * at + run.context.spent else 0

        @received.setter
        def received(self, value: int) -> None: ...

    with monkeypatch.context() as patch:
        patch.setattr(session, "Signals", Stopping)
        with pytest.raises(Interrupted, match="go on with"):
            finish(run)
    resumed = again(run.context, clock)
    finish(resumed)
    assert (straight.folder / "timeline.jsonl").read_text() == (run.folder / "timeline.jsonl").read_text()
    same(straight, resumed)


def test_decisions_outlive_a_kill_and_are_obeyed(small: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps behind the last checkpoint are made again with the rates that they had, whatever the clock says now."""
    clock = Clock(monkeypatch, step=0.1)
    run = begin(small(**MINUTES), tmp_path, clock)
    for event in run.events():
        if isinstance(event, Progress) and event.step >= 40:
            break  # as if killed: a generator that is dropped saves nothing
    rows = [json.loads(line) for line in (run.folder / "metrics.jsonl").read_text().splitlines()]
    before = {row["step"]: (row["rate"], row["loss"]) for row in rows if row["kind"] == "train"}
    knots = (run.folder / "timeline.jsonl").read_text()
    clock.step = 0.3
    resumed = again(run.context, clock)
    events = finish(resumed)
    assert any(isinstance(event, Said) and event.text.startswith("resumed at step") for event in events)
    rows = [json.loads(line) for line in (run.folder / "metrics.jsonl").read_text().splitlines()]
    after = {row["step"]: (row["rate"], row["loss"]) for row in rows if row["kind"] == "train"}
    decided = json.loads(knots.splitlines()[-1])["step"]
    assert max(before) >= decided - 1 > 30
    assert {step: after[step] for step in before} == before
    assert (run.folder / "timeline.jsonl").read_text().startswith(knots)


def test_the_file_of_a_finished_run_repeats_it(small: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch, step=0.1)
    run = begin(small(**MINUTES), tmp_path, clock)
    finish(run)
    recipe = load(Recipe, tomllib.loads((run.folder / "config.toml").read_text()), {"name": "again"})
    assert recipe.budget.shares[-1] == 1
    clock.step = 0.7
    repeated = begin(recipe, tmp_path, clock)
    assert repeated.context.spent == 0  # nothing is left to measure
    finish(repeated)
    same(run, repeated)


def test_another_budget_replaces_that_of_a_file(small: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = begin(small(**MINUTES), tmp_path, Clock(monkeypatch, step=0.1))
    finish(run)
    longer = resume(run.folder, **{"budget.steps": 70})
    assert longer.recipe.budget == type(longer.recipe.budget)(steps=70)
    finish(longer)
    assert max(row["step"] for row in longer.record.metrics.rows()) == 70
    from trivium.training.recipes import read_recipe

    assert read_recipe(run.folder / "config.toml", {"budget": {"minutes": 2.0}}).budget.knots == ()


def test_decisions_that_a_power_failure_took_are_found_in_the_checkpoint(
    small: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock(monkeypatch, step=0.1)
    run = begin(small(**MINUTES), tmp_path, clock)
    for event in run.events():
        if isinstance(event, Progress) and event.step >= 40:
            break
    share = run.record.timeline.rows()[-1]["share"]
    (run.folder / "timeline.jsonl").unlink()
    resumed = again(run.context, clock)
    finish(resumed)
    rows = resumed.record.timeline.rows()
    assert 0.4 < rows[0]["share"] < share
    assert rows[-1]["share"] == 1


def test_a_repeated_run_leaves_out_the_same_validations(
    small: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They choose the best weights, and may end a run: the clock decides on them once."""
    clock = Clock(monkeypatch, step=0.05, validation=0.02)
    first = begin(small(**MINUTES | {"evaluate.every": 0.05}), tmp_path, clock)
    clock.validation = 0.2
    made = [event.step for event in finish(first) if isinstance(event, Validated)]
    written = load(Recipe, tomllib.loads((first.folder / "config.toml").read_text()))
    assert written.budget.skipped
    assert not set(made) & set(written.budget.skipped)
    for validation in (0.001, 3.0):
        clock = Clock(monkeypatch, step=0.05, validation=validation)
        second = begin(replace(written, name=f"again-{validation}"), tmp_path, clock)
        assert [event.step for event in finish(second) if isinstance(event, Validated)] == made
        same(first, second)


def test_a_resumed_run_makes_the_validations_that_were_decided(
    small: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock(monkeypatch, step=0.05, validation=0.02)
    run = begin(small(**MINUTES | {"evaluate.every": 0.1}), tmp_path, clock)
    made = []
    for event in run.events():
        made += [event.step] if isinstance(event, Validated) else []
        if len(made) == 5:
            break
    last = max(row["step"] for row in run.record.metrics.rows())
    clock.validation = 0.5  # on a machine that is slower now
    events = finish(again(run.context, clock))
    repeated = [event.step for event in events if isinstance(event, Validated) and event.step <= last]
    assert repeated == [step for step in made if step > min(repeated, default=0) - 1]


def test_the_last_sample_and_validation_are_part_of_the_minutes(
    small: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock(monkeypatch, step=0.05, validation=0.45)

    def slow(*arguments: Any, **named: Any) -> Any:
        clock.now += 0.4
        return samples(*arguments, **named)

    monkeypatch.setattr(session, "samples", slow)
    finish(begin(small(**MINUTES | {"evaluate.every": 1.0, "sample.every": 0.5}), tmp_path, clock))
    assert clock.now == pytest.approx(6, rel=0.05)


def test_a_run_in_minutes_goes_back_to_its_beginning(
    small: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The time that it took is over, and the timeline begins anew."""
    clock = Clock(monkeypatch, step=0.05)
    run = begin(small(**MINUTES | {"nonfinite": "rollback"}), tmp_path, clock)
    bad = [True]
    monkeypatch.setattr(type(run.detector), "see", _planted(type(run.detector).see, bad, clock))
    events = finish(run)
    assert not bad
    assert [event for event in events if isinstance(event, Said) and "beginning" in event.text]
    assert clock.now == pytest.approx(6, rel=0.05)


def _planted(real: Callable[..., Any], bad: list[bool], clock: Clock) -> Callable[..., Any]:
    """`Detector.see` with a non-finite loss at step 4, once."""

    def see(self: Any, step: int, loss: float, norm: float, **named: Any) -> Any:
        if step == 4 and bad:
            bad.pop()
            clock.now += 1.0  # what going back takes
            return real(self, step, float("nan"), norm, **{**named, "finite": False})
        return real(self, step, loss, norm, **named)

    return see


def test_a_damaged_timeline_is_one_sentence(small: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch, step=0.1)
    run = begin(small(**MINUTES), tmp_path, clock)
    next(iter(run.events()))
    (run.folder / "timeline.jsonl").write_text('{"step": "x"}\n')
    with pytest.raises(CheckpointError, match=r"timeline.jsonl is damaged; delete it"):
        finish(again(run.context, clock))


def test_real_minutes_are_kept(small: Make, tmp_path: Path) -> None:
    """On the machine's own clock: three seconds, a validation of every row at every tenth."""
    import time

    began = time.monotonic()
    run = start(small(**{"budget.steps": 0, "budget.minutes": 0.05, "evaluate.rows": 0}), tmp_path)
    laid = time.monotonic()
    finish(run)
    lasted = time.monotonic() - laid + run.context.spent
    assert 2.5 < lasted < 4.5, (lasted, laid - began)  # other tests run beside this one


def test_a_context_without_a_plan_is_measured_once(
    small: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock(monkeypatch, step=0.1)
    context = create_run(small(**MINUTES), tmp_path, say=silent, tick=silent, clock=clock)
    assert context.recipe.budget.planned == int((6 - 0.3) * 0.9 / 0.1)  # three steps were enough
    assert context.spent == pytest.approx(0.3)
    assert plan_budget(context, silent, clock) is context
    assert replace(context.recipe.budget, planned=0).minutes == 0.1


def test_another_budget_begins_without_what_was_decided() -> None:
    knots = Budget(minutes=1, planned=40, knots=(10, 35), shares=(0.2, 1.0), skipped=(5,))
    recipe = Recipe(budget=knots)
    assert laid_over(recipe, overrides({"budget.minutes": 5})).budget == Budget(minutes=5)
    assert laid_over(recipe, overrides({"optim.rate": 0.5})).budget == knots


def test_timing_a_long_step_takes_one_of_them_and_says_what_to_lower(
    small: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps of 40 s in 18 s: one is timed and one is made, where three were timed."""
    clock, said = Clock(monkeypatch, step=40.0), list[str]()
    run = begin(small(**MINUTES | {"budget.minutes": 0.3}), tmp_path, clock, said)
    assert clock.now == 40
    assert run.recipe.budget.planned == 1
    rows = run.recipe.batch.rows
    line = f"a step takes 40 s, 222% of budget.minutes=0.3: lower batch.rows (now {rows}) for more steps"
    assert line in said
    finish(run)
    assert clock.now == 80


@pytest.mark.parametrize(("step", "timed"), [(0.5, 1), (0.25, 2), (0.2, 3), (0.02, 8)])
def test_timing_leaves_nine_tenths_of_the_budget(
    small: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: float, timed: int
) -> None:
    """Of 6 s."""
    clock, said = Clock(monkeypatch, step=step), list[str]()
    begin(small(**MINUTES), tmp_path, clock, said)
    assert clock.now == pytest.approx(timed * step)
    assert not any("lower batch.rows" in line for line in said)


def test_a_step_that_compiles_is_not_taken_for_the_length_of_a_step(
    small: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lengths = iter([3.0, 0.05, 0.05])
    clock = Clock(monkeypatch, step=0.0)
    job = build_job(create(small(), tmp_path), 100)
    job.recipe = replace(job.recipe, compile="on")

    def timed(job: Job, ahead: int | None = None) -> Iterator[Update]:
        for update in updates(job, ahead):
            clock.now += next(lengths)
            yield update

    monkeypatch.setattr(calibrate, "updates", timed)
    timing = calibrate.measure(6.0, lambda: job, lambda made, batches: 0.0, clock)
    assert timing.step == pytest.approx(0.05)
