"""The state of a run: what a checkpoint holds, and what it takes to go on."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from trivium.data.batch import Batch
from trivium.data.loader import Ordering
from trivium.data.packed import Examples
from trivium.models.transformer import Transformer, load_weights, weights
from trivium.objectives.objective import Task
from trivium.optim.averaging import Average
from trivium.optim.stepper import Optimizer
from trivium.parts.losses import Losses
from trivium.training.guards import FiniteGuard
from trivium.training.recipe import Recipe
from trivium.training.scaling import Scaler
from trivium.training.timeline import Timeline


@dataclass(kw_only=True, slots=True)
class Job:
    """A model in training: `step` counts batches, `step - overflows` the updates that the schedule has seen."""

    recipe: Recipe
    model: Transformer
    task: Task
    optimizer: Optimizer
    average: Average
    scaler: Scaler
    rows: Examples
    order: Ordering
    guard: FiniteGuard
    compute: Callable[[Batch], Losses]  # the losses of a micro-batch, compiled or not
    evaluate: Callable[[Batch], Losses]  # the same, never compiled
    timeline: Timeline
    micro: int  # rows (or tokens) of one forward pass; halved when memory runs out and the recipe leaves it open
    step: int = 0
    cursor: int = 0  # rows consumed; batch.rows for each batch of pairs, however many it has
    tokens: int = 0  # labels that counted
    overflows: int = 0  # steps whose fp16 gradients overflowed: their data is used up, their update was not made
    skipped: list[tuple[int, int]] = field(default_factory=list)  # rows [first, end) that a rollback leaves out
    moving: bool = False  # whether a step is in the middle of its update

    @property
    def total(self) -> int:
        """The number of steps of the run; an estimate until a budget in minutes comes to its end."""
        return self.timeline.total

    def tensors(self) -> dict[str, dict[str, Tensor]]:
        """The tensors of a checkpoint by section."""
        sections = {"model": weights(self.model), "optimizer": self.optimizer.tensors()}
        averaged = self.average.tensors()
        return {**sections, "average": averaged} if averaged else sections

    def state(self) -> dict[str, Any]:
        """What a checkpoint holds beside tensors, as plain values."""
        return {
            "cursor": self.cursor,
            "tokens": self.tokens,
            "overflows": self.overflows,
            "skipped": [list(span) for span in self.skipped],
            "micro": self.micro,
            "scaler": self.scaler.state(),
        }

    def load(self, read: Callable[[str], dict[str, Tensor]], step: int, state: Mapping[str, Any]) -> None:
        """Go to the checkpoint of `step`; `read` gives the tensors of a section."""
        load_weights(self.model, read("model"))
        self.optimizer.load(read("optimizer"))
        if self.average.tensors():
            self.average.load(read("average"))
        self.step, self.cursor, self.tokens = step, int(state["cursor"]), int(state["tokens"])
        self.overflows = int(state.get("overflows", 0))
        self.skipped = [(int(first), int(end)) for first, end in state.get("skipped", [])]
        if not self.recipe.batch.micro:  # a number in the recipe wins over what was settled before
            self.micro = min(int(state.get("micro", self.micro)), self.recipe.batch.size)
        if self.micro < self.recipe.batch.size:
            self.optimizer.free_working_weights()  # as when memory ran out, for there is still no more of it
        self.scaler.load(state.get("scaler", {}))

    def in_use(self) -> AbstractContextManager[None]:
        """`with job.in_use():` — the model has the weights that a user will get, averaged if the recipe says so."""
        return self.average.swapped(self.model)

    def weights_for_use(self) -> dict[str, Tensor]:
        """The weights of the finished model."""
        if not self.average.tensors():
            return weights(self.model)
        with self.in_use():
            return {name: tensor.clone() for name, tensor in weights(self.model).items()}
