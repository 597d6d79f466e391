"""Fewer bits: the same losses as float32, and a loss scale that finds its own height."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from tests.training.conftest import create
from trivium.training.build_job import build_job
from trivium.training.device import settle
from trivium.training.job import Job
from trivium.training.loop import updates
from trivium.training.recipe import Recipe
from trivium.training.scaling import Dynamic
from trivium.training.step import Update

Make = Callable[..., Recipe]


def held(job: Job) -> list[Tensor]:
    """Every tensor of a checkpoint, as it is now."""
    return [tensor.clone() for section in job.tensors().values() for tensor in section.values()]


def same(one: list[Tensor], two: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, two, strict=True))


def _with_fp8(recipe: Recipe) -> Recipe:
    """As on a GPU that has such products."""
    known = "bf16" if recipe.precision == "fp8" else recipe.precision
    return replace(settle(replace(recipe, precision=known)), precision=recipe.precision)


def test_two_hundred_steps_in_fewer_bits_stay_within_one_percent_of_fp32(
    small: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """spec: training §4; the numbers of fp8 are multiplied in float32 here."""
    monkeypatch.setattr("trivium.training.setup.settle", _with_fp8)
    losses = {}
    for name in ("fp32", "bf16", "bf16 stream", "fp16", "fp8"):
        precision, _, stream = name.partition(" ")
        stream = "bf16" if stream else "fp32"
        recipe = small(
            precision=precision,
            residual_dtype=stream,
            **{"budget.steps": 200, "batch.micro": 0, "model.decoder.layers": 1},
        )
        job = build_job(create(recipe, tmp_path / name.replace(" ", "-")), 200)
        losses[name] = torch.stack([update.loss for update in updates(job)])
    assert losses["fp32"][-1] < losses["fp32"][0] - 1  # it learns, or the comparison would be easy
    # over ten steps: fp16 may lose its first batch to an overflow, and then is an update behind on every batch
    means = {name: each.view(20, 10).mean(1) for name, each in losses.items()}
    for name in ("bf16", "bf16 stream", "fp16", "fp8"):
        torch.testing.assert_close(means[name], means["fp32"], rtol=0.01, atol=0)
        assert not torch.equal(losses[name], losses["fp32"])  # it did compute in another precision
    assert not torch.equal(losses["fp8"], losses["bf16"])
    assert not torch.equal(losses["bf16 stream"], losses["bf16"])


def test_an_overflow_halves_the_scale_and_moves_nothing_but_the_data(small: Make, tmp_path: Path) -> None:
    recipe = small(precision="fp16", average="ema", **{"schedule.warmup": 10.0})
    job = build_job(create(recipe, tmp_path), 20)
    assert isinstance(job.scaler, Dynamic)
    job.scaler.scale = 2.0**10
    steps = updates(job)
    rates = [update.rate for update in itertools.islice(steps, 3)]
    job.scaler.scale = 2.0**60
    before, cursor = held(job), job.cursor
    update = next(steps)
    assert update.overflow
    assert not update.finite
    assert update.scale == 2.0**60
    assert torch.isfinite(update.loss)
    assert same(held(job), before)
    assert job.scaler.scale == 2.0**59
    assert (job.step, job.cursor) == (4, cursor + recipe.batch.rows)  # the data goes on
    job.scaler.scale = 2.0**10
    after = next(steps)
    assert not same(held(job), before)
    # the schedule does not: this is its fourth update, though the fifth step
    assert [*rates, after.rate] == pytest.approx([recipe.optim.rate * n / 10 for n in (1, 2, 3, 4)])


def test_an_fp16_run_goes_on_exactly_after_an_overflow(small: Make, tmp_path: Path) -> None:
    context = create(small(precision="fp16"), tmp_path)
    straight = build_job(context, 12)
    assert isinstance(straight.scaler, Dynamic)
    straight.scaler.scale, straight.scaler.patience = 2.0**40, 3  # overflows first, then grows now and then
    losses, saved = [], None
    for update in updates(straight):
        losses.append(float(update.loss))
        if update.step == 6:
            saved = copy.deepcopy((straight.tensors(), straight.state()))
    assert saved is not None
    again = build_job(context, 12)
    assert isinstance(again.scaler, Dynamic)
    again.scaler.patience = 3
    tensors, state = saved
    again.load(tensors.__getitem__, 6, state)
    assert [float(update.loss) for update in updates(again)] == losses[6:]
    assert same(held(again), held(straight))
    assert again.state() == straight.state()
    assert straight.overflows > 0


def test_a_loss_that_is_not_finite_is_no_overflow(small: Make, tmp_path: Path) -> None:
    job = build_job(create(small(precision="fp16"), tmp_path), 20)
    with torch.no_grad():
        next(job.model.parameters()).fill_(torch.inf)
    scale = job.scaler.scale
    update: Update = next(updates(job))
    assert not update.overflow
    assert not update.finite
    assert job.scaler.scale == scale  # a smaller one would not help
    assert job.overflows == 0


def test_a_scale_below_one_excuses_nothing() -> None:
    scaler = Dynamic(scale=1.0)
    fine, broken = torch.tensor(1.0), torch.tensor(torch.inf)
    assert scaler.overflowed(fine, broken)
    assert scaler.scale == 0.5
    assert not scaler.overflowed(fine, broken)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.booleans(), max_size=40), st.integers(1, 5))
def test_the_scale_follows_that_of_torch(overflows: list[bool], patience: int) -> None:
    parameter = nn.Parameter(torch.ones(()))
    optimizer = torch.optim.SGD([parameter], lr=0.0)
    oracle = torch.amp.GradScaler("cpu", init_scale=2.0**16, growth_interval=patience)
    ours = Dynamic(scale=2.0**16, patience=patience)
    for overflow in overflows:
        value = torch.tensor(torch.inf if overflow else 1.0)
        loss = oracle.scale(parameter * 1.0)
        loss.backward()  # type: ignore[no-untyped-call]
        assert parameter.grad is not None
        parameter.grad.mul_(value)
        oracle.step(optimizer)
        oracle.update()
        optimizer.zero_grad()
        ours.overflowed(torch.tensor(1.0), value)
        assert ours.scale == oracle.get_scale()


def test_unscaling_gives_back_the_gradients() -> None:
    """With powers of two nothing is lost: the gradients are those of the unscaled loss, bit for bit."""
    one, two = nn.Linear(3, 3), nn.Linear(3, 3)
    two.load_state_dict(one.state_dict())
    x = torch.randn(5, 3)
    scaler = Dynamic()
    one(x).square().sum().backward()
    scaler.scale_loss(two(x).square().sum()).backward()  # type: ignore[no-untyped-call]
    scaler.unscale(two.parameters())
    for a, b in zip(one.parameters(), two.parameters(), strict=True):
        assert a.grad is not None
        assert b.grad is not None
        assert torch.equal(a.grad, b.grad)
