"""Batches made ahead: the same as those made in time, whatever comes in between, and no thread stays behind."""

from __future__ import annotations

import threading
import time
import traceback
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.training.conftest import FAMILIES, create
from tests.training.test_memory import limited
from trivium.data.packing import RowBatch, Rows
from trivium.models.transformer import weights
from trivium.parts.losses import Loss, Losses
from trivium.training import prefetch as making
from trivium.training import process
from trivium.training.build_job import build_job
from trivium.training.job import Job
from trivium.training.loop import updates
from trivium.training.prefetch import Prefetcher, StepBatches, step_batches
from trivium.training.recipe import Recipe

Make = Callable[..., Recipe]


def threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("batches")]


def same(one: StepBatches, other: StepBatches) -> bool:
    pairs = [
        (first[name], second[name])
        for a, b in zip(one.batches, other.batches, strict=True)
        for first, second in ((a.inputs, b.inputs), (a.targets, b.targets))
        for name in first | second
    ]
    return one.counts == other.counts and all(torch.equal(a, b) for a, b in pairs)


@pytest.mark.parametrize("kind", FAMILIES)
def test_a_run_whose_batches_are_made_ahead_is_the_same_to_the_last_bit(small: Make, tmp_path: Path, kind: str) -> None:
    found = []
    for ahead in (0, 1, 3):
        job = build_job(create(small(kind), tmp_path / str(ahead)), 9)
        losses = [float(update.loss) for update in updates(job, ahead)]
        found.append((losses, [tensor.tolist() for tensor in weights(job.model).values()], job.cursor, job.tokens))
    assert found[1] == found[0]
    assert found[2] == found[0]


def test_what_was_made_for_another_moment_is_thrown_away(small: Make, tmp_path: Path) -> None:
    """A job that jumps, skips rows or takes fewer at a time gets what a prefetcher without a thread would give."""
    job = build_job(create(small("encoder"), tmp_path), 40)
    size = job.order.size

    def jump(step: int, cursor: int, micro: int, skipped: list[tuple[int, int]]) -> None:
        job.step, job.cursor, job.micro, job.skipped = step, cursor, micro, skipped

    moments: list[tuple[int, int, int, list[tuple[int, int]]]] = [
        (0, 0, 2, []),
        (1, size, 2, []),
        (1, size, 1, []),  # memory ran out
        (2, 2 * size, 1, [(3 * size, 5 * size)]),
        (3, 5 * size, 1, [(3 * size, 5 * size)]),
        (1, size, 6, [(size, 2 * size)]),  # a rollback
        (39, 39 * size, 6, []),
    ]
    with Prefetcher(job, 2) as prefetcher:
        for moment in moments:
            jump(*moment)
            assert same(prefetcher.take(), step_batches(job, moment[:3]))
        assert not prefetcher._coming  # nothing is made for steps behind the last one


def test_memory_that_runs_out_is_answered_as_without_a_thread(small: Make, tmp_path: Path) -> None:
    found = []
    for ahead in (0, 2):
        job = limited(build_job(create(small(**{"batch.micro": 0}), tmp_path / str(ahead)), 5), 2)
        notes = [update.note for update in updates(job, ahead)]
        assert notes[0] == "out of memory at step 1: from here on 2 rows at a time (batch.micro)"
        found.append([tensor.tolist() for tensor in weights(job.model).values()])
    assert found[0] == found[1]


def test_an_error_in_the_making_is_raised_at_its_own_step(
    small: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = build_job(create(small(**{"batch.micro": 0}), tmp_path), 9)
    take, calls = Rows.take, iter(range(100))

    def torn(this: Rows, indices: Any) -> RowBatch:
        if next(calls) == 3:
            raise OSError("the disk is gone")
        return take(this, indices)

    monkeypatch.setattr(Rows, "take", torn)
    steps = updates(job, 2)
    assert [update.step for update in islice(steps, 3)] == [1, 2, 3]
    with pytest.raises(OSError, match="the disk is gone") as caught:
        next(steps)
    assert "torn" in "".join(traceback.format_exception(caught.value))  # where it happened, not where it was heard
    assert threads() == []


@pytest.mark.parametrize("ending", ["close", "drop", "end", "error"])
def test_no_thread_stays_behind(small: Make, tmp_path: Path, ending: str) -> None:
    job = build_job(create(small(), tmp_path), 4)
    steps = updates(job, 2)
    next(steps)
    assert len(threads()) == 1
    if ending == "close":
        steps.close()  # type: ignore[attr-defined]
    elif ending == "drop":
        del steps
    elif ending == "error":
        job.compute = lambda _: {"tokens": Loss(torch.zeros(()))}  # without a gradient
        with pytest.raises(RuntimeError):
            next(steps)
    else:
        list(steps)
    assert threads() == []


def test_both_threads_work_on_the_device_of_the_recipe(
    small: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or else pinned memory, events and graphs would be those of the first GPU."""
    found: list[tuple[str, str]] = []
    context = create(small(), tmp_path)
    for module in (process, making):
        monkeypatch.setattr(
            module, "set_current_gpu", lambda device: found.append((threading.current_thread().name, str(device)))
        )
    with process.process_settings(context.recipe, tmp_path):
        list(updates(build_job(context, 2), 2))
    assert found == [(threading.current_thread().name, "cpu"), ("batches_0", "cpu")]


def test_batches_are_made_while_the_step_computes(small: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = build_job(create(small(**{"batch.micro": 0}), tmp_path), 9)
    take, inner, seen = Rows.take, job.compute, list[int]()

    def taken(this: Rows, indices: Any) -> RowBatch:
        seen.append(threading.get_ident())
        return take(this, indices)

    def compute(batch: Any) -> Losses:
        until = time.monotonic() + 10
        while len(seen) < min(9, job.step + 3) and time.monotonic() < until:
            time.sleep(0.001)
        assert len(seen) == min(9, job.step + 3)  # two ahead, and no more than that
        return inner(batch)

    monkeypatch.setattr(Rows, "take", taken)
    job.compute = compute
    list(updates(job, 2))
    assert set(seen).isdisjoint({threading.get_ident()})


def test_seeds_of_steps_have_nothing_in_common(small: Make, tmp_path: Path) -> None:
    job: Job = build_job(create(small("encoder", **{"batch.micro": 0}), tmp_path), 9)
    hidden = [step_batches(job, (step, 0, 6)).batches[0].inputs["tokens"].numpy() for step in (0, 0, 1)]
    assert np.array_equal(hidden[0], hidden[1])
    assert not np.array_equal(hidden[0], hidden[2])
