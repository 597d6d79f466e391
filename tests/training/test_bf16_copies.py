"""A run whose products go with twins of the weights: the same run, as a CPU can show it; a GPU's is in test_cuda.py."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.training.conftest import FAMILIES, create
from trivium.fast.adam import FusedAdam, with_bf16_copies
from trivium.fast.bf16_copies import Bf16Copies
from trivium.kernels.hardware import INTERPRETED
from trivium.training.build_job import build_job, uses_bf16_copies
from trivium.training.context import RunContext
from trivium.training.job import Job
from trivium.training.loop import updates
from trivium.training.oom import with_oom_retry
from trivium.training.prefetch import Prefetcher, StepBatches
from trivium.training.recipe import Recipe
from trivium.training.step import StepResult, StepScalars

Make = Callable[..., Recipe]
WHOLE: dict[str, Any] = {"precision": "bf16", "batch.micro": 0}


to_the_bit = pytest.mark.skipif(INTERPRETED, reason="the kernels of a GPU round otherwise")


def made(context: RunContext, steps: int, *, twinned: bool = True) -> Job:
    """A job whose steps go with twins, which only a GPU takes by itself."""
    job = build_job(context, steps)
    assert not isinstance(job.optimizer, FusedAdam)
    if twinned:
        job.optimizer = with_bf16_copies(job.optimizer, job.model)
    return job


def copies(job: Job) -> Bf16Copies:
    assert isinstance(job.optimizer, FusedAdam)
    return job.optimizer.copies


def walked(
    recipe: Recipe, runs: Path, steps: int = 8, *, twinned: bool = True
) -> tuple[Job, list[tuple[float, float]], dict[str, Tensor]]:
    job = made(create(recipe, runs), steps, twinned=twinned)
    numbers = [(float(update.loss), float(update.norm)) for update in updates(job)]
    return job, numbers, {name: one for section in job.tensors().values() for name, one in section.items()}


@to_the_bit
@pytest.mark.parametrize("kind", FAMILIES)
def test_a_run_with_twins_is_the_run_without_to_the_bit(small: Make, tmp_path: Path, kind: str) -> None:
    recipe = small(kind, **WHOLE, clip=0.0, average="ema")
    job, numbers, tensors = walked(recipe, tmp_path / "twins")
    assert len(copies(job)._copies) >= 8
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
    context = create(small(kind, **WHOLE, average="ema"), tmp_path)
    straight, resumed = made(context, 6), made(context, 6)
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
    context = create(small(**WHOLE), tmp_path)
    job, other = made(context, 6), made(context, 6)
    steps = updates(job)
    before = {section: {name: one.clone() for name, one in each.items()} for section, each in job.tensors().items()}
    state, first = job.state(), [float(next(steps).loss) for _ in range(3)]
    job.load(lambda section: before[section], 0, state)
    assert [float(next(steps).loss) for _ in range(3)] == first
    assert [float(update.loss) for update, _ in zip(updates(other), range(3), strict=False)] == first


def test_a_batch_in_parts_has_no_use_for_them(small: Make, tmp_path: Path) -> None:
    whole = made(create(small(**WHOLE), tmp_path), 4)
    steps = updates(whole)
    next(steps)
    whole.micro = 2  # as after a lack of memory in a run that goes on
    assert torch.isfinite(next(steps).loss)
    assert not copies(whole).gradients()
    whole.micro = whole.recipe.batch.rows
    next(steps)
    copies(whole).refresh()
    for twin, layers in copies(whole)._copies:
        assert torch.equal(twin.detach(), torch.cat([layer.weight.detach() for layer in layers]).bfloat16())


def test_where_memory_runs_out_they_go_first(small: Make, tmp_path: Path) -> None:
    job = made(create(small(**WHOLE), tmp_path), 4)
    assert copies(job)._copies
    tries = []

    class Once:
        forgotten = 0

        def __call__(self, batches: StepBatches, scalars: StepScalars) -> StepResult:
            tries.append([len(batch.inputs["tokens"]) for batch in batches.batches])
            if len(tries) == 1:
                raise torch.OutOfMemoryError("CUDA out of memory")
            return StepResult(torch.zeros(4), {"tokens": "tokens"})

        def forget(self) -> None:
            self.forgotten += 1

    once = Once()
    with Prefetcher(job, 0) as prefetcher:
        with_oom_retry(job, prefetcher, once, 1.0, 0.0)
    assert tries == [[6], [3, 3]]
    assert once.forgotten == 1
    assert not copies(job)._copies
    assert torch.isfinite(next(updates(job)).loss)


def test_a_run_that_lacked_memory_has_none_when_it_goes_on(small: Make, tmp_path: Path) -> None:
    context = create(small(**WHOLE), tmp_path)
    job = made(context, 4)
    job.micro = 3
    held = {section: {name: one.clone() for name, one in each.items()} for section, each in job.tensors().items()}
    resumed = made(context, 4)
    assert copies(resumed)._copies
    resumed.load(lambda section: held[section], 0, job.state())
    assert not copies(resumed)._copies
    assert torch.isfinite(next(updates(resumed)).loss)


def test_only_a_compiled_step_in_few_bits_on_a_gpu_has_them(small: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    cuda: dict[str, Any] = {"device": "cuda", "batch.micro": 0}
    assert uses_bf16_copies(small(**cuda, precision="bf16", compile="graphs"))
    assert uses_bf16_copies(small(**cuda, precision="fp8", compile="graphs"))
    assert not uses_bf16_copies(small(**cuda, precision="bf16", compile="on"))  # too small to be worth it
    monkeypatch.setattr("trivium.training.build_job.LARGE", 1000)
    assert uses_bf16_copies(small(**cuda, precision="bf16", compile="on"))
    for changes in (
        {**cuda, "precision": "bf16", "compile": "off"},
        {**cuda, "precision": "fp32", "compile": "on"},
        {**cuda, "precision": "fp16", "compile": "on"},
        {**cuda, "precision": "bf16", "compile": "on", "batch.micro": 2},
        {"precision": "bf16", "compile": "on", "batch.micro": 0},
    ):
        assert not uses_bf16_copies(small(**changes))
