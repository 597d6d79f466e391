"""Which checkpoint a run goes on from, goes back to or ends with, and what each of them holds."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from trivium import config as settings
from trivium.checkpoints import bundle, format
from trivium.checkpoints.model_files import has_model
from trivium.checkpoints.store import Checkpoint, Store
from trivium.data.shards import changed_sources
from trivium.errors import CheckpointError, printable
from trivium.training import start
from trivium.training.context import RunContext
from trivium.training.deadline import Deadline
from trivium.training.guards import FiniteGuard
from trivium.training.job import Job
from trivium.training.persist import RunLog
from trivium.training.rollback import History
from trivium.training.spikes import Detector, Rollback
from trivium.training.stages import Say


class Checkpointer:
    """Saves and loads the checkpoints of a run, and keeps the log of its rollbacks."""

    def __init__(self, context: RunContext) -> None:
        self.context = context
        self.recipe = recipe = context.recipe
        # without a watch on spikes only numbers that are not finite lead back
        spike = recipe.spike
        self.options = spike if isinstance(spike, Rollback) else Rollback(threshold=math.inf, norm=math.inf)
        self.rolls_back = isinstance(spike, Rollback) or recipe.nonfinite == "rollback"
        margin = self.options.margin if self.rolls_back else 0
        self.store = Store(context.folder / "checkpoints", keep=recipe.checkpoint.keep, margin=margin)
        self.history = History(context.folder, self.store, self.options, recipe.batch.rows)
        self.best = self.kept = math.inf  # the lowest validation loss, and the lowest with a checkpoint
        self.score: float | None = None  # the validation loss at this very step

    def validated(self, loss: float) -> bool:
        """Note the validation loss of this step; whether it is the lowest so far."""
        better, self.score = loss < self.best, loss
        self.best = min(self.best, loss)
        return better

    @property
    def is_best(self) -> bool:
        """Whether this very step has a lower validation loss than every checkpoint."""
        return self.score is not None and self.score < self.kept

    def detector(self) -> Detector:
        """A new detector of spikes, which has seen no update."""
        return Detector(self.options, clip=self.recipe.clip, nonfinite=self.recipe.nonfinite == "rollback")

    def save(self, job: Job, deadline: Deadline, record: RunLog) -> Path:
        """Save a checkpoint of this step; a disk that refuses it is the OSError."""
        record.restore()
        self.history.settle()  # a checkpoint that knows more than the log would never be found stale
        state = {
            **job.state(),
            "identity": self.context.identity,
            **deadline.state(job.timeline, job.step),
            "best": self.best if math.isfinite(self.best) else None,
            "rollbacks": len(self.history.returns),
            "recipe": settings.digest(self.recipe),
            "tokenizer": self.context.tokenizer.digest,
        }
        path = self.store.save(job.step, tensors=job.tensors(), documents={"state": state}, score=self.score)
        record.gone = False
        if self.is_best:
            self.kept = self.best
        return path

    def find(self, say: Say) -> Checkpoint | None:
        """The newest whole checkpoint, if there is one, once those that rollbacks gave up are gone."""
        self.history.read()
        self.history.settle()
        return self.store.newest(say=say)

    def check(self, found: Checkpoint | None) -> None:
        """Refuse a checkpoint of another configuration or other data, and one beyond the budget."""
        folder = self.context.folder
        if found is None:
            if has_model(folder):
                raise CheckpointError(f"{folder} has a model but no checkpoint to go on from; start a new run")
            return
        if format.document(found.path, "state").get("identity") != self.context.identity:
            raise CheckpointError(f"{found.path} is a checkpoint for another configuration; move it out of {folder}")
        asked = self.recipe.budget.steps
        if asked and asked < found.step:
            raise CheckpointError(
                f"budget.steps: {folder} has reached step {found.step} already, and {asked} is less; "
                f"set budget.steps={found.step} or more"
            )
        if changed := changed_sources(self.context.shards):
            raise CheckpointError(f"{changed[0]} has changed since the run began; restore it, or start a new run")

    def load(self, job: Job, found: Checkpoint | None, deadline: Deadline, fresh: Job | None = None) -> None:
        """Fill a job from a checkpoint or a fresh job, with the rows that rollbacks leave out by now."""
        self.best = self.kept = math.inf
        if found is not None:
            self._fill(job, found, deadline)
        elif fresh is not None:
            sections = fresh.tensors()
            job.load(lambda section: sections[section], 0, fresh.state())
        job.skipped = self.history.spans(job.skipped)
        job.guard = FiniteGuard(self.recipe.nonfinite, job.model.device, sharded=job.optimizer.sharded)

    def _fill(self, job: Job, found: Checkpoint, deadline: Deadline) -> None:
        """Fill a job from a checkpoint; one with whole files that do not say what a checkpoint says is refused."""
        state = format.document(found.path, "state")
        try:
            job.load(lambda section: format.tensors(found.path, section), found.step, state)
            self.best = self.kept = math.inf if state["best"] is None else float(state["best"])
            deadline.resume(job.timeline, job.step, state)
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError, RuntimeError) as error:
            raise CheckpointError(
                f"{found.path} does not hold the state of this run ({type(error).__name__}: "
                f"{printable(str(error), 100)}); move it out of {self.store.folder} to go on from another one"
            ) from error

    def write_model(self, job: Job, metrics: Sequence[Mapping[str, Any]], say: Say) -> None:
        """Write the model for use, the best checkpoint or the last step, with where it comes from."""
        recipe, folder, step, tensors = self.recipe, self.context.folder, job.step, None
        if recipe.checkpoint.use == "best":
            best = self.store.best(say=say)
            if best is not None and best.step != step:
                step, tensors = best.step, bundle.weights_in(best.path, best.manifest)
                say(f"the model is that of step {step}, where the validation loss was lowest")
        scores = [row for row in metrics if row.get("kind") == "valid" and row["step"] == step]
        origin = {"run": recipe.name, "step": step, "valid": scores[-1] if scores else None}
        origin = {**start.saved_notes(folder), **origin}
        weights = job.weights_for_use() if tensors is None else tensors
        bundle.save(folder, recipe.model, weights, self.context.tokenizer, origin)
