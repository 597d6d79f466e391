"""A run's folder when the disk fails: training goes on, and what could not be written is tried again."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

from trivium import config as settings
from trivium import records
from trivium.files import Lock, read_inside, remove_leftovers, write_atomic
from trivium.training.context import RunContext
from trivium.training.device import environment
from trivium.training.metrics import JsonLines
from trivium.training.recipe import Recipe
from trivium.training.rollback import History
from trivium.training.track import Tracker

T = TypeVar("T")

_FIRST, _LAST = 10, 640  # steps until the next try: doubled after each failure
_LARGEST = 1 << 20  # bytes of what a run says of itself
WAITS = (1.0, 2.0, 4.0, 8.0, 15.0)  # seconds between tries once no step is left to wait for


class RunFolder:
    """`with RunFolder(context) as folder:` — a run's locked folder, created again by `restore` if it was deleted."""

    def __init__(self, context: RunContext) -> None:
        self.context = context
        self.recipe = context.recipe
        self.folder = context.folder
        self._locks = contextlib.ExitStack()
        self._about = b""  # as it was written when the run began
        self._mark: os.stat_result | None = None  # of the lock file: another one there means another folder

    def __enter__(self) -> RunFolder:
        self._lock()
        with contextlib.suppress(OSError):
            self._about = read_inside(self.folder, records.ABOUT, _LARGEST)
        with contextlib.suppress(OSError):
            remove_leftovers(self.folder)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._locks.close()

    def describe(self, recipe: Recipe | None = None) -> None:
        """Write the resolved configuration; a `recipe` takes the place of the one before."""
        self.recipe = recipe or self.recipe
        write_atomic(self.folder / "config.toml", settings.write(self.recipe).encode())

    def restore(self) -> bool:
        """Make a folder that is gone again, from memory; whether that was needed. A full disk is the OSError."""
        if self._mark is not None and self._present(self._mark):
            return False
        self.folder.mkdir(parents=True, exist_ok=True)
        self._lock()
        self.describe()
        self.context.tokenizer.save(self.folder / "tokenizer.json")
        facts = json.dumps(environment(self.context.recipe), indent=2) + "\n"
        write_atomic(self.folder / "env.json", facts.encode())
        if self._about:
            write_atomic(self.folder / records.ABOUT, self._about)
        return True

    def _present(self, mark: os.stat_result) -> bool:
        try:
            return os.path.samestat(mark, self._file.stat()) and (self.folder / "config.toml").is_file()
        except FileNotFoundError:
            return False

    def _lock(self) -> None:
        with contextlib.suppress(FileNotFoundError):
            if self._mark is not None and os.path.samestat(self._mark, self._file.stat()):
                return  # only other files are gone
        self._locks.enter_context(Lock(self.folder))
        self._mark = self._file.stat()

    @property
    def _file(self) -> Path:
        return self.folder / ".lock"


class RunLog:
    """Everything that a run writes beside its checkpoints; `flush` brings all of it to the disk or raises an OSError,
    and what is left then waits in memory.
    """

    def __init__(self, run_folder: RunFolder, history: History, trackers: Sequence[Tracker]) -> None:
        self.run_folder = run_folder
        self.history = history
        self.metrics = JsonLines(run_folder.folder / "metrics.jsonl")
        self.samples = JsonLines(run_folder.folder / "samples.jsonl")
        # the knots of a budget in minutes
        self.timeline = JsonLines(run_folder.folder / "timeline.jsonl", damaged=True)
        self.trackers = trackers
        self.gone = False  # whether the folder had to be made again and holds no checkpoint yet
        self._untold: list[Mapping[str, Any]] | None = []  # None: the trackers must hear everything from the start

    def add(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Rows for the metrics and whoever tracks them, in memory until the next flush."""
        lines = list(rows)
        self.metrics.add(lines)
        if self._untold is not None:
            self._untold += lines

    def cut(self, step: int) -> None:
        """Forget what comes after `step`, on the disk as soon as it lets us."""
        self._untold = None
        for lines in (self.metrics, self.samples):
            with contextlib.suppress(OSError):
                lines.cut(step)

    def restore(self) -> None:
        """See to it that the folder is there."""
        if self.run_folder.restore():
            self.gone = True
            self.history.saved = False
            self._untold = None

    def flush(self) -> None:
        self.restore()
        if not self.history.saved:
            self.history.write()
        for lines in (self.metrics, self.samples, self.timeline):
            lines.flush()
        # nobody knows what a tracker that failed in the middle has heard: then all of them begin again
        untold, self._untold = self._untold, None
        for tracker in self.trackers:
            if untold is None:
                tracker.restart(self.metrics.rows())
            elif untold:
                tracker.write(untold)
        self._untold = []

    def close(self) -> None:
        for lines in (self.metrics, self.samples, self.timeline):
            lines.close()
        for tracker in self.trackers:
            tracker.close()


class RetryingWriter:
    """Tries to write; after a failure it says so once, waits some steps before the next try, and says when it works."""

    def __init__(self, what: str, say: Callable[[str], None]) -> None:
        self.what = what
        self.say = say
        self.trouble: OSError | None = None
        self._wait = self._again = 0

    def due(self, step: int) -> bool:
        """Whether something is left to be written and the time for another try has come."""
        return self.trouble is not None and step >= self._again

    def attempt(self, step: int, write: Callable[[], T], *, now: bool = False) -> T | None:
        """What `write` returns; None if it failed, or failed lately unless it must be tried now."""
        if self.trouble is not None and step < self._again and not now:
            return None
        try:
            result = write()
        except OSError as error:
            self._wait = min(_LAST, 2 * self._wait) if self.trouble is not None else _FIRST
            self._again = step + self._wait
            if self.trouble is None:
                self.say(
                    f"{self.what} could not be written at step {step} ({reason(error)}): training goes on, what was "
                    f"saved before is intact, and it is tried again within {self._wait} steps"
                )
            self.trouble = error
            return None
        self.over(step)
        return result

    def over(self, step: int) -> None:
        """It was written, here or by other means."""
        if self.trouble is not None:
            self.say(f"{self.what} could be written again at step {step}")
            self.trouble = None


def reason(error: OSError) -> str:
    """What the operating system says of a failure, in its words."""
    return error.strerror or str(error)
