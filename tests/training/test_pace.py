"""The speed on the screen is that of completed steps over real time."""

from __future__ import annotations

import pytest

from trivium.training.pace import WINDOW, Pace


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_the_speed_is_that_of_the_last_seconds_without_pauses() -> None:
    clock = Clock()
    pace = Pace(clock)
    clock.now = 30.0  # the first step compiles
    pace.complete(1, 1000)
    assert pace.tokens_per_second == pace.step_seconds == 0
    for step in range(2, 12):
        clock.now += 0.1
        pace.complete(step, 1000)
    assert pace.tokens_per_second == pytest.approx(10_000)
    with pace.pause("validation"):
        clock.now += 100
    assert pace.last["validation"] == pytest.approx(100)
    for step in range(12, 400):
        clock.now += 0.2
        pace.complete(step, 1000)
    assert pace.tokens_per_second == pytest.approx(5000, rel=1e-3)  # the faster steps lie further back
    assert pace.step_seconds == pytest.approx(0.2)
    assert pace.seconds == pytest.approx(30 + 1 + 100 + 388 * 0.2)


def test_a_host_that_runs_ahead_of_its_gpu_shows_a_steady_speed() -> None:
    """Numbers arrive in bursts: none for 9 steps, then 10 at once, each burst in the time of 10 steps."""
    clock = Clock()
    pace, speeds = Pace(clock), []
    for step in range(1, 400):
        if step % 10 == 0:
            clock.now += 1.0
        pace.complete(step, 100)
        if step % 10 == 0 and step > 200:
            speeds.append(pace.tokens_per_second)
    assert max(speeds) / min(speeds) < 1.01
    assert WINDOW > 10


def test_long_steps_have_a_speed_too() -> None:
    clock = Clock()
    pace = Pace(clock)
    for step in range(1, 4):
        clock.now += 60
        pace.complete(step, 600)
    assert pace.tokens_per_second == pytest.approx(10)


def test_laps_leave_pauses_out() -> None:
    clock = Clock()
    pace = Pace(clock, seconds=5.0)
    assert pace.lap_step(0) == 0
    pace.begin_lap(0)
    assert pace.lap_step(0) == 0
    clock.now += 3
    with pace.pause("save"):
        clock.now += 10
    assert pace.lap_step(6) == pytest.approx(0.5)
    pace.begin_lap(6)
    assert pace.lap_step(6) == 0
    assert pace.seconds == 18
    pace.reach(10)
    assert pace.seconds == 18
    pace.reach(30)
    assert pace.seconds == 30
