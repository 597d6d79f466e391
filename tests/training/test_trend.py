"""Overfitting is said, the best weights are kept, and a run may stop early."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.training.conftest import finish, resume, start
from trivium.training import session
from trivium.training.events import Progress, Said
from trivium.training.recipe import Recipe
from trivium.training.trend import Trend
from trivium.training.validate import Result

Make = Callable[..., Recipe]


def test_a_rising_loss_is_told_once() -> None:
    trend, told = Trend(0), []
    for step, loss in enumerate([3.0, 2.0, 2.1, 2.2, 2.3, 2.4, 1.9, 1.95, 2.0, 2.1], 1):
        trend.see(step, loss)
        told.append(trend.warning(loss, "best"))
    assert [number for number, text in enumerate(told, 1) if text] == [5, 10]
    assert told[4] == (
        "the validation loss rises: 2.3000 now, 2.0000 at step 2. The model overfits; the weights of that step become "
        "the model (evaluate.patience=3 would stop here)"
    )


def test_noise_is_no_overfitting() -> None:
    trend = Trend(0)
    for step, loss in enumerate([2.0, 2.001, 2.002, 2.001, 2.003], 1):
        trend.see(step, loss)
        assert not trend.warning(loss, "last")


def test_patience_counts_validations_since_the_best() -> None:
    rows = [{"kind": "valid", "step": 1, "loss": 1.0}, {"kind": "valid", "step": 2, "loss": "nan"}]
    live = Trend(2)
    live.see(1, 1.0)
    live.see(2, math.nan)
    for trend in (live, Trend(2, rows)):  # a run that is resumed counts as one that was not stopped
        assert not trend.is_exhausted
        trend.see(3, 1.0)
        assert trend.is_exhausted


def test_a_run_that_loses_patience_at_its_last_step_has_not_stopped_early(
    small: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    losses = iter([2.0, 2.5, 2.6, 2.7])
    monkeypatch.setattr(session, "validate", lambda *_, **__: Result(next(losses), None))
    recipe = small(**{"budget.steps": 8, "evaluate.every": 2, "evaluate.patience": 3, "checkpoint.every": 1.0})
    run = start(recipe, tmp_path)
    for events in (finish(run), finish(resume(run.folder))):
        assert not [event for event in events if isinstance(event, Said) and "stopped early" in event.text]
    assert (run.folder / "model.json").is_file()


def test_a_run_stops_early_and_its_model_is_the_best(
    small: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    losses = iter([3.0, 2.0, 2.5, 2.6, 2.7, 2.8])
    monkeypatch.setattr(session, "validate", lambda *_, **__: Result(next(losses), None))
    recipe = small(**{"evaluate.every": 2, "evaluate.patience": 3, "checkpoint.every": 1.0})
    run = start(recipe, tmp_path)
    events = finish(run)
    said = [event.text for event in events if isinstance(event, Said)]
    assert any(text.startswith("stopped early at step 10: the last 3 validations") for text in said)
    assert any("The model overfits" in text for text in said)
    assert any("the model is that of step 4" in text for text in said)
    assert (run.folder / "model.json").is_file()
    # a second sitting trains no further, unless it is asked to
    resumed = finish(resume(run.folder))
    assert not [event for event in resumed if isinstance(event, Progress)]
    assert any(isinstance(event, Said) and "evaluate.patience=3; 0 goes on" in event.text for event in resumed)
    monkeypatch.setattr(session, "validate", lambda *_, **__: Result(2.9, None))
    on = finish(resume(run.folder, **{"evaluate.patience": 0}))
    assert max(event.step for event in on if isinstance(event, Progress)) == 20
