"""The share of a run that is over after each step, fixed or decided by a clock."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trivium.errors import CheckpointError, ConfigError
from trivium.training.deadline import Deadline
from trivium.training.metrics import JsonLines
from trivium.training.pace import Pace
from trivium.training.recipe import Budget
from trivium.training.timeline import Knot, Timeline, follow


def knots_of(rows: list[dict[str, Any]], path: Path) -> list[Knot]:
    timeline = Timeline(0)
    follow(timeline, rows, path)
    return timeline.knots


@given(steps=st.integers(1, 10_000), step=st.integers(0, 10_000))
def test_a_fixed_number_of_steps_counts_them(steps: int, step: int) -> None:
    timeline = Timeline.fixed(steps)
    assert timeline.total == timeline.horizon == timeline.planned == steps
    assert timeline.position(step) is step  # not a float: schedules compute the bits that they always did
    assert timeline.share(step) == min(1.0, step / steps)
    assert timeline.ends(step) == (step == steps)


def test_shares_lie_on_straight_lines_between_knots() -> None:
    timeline = Timeline(100, [Knot(10, 0.2), Knot(30, 0.3)])
    assert [timeline.share(step) for step in (0, 5, 10, 20, 30, 40)] == pytest.approx([0, 0.1, 0.2, 0.25, 0.3, 0.3])
    assert timeline.position(20) == pytest.approx(25)
    assert timeline.total == 30 + round(0.7 / (0.1 / 20))
    assert not timeline.is_complete


def test_something_is_due_whenever_its_share_of_the_run_is_over() -> None:
    timeline = Timeline(100, [Knot(10, 0.5), Knot(60, 1.0)])
    assert [step for step in range(1, 61) if timeline.due(0.25, step)] == [5, 10, 35, 60]
    assert [step for step in range(1, 61) if timeline.due(20, step)] == [20, 40, 60]
    assert [step for step in range(1, 61) if timeline.due(0, step)] == [60]
    assert [step for step in range(1, 61) if timeline.due(1.0, step)] == [60]


class Drive:
    """A run with a deadline over steps whose lengths are a function of the time."""

    def __init__(self, seconds: float, length: Callable[[float], float], *, planned: int, reserve: float = 0.0) -> None:
        self.timeline = Timeline(planned)
        self.now, self.worst, self.steps = 0.0, 0.0, 0
        pace = Pace(lambda: self.now)
        pace.last = {"validation": reserve}
        self.journal = JsonLines(Path("timeline.jsonl"))  # in memory: it is never flushed
        deadline = Deadline(Budget(minutes=seconds / 60), pace, self.journal)
        deadline.extend(self.timeline, 0)
        while not self.timeline.ends(self.steps):
            self.steps += 1
            self.now += length(self.now)
            share = self.timeline.share(self.steps)
            deadline.extend(self.timeline, self.steps)
            assert self.timeline.share(self.steps) == pytest.approx(share)  # what was done stays as it was
            self.worst = max(self.worst, abs(share - self.now / (seconds - reserve)))


@pytest.mark.parametrize("length", [0.01, 0.15, 1.0])
@pytest.mark.parametrize("reserve", [0.0, 2.0])
def test_steps_of_one_length_fill_the_minutes(length: float, reserve: float) -> None:
    drive = Drive(90, lambda now: length, planned=700, reserve=reserve)
    assert drive.now + reserve == pytest.approx(90, rel=0.015)
    assert drive.worst < 0.02


@settings(max_examples=60, deadline=None)
@given(
    length=st.floats(0.005, 0.2),
    factors=st.lists(st.floats(0.2, 5.0), min_size=10, max_size=10),
    off=st.floats(0.2, 5.0),
)
def test_the_schedule_follows_the_clock_on_a_machine_whose_speed_changes(
    length: float, factors: list[float], off: float
) -> None:
    """Another speed in every tenth of the time, and a plan that may be far off."""
    drive = Drive(90, lambda now: length * factors[min(9, int(now / 9))], planned=round(90 / length * off))
    assert drive.now == pytest.approx(90, rel=0.05)
    assert drive.worst < 0.05 + 3 * 5 * length / 90  # steps are whole
    shares = [knot.share for knot in drive.timeline.knots]
    assert shares == sorted(shares)
    assert drive.timeline.share(drive.steps) == 1
    assert knots_of(drive.journal.rows(), drive.journal.path) == drive.timeline.knots


@pytest.mark.parametrize("length", [60.0, 1000.0])
def test_a_step_that_is_longer_than_the_minutes_is_made_once(length: float) -> None:
    assert Drive(90, lambda now: length, planned=1).steps <= 2


def test_many_knots_are_not_needed() -> None:
    assert len(Drive(3600, lambda now: 0.01, planned=1).timeline.knots) < 150


def test_damaged_knots_are_refused() -> None:
    path = Path("timeline.jsonl")
    assert knots_of([{"step": 3, "share": 0.5}, {"step": 4, "share": 0.5}], path) == [(3, 0.5), (4, 0.5)]
    assert knots_of([{"step": 9, "share": 0.5}, {"step": 3, "share": 0.1}], path) == [(3, 0.1)]  # it was cut short
    for rows in (
        [{"step": 3}],
        [{"step": "x", "share": 1}],
        [{"step": 0, "share": 0.5}],
        [{"step": 1e999, "share": 1}],
    ):
        with pytest.raises(CheckpointError, match=r"timeline.jsonl is damaged; delete it"):
            knots_of(rows, path)
    for share in (1.5, -0.5, float("nan")):
        with pytest.raises(CheckpointError, match="damaged"):
            knots_of([{"step": 3, "share": share}], path)


def test_a_row_at_step_0_begins_anew() -> None:
    rows = [{"step": 9, "share": 0.5}, {"step": 0, "share": 0.0}, {"step": 4, "share": 0.1}]
    assert knots_of(rows, Path("x")) == [(4, 0.1)]


def test_decisions_on_validations_are_read_beside_knots() -> None:
    timeline = Timeline(10)
    rows: list[dict[str, Any]] = [
        {"step": 9, "share": 0.5},
        {"step": 4, "validate": False},
        {"step": 8, "validate": True},
    ]
    assert follow(timeline, rows, Path("x")) == {4: False, 8: True}
    assert timeline.knots == [(9, 0.5)]


def test_a_journal_goes_on_where_the_file_of_a_run_ends(tmp_path: Path) -> None:
    """A run that repeats one which stopped early has more knots in its file than in its journal."""
    budget = Budget(minutes=1, planned=40, knots=(5, 10, 15), shares=(0.1, 0.2, 0.3))
    journal = JsonLines(tmp_path / "timeline.jsonl")
    journal.add([{"step": 20, "share": 0.5}])
    timeline = budget.timeline
    Deadline(budget, Pace(lambda: 0.0), journal).take_up(timeline)
    assert timeline.knots == [(5, 0.1), (10, 0.2), (15, 0.3), (20, 0.5)]


def test_what_happens_at_the_end_alone_does_not_happen_before() -> None:
    timeline = Timeline(6, [Knot(3, 0.5)])
    assert timeline.total == 6
    assert not any(timeline.due(0, step) for step in (1, 2, 3, 6))
    timeline.add(Knot(6, 1.0))
    assert timeline.due(0, 6)


def test_positions_never_fall_below_the_first_when_steps_overflow() -> None:
    """fp16 repeats the position of a step that overflowed; with steps twice as fast as planned two took it below 0."""
    timeline = Timeline(100, [Knot(200, 1.0)])
    assert [timeline.position(step + 1 - step) for step in range(5)] == [0.5] * 5


def test_a_budget_knows_its_timeline() -> None:
    assert Budget(steps=30).timeline == Timeline.fixed(30)
    assert Budget(minutes=1, planned=40).timeline == Timeline(40)
    done = Budget(minutes=1, planned=40, knots=(10, 35), shares=(0.2, 1.0)).timeline
    assert done.ends(35)
    assert done.position(35) == 40
    for wrong in (
        {"knots": (3, 2), "shares": (0.1, 1.0)},
        {"knots": (3,), "shares": ()},
        {"knots": (3,), "shares": (2.0,)},
    ):
        with pytest.raises(ConfigError, match="knots: they do not rise"):
            Budget(minutes=1, planned=40, **wrong)
    with pytest.raises(ConfigError, match="knots: they belong to a budget in minutes"):
        Budget(steps=3, knots=(3,), shares=(1.0,))
