"""How often something happens in a run: a share of it, or a number of steps."""

from __future__ import annotations

import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.training.conftest import finish, silent, start
from trivium.config import assignments, load, overrides, write
from trivium.training.events import Event, Sampled, Saved, Validated
from trivium.training.recipe import Recipe
from trivium.training.run import open_run
from trivium.training.timeline import Timeline, times

Make = Callable[..., Recipe]
EACH = list(range(1, 21))


@pytest.mark.parametrize(
    ("every", "expected"),
    [
        (0.25, [5, 10, 15, 20]),
        (7, [7, 14, 20]),
        (7.0, [7, 14, 20]),
        (0, [20]),
        (0.0, [20]),
        (0.01, EACH),
        (1, EACH),
        (1.0, [20]),
        (30, [20]),
    ],
)
def test_something_is_due_by_share_or_by_steps_and_always_at_the_end(every: float, expected: list[int]) -> None:
    assert [step for step in EACH if Timeline.fixed(20).due(every, step)] == expected


@settings(max_examples=50, deadline=None)
@given(every=st.one_of(st.integers(0, 60), st.floats(0, 60)), total=st.integers(1, 50))
def test_a_budget_in_minutes_counts_the_validations_that_a_run_makes(every: float, total: int) -> None:
    made = sum(Timeline.fixed(total).due(every, step) for step in range(1, total + 1))
    assert times(every, total) == made


@pytest.mark.parametrize(("typed", "steps"), [("1.0", [20]), ("1", EACH)])
def test_a_whole_run_and_a_single_step_are_told_apart(
    small: Make, tmp_path: Path, typed: str, steps: list[int]
) -> None:
    """As typed on the command line, and again from the run's own file, which says all that was decided."""
    keys = ("evaluate.every", "checkpoint.every", "sample.every")
    recipe = load(Recipe, assignments(f"{key}={typed}" for key in keys), start=small())
    session = start(load(Recipe, tomllib.loads(write(recipe))), tmp_path)
    events = finish(session)
    assert steps_of(events, Validated) == steps_of(events, Sampled) == steps_of(events, Saved) == steps


def steps_of(events: list[Event], kind: type[Any]) -> list[int]:
    return [event.step for event in events if isinstance(event, kind)]


@pytest.mark.parametrize(("before", "after"), [(1, 1.0), (1.0, 1)])
def test_a_change_from_single_steps_to_the_whole_run_is_told_on_resume(
    small: Make, tmp_path: Path, before: float, after: float
) -> None:
    session = start(small(**{"checkpoint.every": before}), tmp_path)
    said: list[str] = []
    open_run(session.folder, overrides({"checkpoint.every": after}), say=said.append, tick=silent)
    assert said == [f"checkpoint.every changed from {before!r} to {after!r}"]
