"""Memory that runs out halves the rows at a time; recomputing the inside of blocks changes no number."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.training.conftest import FAMILIES, create, finish, resume, start
from tests.training.test_resume import assert_equal_ends
from trivium.config import read
from trivium.data.batch import Batch
from trivium.errors import OutOfMemory
from trivium.models.transformer import weights
from trivium.parts.losses import Losses
from trivium.training import forward
from trivium.training.build_job import build_job
from trivium.training.calibrate import rows_that_fit, try_micro_batch
from trivium.training.device import autocast
from trivium.training.events import Said
from trivium.training.job import Job
from trivium.training.loop import updates
from trivium.training.oom import is_out_of_memory
from trivium.training.recipe import Recipe

Make = Callable[..., Recipe]


def tight(most: int) -> Callable[..., Callable[[Batch], Losses]]:
    """A computation on a device that holds so many rows; what it did before it failed stays done."""

    def computation(*arguments: object) -> Callable[[Batch], Losses]:
        inner = forward.computation(*arguments)  # type: ignore[arg-type]

        def compute(batch: Batch) -> Losses:
            if len(batch.inputs["tokens"]) > most:
                torch.rand(3)  # the random numbers of a half-done forward pass
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
            return inner(batch)

        return compute

    return computation


def limited(job: Job, most: int) -> Job:
    job.compute = tight(most)(job.model, job.task, autocast(job.recipe), False)
    return job


@pytest.mark.parametrize("kind", FAMILIES)
def test_running_out_of_memory_repeats_the_step_with_fewer_rows(small: Make, tmp_path: Path, kind: str) -> None:
    """The end is that of a run with the smaller number from the beginning, bit for bit, dropout included."""
    open_context = create(small(kind, **{"batch.micro": 0}), tmp_path / "open")
    job = limited(build_job(open_context, 5), 2)
    notes = [update.note for update in updates(job)]
    assert job.micro == 2  # 6, 3, 2
    assert notes == ["out of memory at step 1: from here on 2 rows at a time (batch.micro)", "", "", "", ""]
    set_context = create(small(kind, **{"batch.micro": 2}), tmp_path / "set")
    other = build_job(set_context, 5)
    list(updates(other))
    own = weights(other.model)
    assert all(torch.equal(tensor, own[name]) for name, tensor in weights(job.model).items())


def test_what_was_computed_before_memory_ran_out_does_not_count(small: Make, tmp_path: Path) -> None:
    """The first half of a batch has left its gradients when the second one fails."""
    job = build_job(create(small(**{"batch.micro": 0}), tmp_path / "open"), 1)
    job.micro = 3
    inner, calls = job.compute, iter(range(100))

    def compute(batch: Batch) -> Losses:
        if next(calls) == 1:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return inner(batch)

    job.compute = compute
    other = build_job(create(small(**{"batch.micro": 2}), tmp_path / "set"), 1)
    [update], [wanted] = list(updates(job)), list(updates(other))
    assert (float(update.loss), float(update.norm)) == (float(wanted.loss), float(wanted.norm))
    own = weights(other.model)
    assert all(torch.equal(tensor, own[name]) for name, tensor in weights(job.model).items())


@pytest.mark.parametrize("where", ["optimizer", "average"])
def test_a_step_whose_update_has_begun_is_not_tried_again(
    small: Make, tmp_path: Path, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or some weights would move twice."""
    job = build_job(create(small(average="ema", **{"batch.micro": 0}), tmp_path), 4)

    def full(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    if where == "optimizer":
        monkeypatch.setattr(job.optimizer, "step", full)
    else:
        monkeypatch.setattr(job.average, "follow", full)
    with pytest.raises(torch.OutOfMemoryError) as caught:
        next(updates(job))
    assert is_out_of_memory(caught.value)  # so that the user is told what to change
    assert job.micro == 6


def test_the_rows_that_fit_are_in_the_checkpoint_and_obeyed(small: Make, tmp_path: Path) -> None:
    context = create(small(**{"batch.micro": 0}), tmp_path)
    job = limited(build_job(context, 4), 3)
    next(updates(job))
    again = build_job(context, 4)
    again.load(job.tensors().__getitem__, 1, job.state())
    assert again.micro == 3
    chosen = build_job(create(small(**{"batch.micro": 6}), tmp_path / "chosen"), 4)
    chosen.load(job.tensors().__getitem__, 1, job.state())
    assert chosen.micro == 6  # what the recipe says wins


def test_a_number_that_the_user_set_is_not_changed(small: Make, tmp_path: Path) -> None:
    job = limited(build_job(create(small(**{"batch.micro": 4}), tmp_path), 5), 2)
    with pytest.raises(torch.OutOfMemoryError):
        next(updates(job))
    assert job.micro == 4


def test_a_row_that_does_not_fit_alone_is_an_error(small: Make, tmp_path: Path) -> None:
    job = limited(build_job(create(small(**{"batch.micro": 0}), tmp_path), 5), 0)
    with pytest.raises(OutOfMemory, match="with a single row of 16 tokens; set recompute=blocks"):
        next(updates(job))


def test_any_other_error_is_not_taken_for_memory(small: Make, tmp_path: Path) -> None:
    job = build_job(create(small(**{"batch.micro": 0}), tmp_path), 5)

    def broken(batch: Batch) -> Losses:
        raise RuntimeError("the shapes do not match")

    job.compute = broken
    with pytest.raises(RuntimeError, match="shapes"):
        next(updates(job))


def test_a_trial_finds_the_rows_that_fit(small: Make, tmp_path: Path) -> None:
    context = create(small(**{"batch.micro": 0, "batch.rows": 20}), tmp_path)
    for most, found in ((20, 20), (19, 10), (9, 5), (4, 3), (1, 1)):
        assert rows_that_fit(lambda most=most: limited(build_job(context, 1), most)) == found  # type: ignore[misc]


def test_what_a_trial_found_is_written_into_the_recipe(
    small: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU: the run's own file then repeats it anywhere."""
    monkeypatch.setattr("trivium.training.build_job.computation", tight(2))
    made = create(small(**{"batch.micro": 0}), tmp_path / "tight", fit=try_micro_batch)
    session = resume(made.folder)
    assert session.recipe.micro == 2
    assert read(session.folder / "config.toml")["batch"]["micro"] == 2
    finish(session)
    monkeypatch.undo()
    wide = start(small(**{"batch.micro": 2}), tmp_path / "wide")
    finish(wide)
    for folder in (session.folder, wide.folder):
        assert (folder / "model.safetensors").is_file()
    assert_equal_ends(session.folder, wide.folder, 20)


def test_a_run_tells_of_it_and_goes_on_with_as_many(
    small: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trivium.training.build_job.computation", tight(3))
    session = start(small(**{"batch.micro": 0}), tmp_path)
    events = session.events()
    told: list[str] = []
    for event in events:
        told += [event.text] if isinstance(event, Said) else []
        if (session.folder / "checkpoints" / "step-00000010").exists():
            break
    events.close()  # type: ignore[attr-defined]
    assert sum("out of memory at step 1" in text for text in told) == 1
    again = [event.text for event in finish(resume(session.folder)) if isinstance(event, Said)]
    assert not any("out of memory" in text for text in again)


def test_too_little_memory_for_one_row_is_a_sentence(
    small: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trivium.training.build_job.computation", tight(0))
    with pytest.raises(OutOfMemory, match="out of memory on cpu"):
        create(small(**{"batch.micro": 0}), tmp_path / "runs", fit=try_micro_batch)
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("kind", FAMILIES)
def test_recomputing_blocks_gives_the_same_bits(small: Make, tmp_path: Path, kind: str) -> None:
    found = []
    for how in ("none", "blocks"):
        job = build_job(create(small(kind, recompute=how), tmp_path / how), 4)
        assert job.model.recompute == (how == "blocks")
        found.append(([float(update.loss) for update in updates(job)], weights(job.model)))
    assert found[0][0] == found[1][0]
    assert all(torch.equal(found[0][1][name], tensor) for name, tensor in found[1][1].items())
