"""A run whose products go with twins of the weights: the same run, as a CPU can show it; a GPU's is in test_cuda.py."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.training.conftest import FAMILIES, laid
from trivium.fast.adam import with_twins
from trivium.kernels.hardware import INTERPRETED
from trivium.training import prepare
from trivium.training.job import Job
from trivium.training.loop import fitted, updates
from trivium.training.prepare import Ground
from trivium.training.recipe import Recipe

Make = Callable[..., Recipe]
WHOLE: dict[str, Any] = {"precision": "bf16", "batch.micro": 0}


to_the_bit = pytest.mark.skipif(INTERPRETED, reason="the kernels of a GPU round otherwise")


def made(ground: Ground, steps: int, *, twinned: bool = True) -> Job:
    """A job whose steps go with twins, which only a GPU takes by itself."""
    job = prepare.job(ground, steps)
    assert job.twins is None
    if twinned:
        job.optimizer, job.twins = with_twins(job.optimizer, job.model)
        assert job.twins is not None
    return job


def walked(
    recipe: Recipe, runs: Path, steps: int = 8, *, twinned: bool = True
) -> tuple[Job, list[tuple[float, float]], dict[str, Tensor]]:
    job = made(laid(recipe, runs), steps, twinned=twinned)
    numbers = [(float(update.loss), float(update.norm)) for update in updates(job)]
    return job, numbers, {name: one for section in job.tensors().values() for name, one in section.items()}


@to_the_bit
@pytest.mark.parametrize("kind", FAMILIES)
def test_a_run_with_twins_is_the_run_without_to_the_bit(small: Make, tmp_path: Path, kind: str) -> None:
    recipe = small(kind, **WHOLE, clip=0.0, average="ema")
    job, numbers, tensors = walked(recipe, tmp_path / "twins")
    assert job.twins is not None
    used = job.twins._twins
    assert len(used) >= 8
    _, plain, expected = walked(recipe, tmp_path / "plain", twinned=False)
    assert [loss for loss, _ in numbers] == [loss for loss, _ in plain]
    assert [norm for _, norm in numbers] == pytest.approx([norm for _, norm in plain], rel=1e-5)
    assert tensors.keys() == expected.keys()
    assert all(torch.equal(one, expected[name]) for name, one in tensors.items())


def test_clipping_reaches_what_twins_have(small: Make, tmp_path: Path) -> None:
    recipe = small(**WHOLE, clip=0.05, optim="adamw", **{"optim.eps": 1.0})  # so that the size of a gradient matters
    _, _, tensors = walked(recipe, tmp_path / "twins")
    _, numbers, expected = walked(recipe, tmp_path / "plain", twinned=False)
    assert all(norm > 0.1 for _, norm in numbers)  # it was clipped
    for name, one in tensors.items():
        torch.testing.assert_close(one, expected[name], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("kind", FAMILIES)
def test_a_run_with_twins_goes_on_exactly(small: Make, tmp_path: Path, kind: str) -> None:
    """As from a checkpoint after three of six steps; whole runs that stop and go on are in test_cuda.py."""
    ground = laid(small(kind, **WHOLE, average="ema"), tmp_path)
    straight, resumed = made(ground, 6), made(ground, 6)
    steps = updates(straight)
    for _ in range(3):
        next(steps)
    held = {section: {name: one.clone() for name, one in each.items()} for section, each in straight.tensors().items()}
    resumed.load(lambda section: held[section], straight.step, straight.state())
    rest = [(float(update.loss), float(update.norm)) for update in steps]
    assert len(rest) == 3
    assert [(float(update.loss), float(update.norm)) for update in updates(resumed)] == rest
    ours, theirs = resumed.tensors(), straight.tensors()
    assert all(torch.equal(one, theirs[part][name]) for part, each in ours.items() for name, one in each.items())


def test_a_checkpoint_that_is_loaded_reaches_the_twins(small: Make, tmp_path: Path) -> None:
    ground = laid(small(**WHOLE), tmp_path)
    job, other = made(ground, 6), made(ground, 6)
    steps = updates(job)
    before = {section: {name: one.clone() for name, one in each.items()} for section, each in job.tensors().items()}
    state, first = job.state(), [float(next(steps).loss) for _ in range(3)]
    job.load(lambda section: before[section], 0, state)
    assert [float(next(steps).loss) for _ in range(3)] == first
    assert [float(update.loss) for update, _ in zip(updates(other), range(3), strict=False)] == first


def test_a_batch_in_parts_has_no_use_for_them(small: Make, tmp_path: Path) -> None:
    whole = made(laid(small(**WHOLE), tmp_path), 4)
    assert whole.twins is not None
    steps = updates(whole)
    next(steps)
    whole.micro = 2  # as after a lack of memory in a run that goes on
    assert torch.isfinite(next(steps).loss)
    assert not whole.twins.gradients()
    whole.micro = whole.recipe.batch.rows
    next(steps)
    whole.twins.refresh()
    for twin, layers in whole.twins._twins:
        assert torch.equal(twin.detach(), torch.cat([layer.weight.detach() for layer in layers]).bfloat16())


def test_where_memory_runs_out_they_go_first(small: Make, tmp_path: Path) -> None:
    job = made(laid(small(**WHOLE), tmp_path), 4)
    assert job.twins is not None
    tries = []

    class Once:
        def take(self) -> int:
            return job.micro

    def attempt(made: int) -> int:
        tries.append(made)
        if len(tries) == 1:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return made

    fitted(job, Once(), attempt)  # type: ignore[arg-type]
    assert tries == [6, 3]
    assert not job.twins._twins
    assert torch.isfinite(next(updates(job)).loss)


def test_a_run_that_lacked_memory_has_none_when_it_goes_on(small: Make, tmp_path: Path) -> None:
    ground = laid(small(**WHOLE), tmp_path)
    job = made(ground, 4)
    job.micro = 3
    held = {section: {name: one.clone() for name, one in each.items()} for section, each in job.tensors().items()}
    resumed = made(ground, 4)
    assert resumed.twins is not None
    assert resumed.twins._twins
    resumed.load(lambda section: held[section], 0, job.state())
    assert not resumed.twins._twins
    assert torch.isfinite(next(updates(resumed)).loss)


def test_only_a_compiled_step_in_few_bits_on_a_gpu_has_them(small: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    cuda: dict[str, Any] = {"device": "cuda", "batch.micro": 0}
    assert prepare.twinned(small(**cuda, precision="bf16", compile="graphs"))
    assert prepare.twinned(small(**cuda, precision="fp8", compile="graphs"))
    assert not prepare.twinned(small(**cuda, precision="bf16", compile="on"))  # too small to be worth it
    monkeypatch.setattr(prepare, "LARGE", 1000)
    assert prepare.twinned(small(**cuda, precision="bf16", compile="on"))
    for changes in (
        {**cuda, "precision": "bf16", "compile": "off"},
        {**cuda, "precision": "fp32", "compile": "on"},
        {**cuda, "precision": "fp16", "compile": "on"},
        {**cuda, "precision": "bf16", "compile": "on", "batch.micro": 2},
        {"precision": "bf16", "compile": "on", "batch.micro": 0},
    ):
        assert not prepare.twinned(small(**changes))
