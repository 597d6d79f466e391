"""Exact resume and every optimizer on a GPU; skipped where there is none."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.training.conftest import FAMILIES, finish, resume, start
from tests.training.test_resume import assert_equal_ends, cut_copy
from trivium.fast.adam import FusedAdam, with_bf16_copies
from trivium.fast.choose import plain
from trivium.optim.options import OPTIMIZERS
from trivium.training.build_job import build_job
from trivium.training.loop import updates
from trivium.training.metrics import rows
from trivium.training.readout import ReadOut
from trivium.training.recipe import Recipe

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
Make = Callable[..., Recipe]


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    yield
    torch.use_deterministic_algorithms(False)


def straight_and_resumed(recipe: Recipe, folder: Path, step: int) -> tuple[Path, Path]:
    """A run in one go, and one that was stopped after `step`."""
    straight = start(recipe, folder / "straight")
    finish(straight)
    copy = cut_copy(straight.folder, step, folder)
    finish(resume(copy))
    return straight.folder, copy


@pytest.mark.parametrize("kind", FAMILIES)
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_resuming_on_a_gpu_gives_the_same_bits(small: Make, tmp_path: Path, kind: str, precision: str) -> None:
    changes: dict[str, Any] = {"checkpoint.every": 1, "checkpoint.keep": 30, "average": "ema"}
    recipe = small(kind, device="cuda", precision=precision, compile="off", deterministic="on", **changes)
    one, other = straight_and_resumed(recipe, tmp_path, 10)
    assert_equal_ends(one, other, 20)
    assert len({row["loss"] for row in rows(one / "metrics.jsonl")}) > 8


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # what importing inductor says of torch itself
def test_resuming_a_compiled_run_gives_the_same_bits(small: Make, tmp_path: Path) -> None:
    changes: dict[str, Any] = {"checkpoint.every": 1, "checkpoint.keep": 30}
    recipe = small(device="cuda", precision="bf16", compile="on", deterministic="on", **changes)
    assert_equal_ends(*straight_and_resumed(recipe, tmp_path, 10), 20)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_every_optimizer_moves_the_weights_and_resumes(small: Make, tmp_path: Path, optimizer: str) -> None:
    changes: dict[str, Any] = {"checkpoint.every": 1, "checkpoint.keep": 30, "optim": optimizer}
    recipe = small(device="cuda", precision="fp32", compile="off", deterministic="on", **changes)
    one, other = straight_and_resumed(recipe, tmp_path, 10)
    assert_equal_ends(one, other, 20)
    losses = [row["loss"] for row in rows(one / "metrics.jsonl") if row["kind"] == "train"]
    assert losses[-1] < losses[0]


@contextlib.contextmanager
def no_waiting() -> Iterator[None]:
    """Every wait of the host for the device is an error."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that the mode itself is a prototype
        try:
            torch.cuda.set_sync_debug_mode("error")
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("twinned", [False, True])
@pytest.mark.parametrize("kind", FAMILIES)
def test_a_step_never_waits_for_the_gpu(small: Make, tmp_path: Path, kind: str, twinned: bool) -> None:
    """From the second step on nothing between two updates reads a number off the device."""
    recipe = small(kind, device="cuda", precision="bf16", compile="off", **{"batch.micro": 0 if twinned else 2})
    job = build_job(start(recipe, tmp_path).context, 10)
    if twinned:
        job.optimizer = with_bf16_copies(job.optimizer, job.model)
    assert isinstance(job.optimizer, FusedAdam) == twinned
    steps, pending = updates(job), ReadOut()
    next(steps)
    with no_waiting():
        for _ in range(3):
            pending.add(next(steps))
    assert [update.step for update, *_ in pending.read()] == [2, 3, 4]
    with no_waiting(), pytest.raises(RuntimeError, match="synchroniz"):  # the alarm itself works
        torch.ones((), device="cuda").item()


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
@pytest.mark.parametrize("kind", FAMILIES)
@pytest.mark.parametrize(("optimizer", "micro"), [("adamw", 2), ("adamw", 0), ("muon", 2)])
def test_recorded_steps_are_the_same_as_the_others(
    small: Make, tmp_path: Path, kind: str, optimizer: str, micro: int
) -> None:
    """The first steps are not recorded: a run that is stopped and goes on has others among them, and dropout."""
    changes: dict[str, Any] = {"checkpoint.every": 1, "checkpoint.keep": 30, "average": "ema", "optim": optimizer}
    changes["batch.micro"] = micro  # whole batches go with twins
    recipe = small(kind, device="cuda", precision="bf16", compile="graphs", deterministic="on", **changes)
    assert_equal_ends(*straight_and_resumed(recipe, tmp_path, 10), 20)


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_a_recorded_run_is_close_to_a_plain_one(small: Make, tmp_path: Path) -> None:
    found = []
    for how in ("on", "graphs"):
        ground = start(small(device="cuda", precision="fp32", compile=how, average="ema"), tmp_path / how).context
        job = build_job(ground, 12)
        found.append([float(update.loss) for update in updates(job)])
    assert found[1] == pytest.approx(found[0], rel=1e-4)


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
@pytest.mark.parametrize("precision", ["bf16", "fp8"])
def test_a_run_with_twins_is_close_to_one_without(small: Make, tmp_path: Path, precision: str) -> None:
    """Their gradients are those of the weights, moved by a kernel of ours; rounding is then not quite the same."""
    found = []
    for twinned in (True, False):
        changes: dict[str, Any] = {"batch.rows": 8, "batch.micro": 0, "model.width": 64}
        recipe = small(device="cuda", precision=precision, compile="graphs", **changes)
        job = build_job(start(recipe, tmp_path / str(twinned)).context, 20)
        assert isinstance(job.optimizer, FusedAdam)
        if not twinned:
            job.optimizer = job.optimizer.adam
        found.append([float(update.loss) for update in updates(job)])
    assert found[1][-1] < found[1][0] - 0.3
    assert found[0] == pytest.approx(found[1], rel=2e-2 if precision == "fp8" else 1e-2)


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_a_run_with_fast_post_norms_resumes_and_is_close_to_a_plain_one(
    small: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    changes: dict[str, Any] = {"model.encoder.block.residual": "post", "model.encoder.block.attention.bias": "all"}
    changes |= {"model.encoder.block.dropout": 0.0, "model.encoder.block.attention.dropout": 0.0}
    changes |= {"residual_dtype": "bf16", "batch.micro": 0, "checkpoint.every": 1, "checkpoint.keep": 30}
    from trivium.kernels import postnorm

    made: list[int] = []
    normed = postnorm.normed

    def counted(*given: Any) -> tuple[torch.Tensor, torch.Tensor]:
        made.append(1)
        return normed(*given)

    monkeypatch.setattr(postnorm, "normed", counted)
    recipe = small("encoder", device="cuda", precision="bf16", compile="graphs", deterministic="on", **changes)
    straight, resumed = straight_and_resumed(recipe, tmp_path, 10)
    assert_equal_ends(straight, resumed, 20)
    assert made
    ground = start(recipe, tmp_path / "plain").context
    losses = []
    for quick in (True, False):
        made.clear()
        job = build_job(ground, 20)
        if not quick:
            plain(job.model)
            assert isinstance(job.optimizer, FusedAdam)
            job.optimizer = job.optimizer.adam
        losses.append([float(update.loss) for update in updates(job)])
        assert bool(made) == quick
    assert losses[0] == pytest.approx(losses[1], rel=1e-2)
