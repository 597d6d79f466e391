"""One sitting of a run: trained, guarded, recorded, told as a series of events."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from pathlib import Path
from typing import Any

from trivium import report
from trivium.checkpoints.model_files import withdraw
from trivium.checkpoints.store import Checkpoint
from trivium.errors import CheckpointError, Diverged, Interrupted, RequestError, TriviumError
from trivium.files import write_atomic
from trivium.training import track
from trivium.training.build_job import build_initial_job, build_job
from trivium.training.checkpointing import Checkpointer
from trivium.training.context import RunContext
from trivium.training.deadline import Deadline, repeatable
from trivium.training.events import Event, Progress, Said, Sampled, Saved, Validated
from trivium.training.fit import require_fit
from trivium.training.job import Job
from trivium.training.loop import updates
from trivium.training.oom import enough_memory, is_out_of_memory
from trivium.training.pace import Pace
from trivium.training.persist import WAITS, RetryingWriter, RunFolder, RunLog, reason
from trivium.training.process import process_settings
from trivium.training.readout import MeasuredUpdate, ReadOut
from trivium.training.rollback import replay
from trivium.training.samples import samples
from trivium.training.signals import Signals, to_standard_error
from trivium.training.spikes import Alarm
from trivium.training.stages import Say, stage
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
        context: RunContext,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.context = context
        self.folder = context.folder
        self.recipe = recipe = context.recipe
        self.alert: Say = to_standard_error  # called by another thread while a step runs
        self.clock = clock
        self.sleep = sleep
        self.checkpoints = Checkpointer(context)
        self.store, self.history = self.checkpoints.store, self.checkpoints.history
        self.run_folder = RunFolder(context)
        self.record = RunLog(self.run_folder, self.history, track.trackers(self.folder, recipe.track))
        self.notes: list[str] = []  # sentences on their way to becoming events
        self.lines = RetryingWriter("metrics.jsonl", self.notes.append)
        self.decisions = RetryingWriter("timeline.jsonl", self.notes.append)
        self.saves = RetryingWriter("the checkpoint", self.notes.append)
        self.detector = self.checkpoints.detector()
        self.known: list[MeasuredUpdate] = []  # read off the device and not yet written down
        self._start_clock()
        self.trend = Trend(recipe.evaluate.patience)

    def events(self) -> Iterator[Event]:
        """Train, and tell what happens; closing the iterator early leaves a valid run behind."""
        self._start_clock()
        process = process_settings(self.recipe, self.folder.parent)
        with self.run_folder, process, Signals(self.alert) as signals, enough_memory(self.recipe, self.folder):
            try:
                job = yield from self._resume()
                while (alarm := (yield from self._train(job, signals))) is not None:
                    yield from self._go_back(job, alarm)
                yield from self._finish(job, signals)
            finally:
                self.record.close()

    def _start_clock(self) -> None:
        self.pace = Pace(self.clock, self.context.spent)
        if self.context.validation:
            self.pace.last["validation"] = self.context.validation
        self.deadline = Deadline(self.recipe.budget, self.pace, self.record.timeline)

    def _train(self, job: Job, signals: Signals) -> Generator[Event, None, Alarm | None]:
        """Train to the end, or to an alarm, which is returned."""
        recipe, timeline, pending = self.recipe, job.timeline, ReadOut()
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
            self.checkpoints.score = None
            alarm = self._read(pending, 0 if settling else _BEHIND)
            if alarm is not None:
                return alarm
            if settling or step % recipe.log == 0:
                yield from self._log(job)
            if validating and not stopping:
                yield self._validate(job)
                again = again or self.checkpoints.is_best or self.trend.is_exhausted
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
        validating = timeline.due(self.recipe.evaluate.every, step) and len(self.context.valid) > 0
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

    def _read(self, pending: ReadOut, behind: int) -> Alarm | None:
        """Judge the numbers that have come from the device, waiting for all but the last `behind`; a bad one may end
        the run.
        """
        fresh = pending.read(behind)
        self.known += fresh
        for update, loss, norm, finite, _ in fresh:
            self.pace.complete(update.step, update.tokens)
            sound = finite or update.overflow
            if not sound and self.recipe.nonfinite == "stop":
                self._write_down()
                self.lines.attempt(update.step, self.record.flush)
                raise Diverged(
                    f"the loss or a gradient was not finite at step {update.step}; the weights are those of step "
                    f"{update.step - 1} and checkpoints are intact: lower optim.rate (now {self.recipe.optim.rate:g}) "
                    "or set nonfinite=skip or nonfinite=rollback"
                )
            alarm = self.detector.see(update.step, loss, norm, finite=sound, scale=update.scale)
            if alarm is not None and self.checkpoints.rolls_back:
                return alarm
        return None

    def _write_down(self) -> list[MeasuredUpdate]:
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
                    "tokens": u.tokens,
                    "seconds": round(self.pace.seconds, 3),
                }
                | ({} if math.isinf(u.scale) else {"scale": u.scale})
                | ({} if finite else {"skipped": True})
                | ({"losses": losses} if len(losses) > 1 else {})
            )
            for u, loss, norm, finite, losses in known
        )
        return known

    def _log(self, job: Job) -> Iterator[Event]:
        """Write down the last steps and tell how it goes."""
        known = self._write_down()
        self.lines.attempt(job.step, self.record.flush)
        if bad := [str(one.update.step) for one in known if not (one.finite or one.update.overflow)]:
            self.notes.append(f"skipped what was not finite in loss or gradient: step {', '.join(bad)}")
        yield from self._told()
        if good := [one for one in known if one.finite]:
            speed, left = self.pace.tokens_per_second, self.deadline.seconds_left(job.total - job.step)
            loss, norm, rate = sum(one.loss for one in good) / len(good), good[-1].norm, known[-1].update.rate
            means = {name: sum(one.losses[name] for one in good) / len(good) for name in good[0].losses}
            yield Progress(job.step, job.total, loss, norm, rate, speed, left, means if len(means) > 1 else {})

    def _told(self) -> Iterator[Event]:
        notes, self.notes[:] = self.notes[:], []
        yield from map(Said, notes)

    def _validate(self, job: Job) -> Event:
        with self.pace.pause("validation"):
            loss, bits, losses = validate(job, self.context.valid, limit=self.recipe.evaluate.rows)
        self.deadline.validated()
        better = self.checkpoints.validated(loss)
        losses = losses if len(losses) > 1 else {}
        row = {"kind": "valid", "step": job.step, "loss": loss, "bits_per_byte": bits}
        self.record.add([_finite(row | ({"losses": losses} if losses else {}))])
        self.trend.see(job.step, loss)
        if warning := self.trend.warning(loss, self.recipe.checkpoint.use):
            self.notes.append(warning)
        return Validated(job.step, loss, bits, better, losses)

    def _sample(self, job: Job) -> Iterator[Event]:
        try:
            with job.in_use(), self.pace.pause("sample"):
                found = list(samples(job, self.context))
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
            path = self.saves.attempt(job.step, lambda: self._write_checkpoint(job), now=now)
        yield from self._told()
        if path is not None:
            yield Saved(job.step, path)

    def _write_checkpoint(self, job: Job) -> Path:
        return self.checkpoints.save(job, self.deadline, self.record)

    def _resume(self) -> Generator[Event, None, Job]:
        """The job as it was at the newest whole checkpoint, or at the beginning if there is none."""
        found = self.checkpoints.find(self.notes.append)
        yield from self._told()
        self.checkpoints.check(found)
        require_fit(self.recipe, length=self.context.longest)
        with stage("model", self.notes.append, self.clock) as current:
            job = build_job(self.context, self.recipe.budget.timeline, begin=found is None)
            current.detail = f"{self.recipe.model.parameters():,} parameters"
        yield from self._told()
        self.deadline.take_up(job.timeline)
        self.run_folder.describe()
        self._load(job, found)
        self.record.flush()
        if found is not None:
            where = f"resumed at step {job.step} of {job.total} from {found.path.name}"
            yield Said(f"all {job.total} steps are done" if job.timeline.ends(job.step) else where)
        return job

    def _load(self, job: Job, found: Checkpoint | None, fresh: Job | None = None) -> None:
        """Load a checkpoint or a fresh job, and bring the logs and the detector back to its step."""
        self.checkpoints.load(job, found, self.deadline, fresh)
        self.known.clear()
        self.pace.go_back()
        self.record.cut(job.step)
        self.trend = Trend(self.recipe.evaluate.patience, self.record.metrics.rows())
        self.detector = self.checkpoints.detector()
        for step, loss, norm in replay(self.record.metrics.rows()):
            self.detector.see(step, loss, norm)

    def _go_back(self, job: Job, alarm: Alarm) -> Iterator[Event]:
        """Answer an alarm: the log first, then the checkpoints that it gives up, then the weights."""
        at = job.step
        entry, found = self.history.decide(alarm, job.skipped, self.notes.append)
        # its start may be gone: then nothing has been given up yet
        fresh = build_initial_job(self.context, job.timeline) if found is None else None
        self.history.add(entry)
        self.lines.attempt(at, self.record.flush, now=True)
        with contextlib.suppress(OSError):  # what is left is settled before the next checkpoint
            self.history.settle()
        self._load(job, found, fresh)
        self.lines.attempt(at, self.record.flush, now=True)
        self.notes.append(entry.told())
        yield from self._told()
        if entry.action == "stop":
            attempts = self.checkpoints.options.attempts
            raise Diverged(
                f"the run keeps failing near step {entry.step} ({entry.why}): {attempts} rollbacks did "
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
            self._write_checkpoint(job)
            self.saves.over(job.step)
        self.checkpoints.write_model(job, self.record.metrics.rows(), self.notes.append)
        self.run_folder.describe(repeatable(self.recipe, job.timeline, self.deadline.validations))
        write_atomic(self.folder / "report.html", report.page(self.folder).encode())


def _row(sample: Sampled) -> dict[str, Any]:
    """A sample as a line of samples.jsonl."""
    row: dict[str, Any] = {"step": sample.step, "prompt": sample.prompt, "text": sample.text}
    return {**row, "reference": sample.reference} if sample.reference else row


def _finite(row: Mapping[str, Any]) -> dict[str, Any]:
    """JSON has no NaN: a number that is not finite is written as text."""
    found: dict[str, Any] = {}
    for name, value in row.items():
        bad = isinstance(value, float) and not math.isfinite(value)
        found[name] = _finite(value) if isinstance(value, Mapping) else str(value) if bad else value
    return found
