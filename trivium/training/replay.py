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

WARM = 3  # steps of one shape before it is recorded: compilation, handles and moments are then done with

Outcome = tuple[Tensor, Tensor, Tensor]  # loss, norm, allowed
Record = Callable[[Callable[[], Outcome]], tuple[Outcome, Callable[[], None]]]


class Dials(NamedTuple):
    """What a step takes beside its batch: numbers, or tensors on the device."""

    counts: tuple[int, int] | Tensor  # what the losses of the tokens and of a second head are divided by
    factor: float | Tensor  # the schedule's share of the rate
    follow: float | Tensor  # how much of the weights goes into their average


class Recording(NamedTuple):
    """A recorded step, which holds the memory of everything in it."""

    shape: tuple[object, ...]
    parts: list[Batch]  # what it reads
    outcome: Outcome  # what it writes
    play: Callable[[], None]


class Replay:
    """Records the step that `advance` makes for the first shape that comes again and again, and plays it back."""

    def __init__(
        self, device: torch.device, advance: Callable[[list[Batch], Dials], Outcome], record: Record | None = None
    ) -> None:
        self.device = device
        self.advance = advance
        self.record = record or captured
        self._dials = torch.zeros(4, device=device)
        self._seen: dict[tuple[object, ...], int] = {}
        self._recording: Recording | None = None

    def on_device(self, dials: Dials) -> Dials:
        """The same numbers as tensors, at the same place in every step."""
        values = torch.tensor([*dials.counts, dials.factor, dials.follow], dtype=torch.float32)
        self._dials.copy_(values.pin_memory() if self._dials.is_cuda else values, non_blocking=True)
        return Dials(self._dials[:2], self._dials[2], self._dials[3])

    def recorded(self, made: Made, dials: Dials) -> Outcome | None:
        """The outcome of the step if there is a recording of its shape, which is made here when it is time."""
        shape = _shape(made)
        self._seen[shape] = self._seen.get(shape, 0) + 1
        if self._recording is None and self._seen[shape] > WARM:
            parts = [part.to(self.device) for part in made.parts]
            self._recording = Recording(shape, parts, *self.record(lambda: self.advance(parts, dials)))
        if self._recording is None or shape != self._recording.shape:
            return None
        for held, part in zip(self._recording.parts, made.parts, strict=True):
            for mine, theirs in ((held.inputs, part.inputs), (held.targets, part.targets)):
                for name, tensor in mine.items():
                    tensor.copy_(theirs[name], non_blocking=True)
        self._recording.play()
        loss, norm, allowed = self._recording.outcome
        return loss.clone(), norm.clone(), allowed.clone()  # the next step writes at the same place

    def forget(self) -> None:
        """Give back the memory of the recording, and wait for a shape that comes again: there are other ones now."""
        self._recording = None
        self._seen.clear()


def captured(step: Callable[[], Outcome]) -> tuple[Outcome, Callable[[], None]]:
    """A step recorded without being made: where its outcome will be, and what makes it."""
    graph = torch.cuda.CUDAGraph()
    try:
        # thread_local: another thread is making batches, and may get pinned memory meanwhile
        with own_scratch(), torch.cuda.graph(graph, capture_error_mode="thread_local"):
            outcome = step()
    except RuntimeError as error:
        if is_out_of_memory(error):
            raise
        raise ConfigError(f"compile: a step of this model cannot be a CUDA graph ({error}); set compile=on") from error
    return outcome, graph.replay


def _shape(made: Made) -> tuple[object, ...]:
    return tuple(
        (name, *tensor.shape)
        for part in made.parts
        for tensors in (part.inputs, part.targets)
        for name, tensor in tensors.items()
    )
