"""The clock of a sitting: how long the run lasts, what pauses it, and how fast its steps are."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterator
from typing import Literal, NamedTuple

Pause = Literal["validation", "sample", "save"]

WINDOW = 15.0  # seconds of training that a speed is measured over
_FEWEST = 3  # completed steps in it, however long they take


class Completed(NamedTuple):
    """A moment at which the device has finished some step."""

    seconds: float  # of training, pauses left out
    step: int
    tokens: int


class Pace:
    """Measures one sitting of a run that has lasted `seconds` before.

    Speeds are those of steps whose numbers have come from the device, over the time that was not a pause: a host that
    runs ahead of its GPU, a validation or a first step that compiles does not show in them.
    """

    def __init__(self, clock: Callable[[], float], seconds: float = 0.0) -> None:
        self.clock = clock
        self._began = clock() - seconds
        self._paused = 0.0
        self.last: dict[Pause, float] = {}  # the length of the last pause of each kind
        self._completed: deque[Completed] = deque()
        self._lap: tuple[float, int] | None = None

    @property
    def seconds(self) -> float:
        """How long the run has lasted, earlier sittings included."""
        return self.clock() - self._began

    def reach(self, seconds: float) -> None:
        """Count the sittings before this one: the run has lasted at least so long."""
        self._began -= max(0.0, seconds - self.seconds)

    @contextlib.contextmanager
    def pause(self, kind: Pause) -> Iterator[None]:
        """Something that is not training."""
        before = self.clock()
        try:
            yield
        finally:
            self.last[kind] = self.clock() - before
            self._paused += self.last[kind]

    def complete(self, step: int, tokens: int) -> None:
        """Note that the device has finished `step`, which had so many tokens."""
        before = self._completed[-1].tokens if self._completed else 0
        self._completed.append(Completed(self.seconds - self._paused, step, before + tokens))
        while len(self._completed) > _FEWEST and self._completed[-1].seconds - self._completed[1].seconds > WINDOW:
            self._completed.popleft()

    def go_back(self) -> None:
        """Forget the completed steps: the run goes on from an earlier one."""
        self._completed.clear()
        self._lap = None

    @property
    def tokens_per_second(self) -> float:
        """Over the last WINDOW; 0 before two steps are completed."""
        first, last = self._span()
        return (last.tokens - first.tokens) / max(1e-9, last.seconds - first.seconds)

    @property
    def step_seconds(self) -> float:
        """The length of a step over the last WINDOW; 0 before two steps are completed."""
        first, last = self._span()
        return (last.seconds - first.seconds) / max(1, last.step - first.step)

    def begin_lap(self, step: int) -> None:
        """Measure steps from here on for `lap_step`."""
        self._lap = self.seconds - self._paused, step

    def lap_step(self, step: int) -> float:
        """The length of a step since the lap began, pauses left out; 0 if none is over."""
        if self._lap is None or step <= self._lap[1]:
            return 0.0
        return (self.seconds - self._paused - self._lap[0]) / (step - self._lap[1])

    def _span(self) -> tuple[Completed, Completed]:
        nothing = Completed(0.0, 0, 0)
        return (self._completed[0], self._completed[-1]) if self._completed else (nothing, nothing)
