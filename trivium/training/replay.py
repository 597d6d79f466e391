"""A whole step as one CUDA graph: small models are bound by launches, and a graph is a single one.

All numbers that change from step to step are tensors on the device, in recorded steps and in those before, so that a
step computes the same bits whether it is recorded or not. Random numbers follow the seed of the step as always.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from trivium.data.batch import Batch
from trivium.errors import ConfigError
from trivium.generation.graphs import own_scratch
from trivium.training.ahead import Made
from trivium.training.guards import is_out_of_memory
from trivium.training.step import StepResult, StepScalars

WARM = 3  # steps of one shape before it is recorded: compilation, handles and moments are then done with

Record = Callable[[Callable[[], StepResult]], tuple[StepResult, Callable[[], None]]]


class Recording(NamedTuple):
    """A recorded step, which holds the memory of everything in it."""

    shape: tuple[object, ...]
    parts: list[Batch]  # what it reads
    result: StepResult  # what it writes
    play: Callable[[], None]


class Replay:
    """Records the step that `advance` makes for the first shape that comes again and again, and plays it back."""

    def __init__(
        self,
        device: torch.device,
        advance: Callable[[list[Batch], StepScalars], StepResult],
        record: Record | None = None,
    ) -> None:
        self.device = device
        self.advance = advance
        self.record = record or captured
        self._numbers: Tensor | None = None
        self._seen: dict[tuple[object, ...], int] = {}
        self._recording: Recording | None = None

    def on_device(self, scalars: StepScalars) -> StepScalars:
        """The same numbers as tensors, at the same address in every step."""
        values = torch.tensor([*scalars.counts.values(), scalars.factor, scalars.average], dtype=torch.float32)
        if self._numbers is None:
            self._numbers = torch.zeros(len(values), device=self.device)
        self._numbers.copy_(values.pin_memory() if self._numbers.is_cuda else values, non_blocking=True)
        *counts, factor, average = self._numbers.unbind()
        return StepScalars(dict(zip(scalars.counts, counts, strict=True)), factor, average)

    def recorded(self, made: Made, scalars: StepScalars) -> StepResult | None:
        """The result of the step if there is a recording of its shape, which is made here when it is time."""
        shape = _shape(made)
        self._seen[shape] = self._seen.get(shape, 0) + 1
        if self._recording is None and self._seen[shape] > WARM:
            parts = [part.to(self.device) for part in made.parts]
            self._recording = Recording(shape, parts, *self.record(lambda: self.advance(parts, scalars)))
        if self._recording is None or shape != self._recording.shape:
            return None
        for held, part in zip(self._recording.parts, made.parts, strict=True):
            for mine, theirs in ((held.inputs, part.inputs), (held.targets, part.targets)):
                for name, tensor in mine.items():
                    tensor.copy_(theirs[name], non_blocking=True)
        self._recording.play()
        result = self._recording.result
        return result._replace(numbers=result.numbers.clone())  # the next step writes at the same place

    def forget(self) -> None:
        """Give back the memory of the recording, and wait for a shape that comes again: there are other ones now."""
        self._recording = None
        self._seen.clear()


def captured(step: Callable[[], StepResult]) -> tuple[StepResult, Callable[[], None]]:
    """A step recorded without being made: where its result will be, and what makes it."""
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


def _shape(made: Made) -> tuple[object, ...]:
    return tuple(
        (name, *tensor.shape)
        for part in made.parts
        for tensors in (part.inputs, part.targets)
        for name, tensor in tensors.items()
    )
