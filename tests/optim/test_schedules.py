"""Schedules against worked values."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trivium.errors import ConfigError
from trivium.optim.schedules import SCHEDULES, Constant, Cosine, Schedule, Wsd


def rates(schedule: Schedule, steps: list[int]) -> list[float]:
    return [1e-3 * schedule.factor(step, 1000) for step in steps]


def test_cosine_gives_the_worked_rates() -> None:
    worked = {0: 0, 50: 5e-4, 100: 1e-3, 325: 8.68198e-4, 550: 5.5e-4, 775: 2.31802e-4, 1000: 1e-4}
    assert rates(Cosine(warmup=100, floor=0.1), [*worked]) == pytest.approx([*worked.values()], abs=1e-9)


@pytest.mark.parametrize(("shape", "at_850", "at_900"), [("linear", 7.5e-4, 5e-4), ("sqrt", 5e-4, 2.92893e-4)])
def test_wsd_gives_the_worked_rates(shape: str, at_850: float, at_900: float) -> None:
    schedule = Wsd(warmup=100, decay=200, shape="sqrt" if shape == "sqrt" else "linear")
    worked = {50: 5e-4, 100: 1e-3, 450: 1e-3, 800: 1e-3, 850: at_850, 900: at_900, 1000: 0}
    assert rates(schedule, [*worked]) == pytest.approx([*worked.values()], abs=1e-9)


def test_constant_rises_and_stays() -> None:
    assert rates(Constant(warmup=100), [1, 50, 100, 101, 1000]) == pytest.approx([1e-5, 5e-4, 1e-3, 1e-3, 1e-3])
    assert rates(Constant(), [1, 1000]) == [1e-3, 1e-3]


@pytest.mark.parametrize("schedule", [Constant(warmup=0), Cosine(warmup=0), Wsd(warmup=0)])
def test_no_warm_up_begins_at_the_peak(schedule: Schedule) -> None:
    assert schedule.factor(1, 1000) == pytest.approx(1.0, abs=1e-5)


def test_lengths_below_one_are_shares_of_the_run() -> None:
    for step in range(0, 1001, 50):
        assert Cosine(warmup=0.1).factor(step, 1000) == Cosine(warmup=100).factor(step, 1000)
        assert Wsd(warmup=0.1, decay=0.2).factor(step, 1000) == Wsd(warmup=100, decay=200).factor(step, 1000)


def test_the_decay_of_wsd_may_start_from_any_flat_step() -> None:
    """A longer run is the same until the shorter one begins to fall."""
    short, long = (Wsd(warmup=100, decay=200) for _ in range(2))
    assert [short.factor(step, 1000) for step in range(1, 801)] == [long.factor(step, 5000) for step in range(1, 801)]


floors = st.floats(0, 1)
lengths = st.one_of(st.floats(0, 0.99), st.integers(1, 300).map(float))
schedules = st.one_of(
    st.builds(Constant, warmup=lengths),
    st.builds(Cosine, warmup=lengths, floor=floors),
    st.builds(
        Wsd,
        warmup=lengths,
        decay=st.one_of(st.floats(0.01, 0.99), st.integers(1, 300).map(float)),
        floor=floors,
        shape=st.sampled_from(["linear", "sqrt"]),
    ),
)


@settings(max_examples=200, deadline=None)
@given(schedule=schedules, total=st.integers(1, 500), share=st.floats(0, 1.2))
def test_a_factor_lies_between_zero_and_one(schedule: Schedule, total: int, share: float) -> None:
    factor = schedule.factor(max(1, round(share * total)), total)
    assert 0 <= factor <= 1


@settings(max_examples=50, deadline=None)
@given(floor=floors, warmup=st.integers(0, 50), total=st.integers(100, 300))
def test_a_run_ends_at_the_floor_and_never_rises_after_the_warm_up(floor: float, warmup: int, total: int) -> None:
    for schedule in (Cosine(warmup=float(warmup), floor=floor), Wsd(warmup=float(warmup), decay=40, floor=floor)):
        assert schedule.factor(total, total) == pytest.approx(floor, abs=1e-12)
        path = [schedule.factor(step, total) for step in range(max(1, warmup), total + 1)]
        assert all(later <= earlier + 1e-12 for earlier, later in pairwise(path))


def test_impossible_settings_are_refused() -> None:
    for make, said in (
        (lambda: Cosine(floor=1.5), "floor: 1.5 is not between 0 and 1"),
        (lambda: Wsd(floor=-0.1), "floor: -0.1 is not between 0 and 1"),
        (lambda: Wsd(decay=0), "decay: 0 is not positive"),
        (lambda: Constant(warmup=-1), "warmup: -1 is less than 0"),
        (lambda: Cosine(warmup=math.nan), "warmup: nan is less than 0"),
    ):
        with pytest.raises(ConfigError, match=said):
            make()


def test_every_schedule_is_tested_here() -> None:
    assert set(SCHEDULES.values()) == {Constant, Cosine, Wsd}
