"""How a step is run: eagerly, or as one CUDA graph, since small models are bound by launches and a graph is one.

All numbers that change from step to step are tensors on the device, in graphed steps and in those before, so that a
step computes the same bits whether it is graphed or not. Random numbers follow the seed of the step as always.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from trivium.data.batch import Batch
from trivium.errors import ConfigError
from trivium.fast.graphs import own_scratch
from trivium.fast.hooks import any_hooks
from trivium.training.job import Job
from trivium.training.oom import is_out_of_memory
from trivium.training.prefetch import StepBatches
from trivium.training.scaling import Unscaled
from trivium.training.step import StepResult, StepScalars, step_seed

WARM = 3  # steps of one shape before it is captured: compilation, handles and moments are then done with

TrainStep = Callable[[Job, list[Batch], StepScalars], StepResult]
Capture = Callable[[Callable[[], StepResult]], tuple[StepResult, Callable[[], None]]]


class EagerStep:
    """Runs the step of a job as it is."""

    def __init__(self, job: Job, step: TrainStep) -> None:
        self.job, self.step = job, step

    def __call__(self, batches: StepBatches, scalars: StepScalars) -> StepResult:
        return self.step(self.job, batches.to(self.job.model.device), scalars)

    def forget(self) -> None:
        """Nothing: no step holds memory of the one before."""


class Captured(NamedTuple):
    """A captured step, which holds the memory of everything in it."""

    shapes: tuple[object, ...]
    batches: list[Batch]  # what it reads
    result: StepResult  # what it writes
    replay: Callable[[], None]


class GraphedStep:
    """Captures the step of a job for the first shapes that come again and again, and replays it."""

    def __init__(self, job: Job, step: TrainStep, capture: Capture | None = None) -> None:
        self.job, self.step = job, step
        self.capture = capture or capture_graph
        self._scalars: Tensor | None = None
        self._seen: dict[tuple[object, ...], int] = {}
        self._captured: Captured | None = None

    def __call__(self, batches: StepBatches, scalars: StepScalars) -> StepResult:
        scalars, shapes = self._on_device(scalars), _shapes(batches)
        self._seen[shapes] = self._seen.get(shapes, 0) + 1
        # before a capture too: the seed inside it must be the one that is set already
        torch.manual_seed(step_seed(self.job.recipe.seed, self.job.step))
        if self._captured is None and self._seen[shapes] > WARM:
            self._captured = self._capture(shapes, batches.to(self.job.model.device), scalars)
        if self._captured is None or shapes != self._captured.shapes:
            return self.step(self.job, batches.to(self.job.model.device), scalars)
        for held, batch in zip(self._captured.batches, batches.batches, strict=True):
            for mine, theirs in ((held.inputs, batch.inputs), (held.targets, batch.targets)):
                for name, tensor in mine.items():
                    tensor.copy_(theirs[name], non_blocking=True)
        self.job.optimizer.refresh()  # which a graph would not do
        self._captured.replay()
        result = self._captured.result
        return result._replace(numbers=result.numbers.clone())  # the next step writes at the same place

    def forget(self) -> None:
        """Give back the memory of the graph, and wait for shapes that come again: there are other ones now."""
        self._captured = None
        self._seen.clear()

    def _capture(self, shapes: tuple[object, ...], batches: list[Batch], scalars: StepScalars) -> Captured:
        self.job.optimizer.refresh()  # so that there is nothing to copy inside
        try:
            return Captured(shapes, batches, *self.capture(lambda: self.step(self.job, batches, scalars)))
        finally:
            self.job.moving = False  # a capture moves nothing: one that fails can be tried again

    def _on_device(self, scalars: StepScalars) -> StepScalars:
        """The same numbers as tensors, at the same address in every step."""
        values = torch.tensor([*scalars.counts.values(), scalars.factor, scalars.average], dtype=torch.float32)
        if self._scalars is None:
            self._scalars = torch.zeros(len(values), device=self.job.model.device)
        self._scalars.copy_(values.pin_memory() if self._scalars.is_cuda else values, non_blocking=True)
        *counts, factor, average = self._scalars.unbind()
        return StepScalars(dict(zip(scalars.counts, counts, strict=True)), factor, average)


def run_step(job: Job, step: TrainStep) -> EagerStep | GraphedStep:
    """What runs the steps of a job."""
    # fp16 decides on the host what follows, and a graph would call hooks only while it is captured
    graphed = job.recipe.compile == "graphs" and isinstance(job.scaler, Unscaled) and not any_hooks(job.model)
    return GraphedStep(job, step) if graphed else EagerStep(job, step)


def capture_graph(step: Callable[[], StepResult]) -> tuple[StepResult, Callable[[], None]]:
    """A step captured without being made: where its result will be, and what makes it."""
    graph = torch.cuda.CUDAGraph()
    try:
        # thread_local: another thread is making batches, and may get pinned memory meanwhile
        with own_scratch(), torch.cuda.graph(graph, capture_error_mode="thread_local"):
            result = step()
    except RuntimeError as error:
        if is_out_of_memory(error):
            raise
        raise ConfigError(f"compile: a step of this model cannot be a CUDA graph ({error}); set compile=on") from error
    return result, graph.replay


def _shapes(batches: StepBatches) -> tuple[object, ...]:
    return tuple(
        (name, *tensor.shape)
        for batch in batches.batches
        for tensors in (batch.inputs, batch.targets)
        for name, tensor in tensors.items()
    )
