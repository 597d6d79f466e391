"""One sitting of a run: trained, guarded, recorded, told as a series of events."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from pathlib import Path
from typing import Any

from trivium import config as settings
from trivium import report
from trivium.checkpoints import bundle, format
from trivium.checkpoints.model_files import has_model, withdraw
from trivium.checkpoints.store import Checkpoint, Store
from trivium.data.shards import changed_sources
from trivium.errors import CheckpointError, Diverged, Interrupted, RequestError, TriviumError, printable
from trivium.files import write_atomic
from trivium.training import prepare
from trivium.training.deadline import Deadline, repeatable
from trivium.training.events import Event, Progress, Said, Sampled, Saved, Validated
from trivium.training.fit import require_fit
from trivium.training.guards import Soundness, enough_memory, is_out_of_memory
from trivium.training.job import Job
from trivium.training.loop import Pending, Update, updates
from trivium.training.pace import Pace
from trivium.training.persist import WAITS, Home, Record, Retry, reason
from trivium.training.prepare import Ground, Say
from trivium.training.process import process_settings
from trivium.training.rollback import History, replay
from trivium.training.samples import samples
from trivium.training.signals import Signals, to_standard_error
from trivium.training.spikes import Alarm, Detector, Rollback
from trivium.training.stages import stage
from trivium.training.timeline import Timeline
from trivium.training.trend import Trend
from trivium.training.validate import validate

# Steps that a GPU may still be working on while the host prepares the next: it never waits, and a spike, which takes
# three steps to be one, is found in five.
_BEHIND = 2
_LONG = 1.0  # seconds of a first step that are worth a line


class Session:
    """One sitting of a run; `events` trains until the budget is spent or somebody stops it."""

    def __init__(
        self,
        ground: Ground,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.ground = ground
        self.folder = ground.folder
        self.recipe = recipe = ground.recipe
        self.alert: Say = to_standard_error  # called by another thread while a step runs
        self.clock = clock
        self.sleep = sleep
        spike = recipe.spike
        # without a watch on spikes only numbers that are not finite can lead back
        self.options = spike if isinstance(spike, Rollback) else Rollback(threshold=math.inf, norm=math.inf)
        self.watching = isinstance(spike, Rollback) or recipe.nonfinite == "rollback"
        self.store = Store(
            self.folder / "checkpoints",
            keep=recipe.checkpoint.keep,
            margin=self.options.margin if self.watching else 0,
        )
        self.history = History(self.folder, self.store, self.options, recipe.batch.rows)
        self.home = Home(ground)
        self.record = Record(self.home, self.history, prepare.trackers(ground))
        self.notes: list[str] = []  # sentences on their way to becoming events
        self.lines = Retry("metrics.jsonl", self.notes.append)
        self.decisions = Retry("timeline.jsonl", self.notes.append)
        self.saves = Retry("the checkpoint", self.notes.append)
        self.detector = self._detector()
        self.known: list[tuple[Update, float, float, bool]] = []  # read off the device and not yet written down
        self._start_clock()
        self.trend = Trend(recipe.evaluate.patience)
        self.best = self.kept = math.inf  # the lowest validation loss, and the lowest with a checkpoint
        self.score: float | None = None  # the validation loss at this very step

    def events(self) -> Iterator[Event]:
        """Train, and tell what happens; closing the iterator early leaves a valid run behind."""
        self._start_clock()
        process = process_settings(self.recipe, self.folder.parent)
        with self.home, process, Signals(self.alert) as signals, enough_memory(self.recipe, self.folder):
            try:
                job = yield from self._resume()
                while (alarm := (yield from self._train(job, signals))) is not None:
                    yield from self._go_back(job, alarm)
                yield from self._finish(job, signals)
            finally:
                self.record.close()

    def _start_clock(self) -> None:
        self.pace = Pace(self.clock, self.ground.spent)
        if self.ground.validation:
            self.pace.last["validation"] = self.ground.validation
        self.deadline = Deadline(self.recipe.budget, self.pace, self.record.timeline)

    def _train(self, job: Job, signals: Signals) -> Generator[Event, None, Alarm | None]:
        """Train to the end, or to an alarm, which is returned."""
        recipe, timeline, pending = self.recipe, job.timeline, Pending()
        yield from self._owed(job)
        if self.trend.is_exhausted and not timeline.ends(job.step):
            yield Said(self.trend.stopped(job.step))
            return None
        self._extend(job)
        began = self.clock()
        for update in updates(job):
            with contextlib.suppress(OSError):  # a finished run that goes on has no model yet
                withdraw(self.folder)
            step, stopping = update.step, signals.received
            pending.add(update)
            if (first := self.clock() - began) > _LONG:
                yield Said(f"first step{'' if recipe.compile == 'off' else ' with compiling'}: {first:.1f} s")
            began = math.inf
            if update.note:
                self.notes.append(update.note)
            validating, sampling = self._due(step, timeline)
            saving = timeline.due(recipe.checkpoint.every, step)
            again = self.saves.due(step)
            settling = validating or saving or again or sampling or stopping > 0
            self.score = None
            alarm = self._read(pending, 0 if settling else _BEHIND)
            if alarm is not None:
                return alarm
            if settling or step % recipe.log == 0:
                yield from self._log(job)
            if validating and not stopping:
                yield self._validate(job)
                again = again or self._best_of_all() or self.trend.is_exhausted
            if sampling and not stopping:
                yield from self._sample(job)
            if saving or again or stopping or self.record.gone:
                yield from self._save(job, now=saving or stopping > 0)
            if stopping:
                raise Interrupted(self._stopped(job), 128 + stopping)
            if self.trend.is_exhausted and not timeline.ends(step):
                yield Said(self.trend.stopped(step))
                return None
            self._extend(job)
        return None

    def _extend(self, job: Job) -> None:
        """Move the horizon of a budget in minutes on, and write down where to."""
        if self.deadline.extend(job.timeline, job.step):
            self.decisions.attempt(job.step, self.record.timeline.flush, now=True)

    def _due(self, step: int, timeline: Timeline) -> tuple[bool, bool]:
        """Whether validation and a sample follow this step."""
        sampling = bool(self.recipe.sample.every) and timeline.due(self.recipe.sample.every, step)
        validating = timeline.due(self.recipe.evaluate.every, step) and len(self.ground.valid) > 0
        return validating and (timeline.ends(step) or self.deadline.allows_validation(step)), sampling

    def _owed(self, job: Job) -> Iterator[Event]:
        """What a run that was stopped at this very step left out, so that its end is that of one never stopped."""
        if not job.step:
            return
        validating, sampling = self._due(job.step, job.timeline)
        done = {row.get("step") for row in self.record.metrics.rows() if row.get("kind") == "valid"}
        if validating and job.step not in done:
            yield self._validate(job)
            yield from self._save(job)
        if sampling and job.step not in {row.get("step") for row in self.record.samples.rows()}:
            yield from self._sample(job)

    def _read(self, pending: Pending, behind: int) -> Alarm | None:
        """Judge the numbers that have come from the device, waiting for all but the last `behind`; a bad one may end
        the run.
        """
        fresh = pending.read(behind)
        self.known += fresh
        for update, loss, norm, ok in fresh:
            self.pace.complete(update.step, update.count)
            sound = ok or update.overflow
            if not sound and self.recipe.nonfinite == "stop":
                self._write_down()
                self.lines.attempt(update.step, self.record.flush)
                raise Diverged(
                    f"the loss or a gradient was not finite at step {update.step}; the weights are those of step "
                    f"{update.step - 1} and checkpoints are intact: lower optim.rate (now {self.recipe.optim.rate:g}) "
                    "or set nonfinite=skip or nonfinite=rollback"
                )
            alarm = self.detector.see(update.step, loss, norm, finite=sound, scale=update.scale)
            if alarm is not None and self.watching:
                return alarm
        return None

    def _write_down(self) -> list[tuple[Update, float, float, bool]]:
        """Turn what is known into rows of the record; returned, since it is forgotten."""
        known, self.known = self.known, []
        self.record.add(
            _finite(
                {
                    "kind": "train",
                    "step": u.step,
                    "loss": loss,
                    "norm": norm,
                    "rate": u.rate,
                    "tokens": u.count,
                    "seconds": round(self.pace.seconds, 3),
                }
                | ({} if math.isinf(u.scale) else {"scale": u.scale})
                | ({} if ok else {"skipped": True})
            )
            for u, loss, norm, ok in known
        )
        return known

    def _log(self, job: Job) -> Iterator[Event]:
        """Write down the last steps and tell how it goes."""
        known = self._write_down()
        self.lines.attempt(job.step, self.record.flush)
        if bad := [str(u.step) for u, _, _, ok in known if not (ok or u.overflow)]:
            self.notes.append(f"skipped what was not finite in loss or gradient: step {', '.join(bad)}")
        yield from self._told()
        good = [(loss, norm) for _, loss, norm, ok in known if ok]
        if good:
            speed, left = self.pace.tokens_per_second, self.deadline.seconds_left(job.total - job.step)
            loss = sum(loss for loss, _ in good) / len(good)
            yield Progress(job.step, job.total, loss, good[-1][1], known[-1][0].rate, speed, left)

    def _told(self) -> Iterator[Event]:
        notes, self.notes[:] = self.notes[:], []
        yield from map(Said, notes)

    def _validate(self, job: Job) -> Event:
        with self.pace.pause("validation"):
            loss, bits = validate(job, self.ground.valid, limit=self.recipe.evaluate.rows)
        self.deadline.validated()
        self.score = loss
        better = loss < self.best
        self.best = min(self.best, loss)
        self.record.add([_finite({"kind": "valid", "step": job.step, "loss": loss, "bits_per_byte": bits})])
        self.trend.see(job.step, loss)
        if warning := self.trend.warning(loss, self.recipe.checkpoint.use):
            self.notes.append(warning)
        return Validated(job.step, loss, bits, better)

    def _sample(self, job: Job) -> Iterator[Event]:
        try:
            with job.in_use(), self.pace.pause("sample"):
                found = list(samples(job, self.ground))
        except (RequestError, CheckpointError) as error:
            yield Said(f"no sample: {error}")
            return
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            yield Said("no sample: there is not enough memory beside the training; set sample.every=0")
            return
        self.record.samples.add([_row(sample) for sample in found])
        yield from found

    def _save(self, job: Job, now: bool = False) -> Iterator[Event]:
        """Save a checkpoint, or say why not and leave it to a later step."""
        self.lines.attempt(job.step, self.record.flush, now=now)
        with self.pace.pause("save"):
            path = self.saves.attempt(job.step, lambda: self._checkpoint(job), now=now)
        yield from self._told()
        if path is not None:
            yield Saved(job.step, path)

    def _checkpoint(self, job: Job) -> Path:
        self.record.restore()
        self.history.settle()  # a checkpoint that knows more than the log would never be found stale
        state = {
            **job.state(),
            "identity": self.ground.identity,
            **self.deadline.state(job.timeline, job.step),
            "best": self.best if math.isfinite(self.best) else None,
            "rollbacks": len(self.history.returns),
            "recipe": settings.digest(self.recipe),
            "tokenizer": self.ground.tokenizer.digest,
        }
        path = self.store.save(job.step, tensors=job.tensors(), documents={"state": state}, score=self.score)
        self.record.gone = False
        if self._best_of_all():
            self.kept = self.best
        return path

    def _best_of_all(self) -> bool:
        """Whether this very step has a lower validation loss than every checkpoint."""
        return self.score is not None and self.score < self.kept

    def _resume(self) -> Generator[Event, None, Job]:
        """The job as it was at the newest whole checkpoint, or at the beginning if there is none."""
        self.history.read()
        self.history.settle()
        found = self.store.newest(say=self.notes.append)
        yield from self._told()
        if found is None and has_model(self.folder):
            raise CheckpointError(f"{self.folder} has a model but no checkpoint to go on from; start a new run")
        if found is not None:
            if format.document(found.path, "state").get("identity") != self.ground.identity:
                raise CheckpointError(
                    f"{found.path} is a checkpoint for another configuration; move it out of {self.folder}"
                )
            asked = self.recipe.budget.steps
            if asked and asked < found.step:
                raise CheckpointError(
                    f"budget.steps: {self.folder} has reached step {found.step} already, and {asked} is less; "
                    f"set budget.steps={found.step} or more"
                )
            if changed := changed_sources(self.ground.shards):
                raise CheckpointError(f"{changed[0]} has changed since the run began; restore it, or start a new run")
        require_fit(self.recipe, length=self.ground.longest)
        with stage("model", self.notes.append, self.clock) as current:
            job = prepare.job(self.ground, self.recipe.budget.timeline, begin=found is None)
            current.detail = f"{self.recipe.model.parameters():,} parameters"
        yield from self._told()
        self.deadline.take_up(job.timeline)
        self.home.describe()
        self._load(job, found)
        self.record.flush()
        if found is not None:
            where = f"resumed at step {job.step} of {job.total} from {found.path.name}"
            yield Said(f"all {job.total} steps are done" if job.timeline.ends(job.step) else where)
        return job

    def _load(self, job: Job, found: Checkpoint | None, fresh: Job | None = None) -> None:
        """Take up the state of a checkpoint or of a fresh job, with all that is known about it by now."""
        self.best = self.kept = math.inf
        if found is not None:
            self._take_up(job, found)
        elif fresh is not None:
            sections = fresh.tensors()
            job.load(lambda section: sections[section], 0, fresh.state())
        job.skipped = self.history.spans(job.skipped)
        job.soundness = Soundness(self.recipe.nonfinite, job.model.device)
        self.known.clear()
        self.pace.go_back()
        self.record.cut(job.step)
        self.trend = Trend(self.recipe.evaluate.patience, self.record.metrics.rows())
        self.detector = self._detector()
        for step, loss, norm in replay(self.record.metrics.rows()):
            self.detector.see(step, loss, norm)

    def _take_up(self, job: Job, found: Checkpoint) -> None:
        """Fill a job from a checkpoint; one with whole files that do not say what a checkpoint says is refused."""
        state = format.document(found.path, "state")
        try:
            job.load(lambda section: format.tensors(found.path, section), found.step, state)
            self.best = self.kept = math.inf if state["best"] is None else float(state["best"])
            self.deadline.resume(job.timeline, job.step, state)
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError, RuntimeError) as error:
            raise CheckpointError(
                f"{found.path} does not hold the state of this run ({type(error).__name__}: "
                f"{printable(str(error), 100)}); move it out of {self.store.folder} to go on from another one"
            ) from error

    def _detector(self) -> Detector:
        return Detector(self.options, clip=self.recipe.clip, nonfinite=self.recipe.nonfinite == "rollback")

    def _go_back(self, job: Job, alarm: Alarm) -> Iterator[Event]:
        """Answer an alarm: the log first, then the checkpoints that it gives up, then the weights."""
        at = job.step
        entry, found = self.history.decide(alarm, job.skipped, self.notes.append)
        # its start may be gone: then nothing has been given up yet
        fresh = prepare.beginning(self.ground, job.timeline) if found is None else None
        self.history.add(entry)
        self.lines.attempt(at, self.record.flush, now=True)
        with contextlib.suppress(OSError):  # what is left is settled before the next checkpoint
            self.history.settle()
        self._load(job, found, fresh)
        self.lines.attempt(at, self.record.flush, now=True)
        self.notes.append(entry.told())
        yield from self._told()
        if entry.action == "stop":
            raise Diverged(
                f"the run keeps failing near step {entry.step} ({entry.why}): {self.options.attempts} rollbacks did "
                f"not help; it is back at step {entry.to}, go on with `trivium train {self.folder} optim.rate=...` and "
                f"a rate below {self.recipe.optim.rate:g}"
            )

    def _stopped(self, job: Job) -> str:
        again = f"go on with `trivium train {self.folder}`"
        if self.saves.trouble is None:
            return f"stopped at step {job.step} of {job.total}; {again}"
        why = reason(self.saves.trouble)
        return f"stopped at step {job.step} of {job.total}, which could not be saved ({why}); {again}"

    def _finish(self, job: Job, signals: Signals) -> Iterator[Event]:
        """Bring the model for use to the disk, however long that takes within reason."""
        if not job.step:
            return
        for wait in (*WAITS, 0.0):
            try:
                self._deliver(job)
                break
            except OSError as error:
                if not wait or signals.received:
                    raise TriviumError(
                        f"the model of step {job.step} could not be written to {self.folder} ({reason(error)}); "
                        f"make room and go on with `trivium train {self.folder}`"
                    ) from error
                if wait == WAITS[0]:
                    yield Said(f"the model could not be written ({reason(error)}): trying again for {sum(WAITS):g} s")
                self.sleep(wait)
        yield from self._told()

    def _deliver(self, job: Job) -> None:
        """The model for use (the best checkpoint or the last step), and the report."""
        self.record.flush()
        self.lines.over(job.step)
        self.history.settle()
        if self.saves.trouble is not None or self.record.gone:
            self._checkpoint(job)
            self.saves.over(job.step)
        step, tensors = job.step, None
        if self.recipe.checkpoint.use == "best":
            best = self.store.best(say=self.notes.append)
            if best is not None and best.step != step:
                step, tensors = best.step, bundle.weights_in(best.path, best.manifest)
                self.notes.append(f"the model is that of step {step}, where the validation loss was lowest")
        scores = [r for r in self.record.metrics.rows() if r.get("kind") == "valid" and r["step"] == step]
        origin = {"run": self.recipe.name, "step": step, "valid": scores[-1] if scores else None}
        origin = {**prepare.start_notes(self.folder), **origin}
        weights = job.weights_for_use() if tensors is None else tensors
        bundle.save(self.folder, self.recipe.model, weights, self.ground.tokenizer, origin)
        self.home.describe(repeatable(self.recipe, job.timeline, self.deadline.validations))
        write_atomic(self.folder / "report.html", report.page(self.folder).encode())


def _row(sample: Sampled) -> dict[str, Any]:
    """A sample as a line of samples.jsonl."""
    row: dict[str, Any] = {"step": sample.step, "prompt": sample.prompt, "text": sample.text}
    return {**row, "reference": sample.reference} if sample.reference else row


def _finite(row: Mapping[str, Any]) -> dict[str, Any]:
    """JSON has no NaN: a number that is not finite is written as text."""
    return {k: str(v) if isinstance(v, float) and not math.isfinite(v) else v for k, v in row.items()}
