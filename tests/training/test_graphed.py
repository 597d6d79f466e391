"""Steps that are recorded and played back; what only a GPU shows is in test_cuda.py."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.training.conftest import FAMILIES, create
from tests.training.test_pairs import files, paired  # noqa: F401
from trivium.data.batch import Batch
from trivium.errors import ConfigError
from trivium.models.transformer import weights
from trivium.optim.options import OPTIMIZERS
from trivium.parts.losses import Losses
from trivium.training.build_job import build_job
from trivium.training.graphed import WARM, GraphedStep, capture_graph
from trivium.training.job import Job
from trivium.training.loop import next_update, train_step, updates
from trivium.training.prefetch import Prefetcher
from trivium.training.recipe import Recipe
from trivium.training.step import StepResult, Update

Make = Callable[..., Recipe]


class Tape:
    """Records like a GPU: nothing is done while recording, and every play reads and writes the same memory."""

    def __init__(self) -> None:
        self.recorded = self.played = 0

    def record(self, step: Callable[[], StepResult]) -> tuple[StepResult, Callable[[], None]]:
        self.recorded += 1
        result = StepResult(torch.zeros(4), {"tokens": "tokens"})

        def play() -> None:
            self.played += 1
            result.numbers.copy_(step().numbers)

        return result, play


class Forgetful(dict[tuple[object, ...], int]):
    """Has never seen a shape before, so that none is captured."""

    def get(self, key: object, default: Any = None) -> Any:
        return default


def steps(job: Job, number: int, tape: Tape | None) -> list[Update]:
    record = (lambda _: pytest.fail("recorded")) if tape is None else tape.record
    run = GraphedStep(job, train_step, record)
    if tape is None:
        run._seen = Forgetful()
    with Prefetcher(job, 0) as prefetcher:
        return [next_update(job, prefetcher, run) for _ in range(number)]


def numbers(made: list[Update]) -> list[tuple[float, float, bool, int]]:
    return [(float(update.loss), float(update.norm), bool(update.finite), update.tokens) for update in made]


def same(one: Job, other: Job) -> bool:
    return all(torch.equal(tensor, weights(other.model)[name]) for name, tensor in weights(one.model).items())


@pytest.mark.parametrize("kind", FAMILIES)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_step_is_the_same_recorded_or_not(small: Make, tmp_path: Path, kind: str, optimizer: str) -> None:
    """Dropout, masks, accumulation, averages and falling rates included, to the last bit."""
    context = create(small(kind, average="ema", optim=optimizer), tmp_path)
    plain, played = build_job(context, 20), build_job(context, 20)
    tape = Tape()
    assert numbers(steps(played, 12, tape)) == numbers(steps(plain, 12, None))
    assert tape.recorded == 1
    assert 0 < tape.played <= 12 - WARM
    assert same(plain, played)
    averages = plain.average.tensors(), played.average.tensors()
    assert all(torch.equal(tensor, averages[1][name]) for name, tensor in averages[0].items())


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_numbers_on_the_device_give_what_numbers_of_the_host_give(small: Make, tmp_path: Path, optimizer: str) -> None:
    context = create(small(average="ema", optim=optimizer), tmp_path)
    usual, other = build_job(context, 20), build_job(context, 20)
    wanted = [float(update.loss) for update in islice(updates(usual), 12)]
    assert [float(update.loss) for update in steps(other, 12, None)] == pytest.approx(wanted, rel=1e-5)
    assert len(set(wanted)) == 12


def test_other_shapes_are_not_played(paired: Make, tmp_path: Path) -> None:  # noqa: F811
    context = create(paired(**{"batch.micro": 0}), tmp_path)
    plain, played = build_job(context, 60), build_job(context, 60)
    tape = Tape()
    assert numbers(steps(played, 60, tape)) == numbers(steps(plain, 60, None))
    assert tape.recorded <= 1
    assert tape.played < 30
    assert same(plain, played)


def test_a_step_that_is_not_finite_moves_nothing_and_none_does_after_it(small: Make, tmp_path: Path) -> None:
    """`stop` remembers across plays what it has seen."""
    job = build_job(create(small(**{"batch.micro": 0}), tmp_path), 20)
    inner, bad = job.compute, torch.tensor(1.0)

    def compute(batch: Any) -> Losses:
        return {name: loss._replace(sum=loss.sum * bad) for name, loss in inner(batch).items()}

    job.compute = compute
    tape = Tape()
    run = GraphedStep(job, train_step, tape.record)
    with Prefetcher(job, 0) as prefetcher:
        good = [next_update(job, prefetcher, run) for _ in range(WARM + 2)]
        held = {name: tensor.clone() for name, tensor in weights(job.model).items()}
        bad.fill_(torch.nan)
        ill = [next_update(job, prefetcher, run)]
        bad.fill_(1.0)
        ill.append(next_update(job, prefetcher, run))
    assert tape.played == 4
    assert [bool(update.finite) for update in good + ill] == [True] * (WARM + 2) + [False, False]
    assert all(torch.equal(tensor, held[name]) for name, tensor in weights(job.model).items())


class Full(Tape):
    """A tape on a device whose memory is full at one step, in the recording of it or in the step itself."""

    def __init__(self, job: Job, ends: int, where: str) -> None:
        super().__init__()
        self.job, self.ends, self.where = job, ends, where
        self.inner, job.compute = job.compute, self.compute

    def record(self, step: Callable[[], StepResult]) -> tuple[StepResult, Callable[[], None]]:
        if self.where == "recording":
            self.run_out()
        outcome, play = super().record(step)
        self.held = weakref.ref(play)
        return outcome, play

    def compute(self, batch: Batch) -> Losses:
        if self.where == "step":
            self.run_out()
        return self.inner(batch)

    def run_out(self) -> None:
        if self.ends == self.job.step:
            self.ends = -1
            raise torch.OutOfMemoryError("CUDA out of memory")


# played are all but the first steps of both shapes, and once more the step that failed in being played
@pytest.mark.parametrize(
    ("where", "ends", "recorded", "played"),
    [("recording", WARM, 1, 20 - 2 * WARM), ("step", WARM + 3, 2, 20 - 2 * WARM + 1), ("step", 1, 1, 20 - 1 - WARM)],
)
def test_after_memory_ran_out_fewer_rows_at_a_time_are_recorded(
    small: Make, tmp_path: Path, where: str, ends: int, recorded: int, played: int
) -> None:
    context = create(small(**{"batch.micro": 0}), tmp_path)
    plain, job = build_job(context, 30), build_job(context, 30)
    expected, full = Full(plain, ends, "step"), Full(job, ends, where)
    assert numbers(steps(job, 20, full)) == numbers(steps(plain, 20, None))
    assert expected.ends == full.ends == -1
    assert full.recorded == recorded
    assert full.played == played
    assert same(plain, job)


def test_memory_that_ran_out_is_given_back(small: Make, tmp_path: Path) -> None:
    """Where the step then fails is after the recording is gone, which held the memory of a whole step."""
    job = build_job(create(small(**{"batch.micro": 0}), tmp_path), 30)
    full = Full(job, WARM + 3, "step")
    run = GraphedStep(job, train_step, full.record)
    with Prefetcher(job, 0) as prefetcher:
        for _ in range(WARM + 3):
            next_update(job, prefetcher, run)
        assert full.held() is not None
        assert next_update(job, prefetcher, run).note
    assert full.held() is None


def test_what_cannot_be_recorded_is_said_in_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    class Graph:
        def replay(self) -> None: ...

    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph", lambda *_, **__: contextlib.nullcontext())

    def ends(error: Exception) -> Callable[[], StepResult]:
        def step() -> StepResult:
            raise error

        return step

    with pytest.raises(ConfigError, match=r"cannot be a CUDA graph \(no capture\); set compile=on"):
        capture_graph(ends(RuntimeError("no capture")))
    with pytest.raises(torch.OutOfMemoryError):  # which halves the rows at a time, as it always does
        capture_graph(ends(torch.OutOfMemoryError("CUDA out of memory")))


def test_memory_that_runs_out_in_a_capture_halves_the_rows_though_the_optimizer_was_captured(
    small: Make, tmp_path: Path
) -> None:
    """Nothing has moved: a capture does nothing."""
    job, captures = build_job(create(small(**{"batch.micro": 0}), tmp_path), 20), list[int]()

    def full(step: Callable[[], StepResult]) -> tuple[StepResult, Callable[[], None]]:
        captures.append(job.micro)
        job.moving = True  # as in the middle of an update
        raise torch.OutOfMemoryError("CUDA out of memory")

    run = GraphedStep(job, train_step, full)
    with Prefetcher(job, 0) as prefetcher:
        for _ in range(WARM):
            next_update(job, prefetcher, run)
        assert next_update(job, prefetcher, run).note
    assert captures == [6]
    assert job.micro == 3
