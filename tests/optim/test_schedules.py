"""Schedules against worked values, and against those of transformers."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any, Literal

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.optimization import get_inverse_sqrt_schedule, get_linear_schedule_with_warmup

from trivium.errors import ConfigError
from trivium.optim.schedules import SCHEDULES, Constant, Cosine, InverseSqrt, Linear, Noam, Schedule, Slanted, Wsd


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


# step -> the rate for (width, warm-up) of (512, 4000), (1024, 4000) and (512, 16000)
NOAM = {
    1: (1.746928e-7, 1.235265e-7, 2.183660e-8),
    100: (1.746928e-5, 1.235265e-5, 2.183660e-6),
    1000: (1.746928e-4, 1.235265e-4, 2.183660e-5),
    2000: (3.493856e-4, 2.470529e-4, 4.367320e-5),
    4000: (6.987712e-4, 4.941059e-4, 8.734641e-5),
    8000: (4.941059e-4, 3.493856e-4, 1.746928e-4),
    10000: (4.419417e-4, 3.125000e-4, 2.183660e-4),
    16000: (3.493856e-4, 2.470529e-4, 3.493856e-4),
    100000: (1.397542e-4, 9.882118e-5, 1.397542e-4),
    300000: (8.068715e-5, 5.705443e-5, 8.068715e-5),
}


@pytest.mark.parametrize(("column", "width", "warmup"), [(0, 512, 4000), (1, 1024, 4000), (2, 512, 16000)])
def test_noam_gives_the_worked_rates(column: int, width: int, warmup: int) -> None:
    schedule = Noam(warmup=warmup)
    rate = schedule.peak(width)
    assert rate == pytest.approx((width * warmup) ** -0.5)
    for step, worked in NOAM.items():
        assert rate * schedule.factor(step, 300_000) == pytest.approx(worked[column], rel=1e-6)


def test_inverse_sqrt_gives_the_worked_rates() -> None:
    for step, worked in {1: 0.01, 10_000: 0.01, 40_000: 0.005, 2**19: 0.001381}.items():
        assert 0.01 * InverseSqrt().factor(step, 2**19) == pytest.approx(worked, abs=5e-7)


def test_slanted_triangles_give_the_worked_rates() -> None:
    worked = {0: 3.125e-5, 50: 5.15625e-4, 100: 1e-3, 550: 5.15625e-4, 1000: 3.125e-5}
    assert rates(Slanted(), [*worked]) == pytest.approx([*worked.values()], abs=1e-12)


def test_the_cut_of_slanted_triangles_is_rounded_down() -> None:
    assert max(range(1, 1010), key=lambda step: Slanted().factor(step, 1009)) == 100


def test_linear_falls_in_a_straight_line() -> None:
    worked = {0: 0, 50: 5e-4, 100: 1e-3, 325: 7.5e-4, 550: 5e-4, 775: 2.5e-4, 1000: 0, 1200: 0}
    assert rates(Linear(warmup=100), [*worked]) == pytest.approx([*worked.values()], abs=1e-12)
    assert rates(Linear(warmup=100, floor=0.1), [550, 1000]) == pytest.approx([5.5e-4, 1e-4])  # OPT: to 10 %


@pytest.mark.parametrize("warmup", [1, 7, 40])
def test_linear_and_noam_are_those_of_transformers(warmup: int) -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    linear: Any = get_linear_schedule_with_warmup(optimizer, warmup, 100)
    root: Any = get_inverse_sqrt_schedule(optimizer, warmup)
    for ours, theirs in ((Linear(warmup=float(warmup)), linear), (Noam(warmup=warmup), root)):
        (function,) = theirs.lr_lambdas
        for step in range(101):
            assert ours.factor(step, 100) == pytest.approx(function(step), abs=1e-12), step


@pytest.mark.parametrize(
    "schedule",
    [Constant(warmup=0), Cosine(warmup=0), Wsd(warmup=0), Linear(warmup=0), Slanted(warmup=0), Noam(warmup=0)],
    ids=str,
)
def test_no_warm_up_begins_at_the_peak(schedule: Schedule) -> None:
    assert schedule.factor(1, 1000) == pytest.approx(1.0, abs=2e-3)
    for step, total in ((0, 0), (0, 1), (1, 1), (2, 1), (1, 0)):
        assert 0 <= schedule.factor(step, total) <= 1


def test_no_warm_up_leaves_noam_a_peak() -> None:
    assert Noam(warmup=0).peak(100) == pytest.approx(0.1)


def test_lengths_below_one_are_shares_of_the_run() -> None:
    for step in range(0, 1001, 50):
        assert Cosine(warmup=0.1).factor(step, 1000) == Cosine(warmup=100).factor(step, 1000)
        assert Wsd(warmup=0.1, decay=0.2).factor(step, 1000) == Wsd(warmup=100, decay=200).factor(step, 1000)
        assert Linear(warmup=0.1).factor(step, 1000) == Linear(warmup=100).factor(step, 1000)
        assert Slanted(warmup=0.1).factor(step, 1000) == Slanted(warmup=100).factor(step, 1000)


@settings(max_examples=100, deadline=None)
@given(branch=st.integers(100, 4800), decay=st.integers(1, 400), shape=st.sampled_from(["linear", "sqrt"]))
def test_the_decay_of_wsd_may_start_from_any_flat_step(
    branch: int, decay: int, shape: Literal["linear", "sqrt"]
) -> None:
    """The run that ends `decay` steps after the branch is the long one up to there, and then falls at once."""
    long, short = Wsd(warmup=100, decay=200), Wsd(warmup=100, decay=decay, shape=shape)
    total = branch + decay
    for step in {1, 50, 100, (100 + branch) // 2, branch}:
        assert short.factor(step, total) == long.factor(step, 5000)
    for step in {branch + 1, branch + decay // 2, total}:
        share = (step - branch) / decay
        assert short.factor(step, total) == pytest.approx(1 - (share if shape == "linear" else share**0.5))


floors = st.floats(0, 1)
lengths = st.one_of(st.floats(0, 0.99), st.integers(1, 300).map(float))
schedules = st.one_of(
    st.builds(Constant, warmup=lengths),
    st.builds(Cosine, warmup=lengths, floor=floors),
    st.builds(Linear, warmup=lengths, floor=floors),
    st.builds(Noam, warmup=st.integers(0, 300)),
    st.builds(InverseSqrt, plateau=st.integers(1, 300)),
    st.builds(Slanted, warmup=lengths, ratio=st.floats(1, 100)),
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
    start = float(warmup)
    for schedule in (
        Cosine(warmup=start, floor=floor),
        Linear(warmup=start, floor=floor),
        Wsd(warmup=start, decay=40, floor=floor),
    ):
        assert schedule.factor(total, total) == pytest.approx(floor, abs=1e-12)
        path = [schedule.factor(step, total) for step in range(max(1, warmup), total + 1)]
        assert all(later <= earlier + 1e-12 for earlier, later in pairwise(path))


def test_impossible_settings_are_refused() -> None:
    for make, said in (
        (lambda: Cosine(floor=1.5), "floor: 1.5 is not between 0 and 1"),
        (lambda: Wsd(floor=-0.1), "floor: -0.1 is not between 0 and 1"),
        (lambda: Wsd(decay=0), "decay: 0 is not positive"),
        (lambda: Constant(warmup=-1), "warmup: -1 is less than 0"),
        (lambda: Linear(warmup=-1), "warmup: -1 is less than 0"),
        (lambda: Linear(floor=2), "floor: 2 is not between 0 and 1"),
        (lambda: Noam(warmup=-1), "warmup: -1 is less than 0"),
        (lambda: InverseSqrt(plateau=0), "plateau: 0 is less than 1"),
        (lambda: Slanted(ratio=0.5), "ratio: 0.5 is less than 1"),
        (lambda: Cosine(warmup=math.nan), "warmup: nan is less than 0"),
    ):
        with pytest.raises(ConfigError, match=said):
            make()


def test_every_schedule_is_tested_here() -> None:
    assert set(SCHEDULES.values()) == {Constant, Cosine, Wsd, Linear, Noam, InverseSqrt, Slanted}
