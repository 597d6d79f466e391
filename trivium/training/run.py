"""A run in its folder: started or resumed, locked while it works, told as a series of events."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from trivium import config as settings
from trivium import report
from trivium.checkpoints import bundle, format
from trivium.checkpoints.store import Store
from trivium.data.shards import changed_sources
from trivium.errors import CheckpointError, ConfigError, Diverged, Interrupted, RequestError
from trivium.files import Lock, write_atomic
from trivium.generation.sampling import Sampling
from trivium.generation.text import complete
from trivium.models.transformer import load_weights, weights
from trivium.training import prepare
from trivium.training.events import Event, Progress, Said, Sampled, Saved, Validated
from trivium.training.guards import Signals, enough_memory
from trivium.training.loop import Job, Pending, updates
from trivium.training.metrics import Journal, rows
from trivium.training.prepare import Ground, Say, Tick
from trivium.training.recipe import FIXED, Recipe, due
from trivium.training.validate import validate

RUNS = Path("runs")


def is_run(path: Path) -> bool:
    """Whether a folder holds a run."""
    return (path / "config.toml").is_file()


def read_recipe(source: Path, *layers: Mapping[str, Any], parts: Sequence[type[Any]] = ()) -> Recipe:
    """The recipe in a TOML file with `layers` laid over it, named after the file unless it says otherwise."""
    recipe = settings.load(Recipe, settings.read(source), *layers, parts=parts)
    return recipe if recipe.name else replace(recipe, name=source.stem)


def open_run(
    source: Path | Recipe,
    layer: Mapping[str, Any],
    *,
    runs: Path = RUNS,
    parts: Sequence[type[Any]] = (),
    say: Say,
    tick: Tick,
) -> Session:
    """A session on a new run (from a recipe or its file) or on an old one (from its folder)."""
    if isinstance(source, Path) and source.is_dir():
        if not is_run(source):
            raise ConfigError(f"{source} is not a run: it has no config.toml; name a recipe or a run's folder")
        return Session(_resumed(source, layer, parts, say), say)
    recipe = read_recipe(source, layer, parts=parts) if isinstance(source, Path) else source
    if not isinstance(source, Path) and layer:
        recipe = settings.load(Recipe, layer, parts=parts, start=recipe)
    return Session(prepare.lay(recipe, runs, say=say, tick=tick), say)


def _resumed(folder: Path, layer: Mapping[str, Any], parts: Sequence[type[Any]], say: Say) -> Ground:
    """The ground of a stopped run; harmless changes are told, others refused."""
    written = settings.read(folder / "config.toml")
    asked = layer.get("budget", {})
    if isinstance(asked, Mapping) and {"minutes", "tokens"} & set(asked):
        steps = written.get("budget", {}).get("steps")
        raise ConfigError(f"budget: a run goes on for a number of steps; set budget.steps=N (now {steps})")
    model = layer.get("model", {})
    if isinstance(model, str) or "preset" in model:
        raise CheckpointError(
            f"{folder} holds checkpoints for another configuration: its model is not a preset any more"
        )
    recipe = settings.load(Recipe, written, layer, parts=parts)
    before = settings.flat(settings.load(Recipe, written, parts=parts))
    changed = {key: value for key, value in settings.flat(recipe).items() if before.get(key) != value}
    unsafe = [key for key in changed if key.startswith(FIXED)]
    if unsafe:
        raise CheckpointError(
            f"{folder} holds checkpoints for another configuration: {unsafe[0]} was {before.get(unsafe[0])!r}, "
            f"not {changed[unsafe[0]]!r}; start a new run with name=NAME"
        )
    if not recipe.budget.steps:
        raise ConfigError("budget.steps: a run goes on for a number of steps; set budget.steps")
    for key, value in changed.items():
        say(f"{key} changed from {before.get(key)!r} to {value!r}")
    return prepare.reopen(folder, recipe)


class Session:
    """One sitting of a run; `events` trains until the budget is spent or somebody stops it."""

    def __init__(self, ground: Ground, say: Say, clock: Callable[[], float] = time.monotonic) -> None:
        self.ground = ground
        self.folder = ground.folder
        self.recipe = ground.recipe
        self.say = say
        self.clock = clock
        self.store = Store(self.folder / "checkpoints", keep=self.recipe.checkpoint.keep)
        self.metrics = Journal(self.folder / "metrics.jsonl")
        self.samples = Journal(self.folder / "samples.jsonl")
        self.seconds = 0.0  # of training in earlier sittings
        self.best = math.inf
        self.score: float | None = None  # the validation loss at this very step

    def events(self) -> Iterator[Event]:
        """Train, and tell what happens; closing the iterator early leaves a valid run behind."""
        with Lock(self.folder), Signals() as signals, enough_memory(self.recipe, self.folder):
            try:
                job = prepare.job(self.ground, self.recipe.budget.steps)
                yield from self._resume(job)
                yield from self._train(job, signals)
            finally:
                self.metrics.close()
                self.samples.close()

    def _train(self, job: Job, signals: Signals) -> Iterator[Event]:
        recipe, total = self.recipe, job.total
        yield from self._owed(job)
        started, pending = self.clock() - self.seconds, Pending()
        mark = (self.clock(), job.tokens)
        for update in updates(job):
            (self.folder / bundle.CARD).unlink(missing_ok=True)  # a finished run that goes on has no model yet
            pending.updates.append(update)
            step, stopping = update.step, signals.received
            validating, sampling = self._due(step, total)
            saving = due(recipe.checkpoint.every, step, total)
            self.score = None
            if step % recipe.log == 0 or validating or saving or sampling or stopping:
                self.seconds = self.clock() - started
                yield from self._record(job, pending, mark)
                mark = (self.clock(), job.tokens)
            working = self.clock()
            if validating and not stopping:
                yield self._validate(job)
                saving = saving or self.score == self.best
            if sampling and not stopping:
                yield self._sample(job)
            if saving or stopping:
                yield self._save(job)
            if stopping:
                raise Interrupted(
                    f"stopped at step {step} of {total}; go on with `trivium train {self.folder}`", 128 + stopping
                )
            mark = (mark[0] + self.clock() - working, mark[1])  # what is not training does not count as slow
        yield from self._finish(job)

    def _due(self, step: int, total: int) -> tuple[bool, bool]:
        """Whether validation and a sample follow this step."""
        sampling = bool(self.recipe.sample.every) and due(self.recipe.sample.every, step, total)
        return due(self.recipe.evaluate.every, step, total) and len(self.ground.valid) > 0, sampling

    def _owed(self, job: Job) -> Iterator[Event]:
        """What a run that was stopped at this very step left out, so that its end is that of one never stopped."""
        if not job.step:
            return
        validating, sampling = self._due(job.step, job.total)
        done = {row.get("step") for row in rows(self.metrics.path) if row.get("kind") == "valid"}
        if validating and job.step not in done:
            yield self._validate(job)
            yield self._save(job)
        if sampling and job.step not in {row.get("step") for row in rows(self.samples.path)}:
            yield self._sample(job)

    def _record(self, job: Job, pending: Pending, mark: tuple[float, int]) -> Iterator[Event]:
        """Read the numbers of the last steps off the device and write them down; a bad one ends or skips."""
        known = pending.read()
        lines = [
            {
                "kind": "train",
                "step": u.step,
                "loss": loss,
                "norm": norm,
                "rate": u.rate,
                "seconds": round(self.seconds, 3),
            }
            | ({} if ok else {"skipped": True})
            for u, loss, norm, ok in known
        ]
        self.metrics.write(_finite(line) for line in lines)
        bad = [u.step for u, _, _, ok in known if not ok]
        if bad and self.recipe.nonfinite == "stop":
            raise Diverged(
                f"the loss or a gradient was not finite at step {bad[0]}; the weights are those of step {bad[0] - 1} "
                f"and checkpoints are intact: lower optim.rate (now {self.recipe.optim.rate:g}) or set nonfinite=skip"
            )
        if bad:
            yield Said(f"skipped {len(bad)} update(s) that were not finite: step {', '.join(map(str, bad))}")
        good = [(loss, norm) for _, loss, norm, ok in known if ok]
        if good:
            elapsed = max(1e-9, self.clock() - mark[0])
            speed = (job.tokens - mark[1]) / elapsed
            left = (job.total - job.step) * elapsed / len(known)
            loss = sum(loss for loss, _ in good) / len(good)
            yield Progress(job.step, job.total, loss, good[-1][1], known[-1][0].rate, speed, left)

    def _validate(self, job: Job) -> Event:
        recipe = self.recipe
        loss, bits = validate(
            job.model, recipe.objective, job.compute, self.ground.valid, limit=recipe.evaluate.rows, micro=recipe.micro
        )
        self.score = loss
        better = loss < self.best
        self.best = min(self.best, loss)
        self.metrics.write([_finite({"kind": "valid", "step": job.step, "loss": loss, "bits_per_byte": bits})])
        return Validated(job.step, loss, bits, better)

    def _sample(self, job: Job) -> Event:
        wanted = self.recipe.sample
        tokens = min(wanted.tokens, self.recipe.model.context - 1)
        try:
            sampling = Sampling(temperature=wanted.temperature)
            [[text]] = complete(
                job.model,
                self.ground.tokenizer,
                [wanted.prompt],
                tokens=tokens,
                sampling=sampling,
                seed=self.recipe.seed,
            )
        except RequestError as error:
            return Said(f"no sample: {error}")
        self.samples.write([{"step": job.step, "prompt": wanted.prompt, "text": str(text)}])
        return Sampled(job.step, wanted.prompt, str(text))

    def _save(self, job: Job) -> Event:
        state = {
            "identity": self.ground.identity,
            "cursor": job.cursor,
            "tokens": job.tokens,
            "seconds": self.seconds,
            "best": self.best if math.isfinite(self.best) else None,
            "recipe": settings.digest(self.recipe),
            "tokenizer": self.ground.tokenizer.digest,
        }
        tensors = {"model": weights(job.model), "optimizer": job.optimizer.tensors()}
        path = self.store.save(job.step, tensors=tensors, documents={"state": state}, score=self.score)
        return Saved(job.step, path)

    def _resume(self, job: Job) -> Iterator[Event]:
        """Go back to the newest whole checkpoint, if there is one."""
        notes: list[str] = []
        found = self.store.newest(say=notes.append)
        yield from (Said(note) for note in notes)
        if found is None and (self.folder / bundle.CARD).is_file():
            raise CheckpointError(f"{self.folder} has a model but no checkpoint to go on from; start a new run")
        write_atomic(self.folder / "config.toml", settings.write(self.recipe).encode())
        if found is None:
            self.metrics.cut(0)
            self.samples.cut(0)
            return
        state = format.document(found.path, "state")
        if state.get("identity") != self.ground.identity:
            raise CheckpointError(
                f"{found.path} is a checkpoint for another configuration; move it out of {self.folder}"
            )
        changed = changed_sources(self.ground.shards)
        if changed:
            raise CheckpointError(f"{changed[0]} has changed since the run began; restore it, or start a new run")
        load_weights(job.model, format.tensors(found.path, "model"))
        job.optimizer.load(format.tensors(found.path, "optimizer"))
        job.step, job.cursor, job.tokens = found.step, int(state["cursor"]), int(state["tokens"])
        self.seconds = float(state["seconds"])
        self.best = math.inf if state["best"] is None else float(state["best"])
        self.metrics.cut(job.step)
        self.samples.cut(job.step)
        yield Said(f"went on from {found.path}" if job.step < job.total else f"all {job.total} steps are done")

    def _finish(self, job: Job) -> Iterator[Event]:
        """The model for use (the best checkpoint or the last step), and the report."""
        if not job.step:
            return
        step, tensors = job.step, weights(job.model)
        if self.recipe.checkpoint.use == "best":
            notes: list[str] = []
            best = self.store.best(say=notes.append)
            yield from (Said(note) for note in notes)
            if best is not None and best.step != step:
                step, tensors = best.step, format.tensors(best.path, "model")
                yield Said(f"the model is that of step {step}, where the validation loss was lowest")
        scores = [row for row in rows(self.metrics.path) if row.get("kind") == "valid" and row["step"] == step]
        origin = {"run": self.recipe.name, "step": step, "valid": scores[-1] if scores else None}
        bundle.save(self.folder, self.recipe.model, tensors, self.ground.tokenizer, origin)
        write_atomic(self.folder / "report.html", report.page(self.folder).encode())


def _finite(row: Mapping[str, Any]) -> dict[str, Any]:
    """JSON has no NaN: a number that is not finite is written as text."""
    return {k: str(v) if isinstance(v, float) and not math.isfinite(v) else v for k, v in row.items()}
