"""How far a run is after each step: fixed by a number of steps, or decided by the clock, knot by knot.

A timeline is piecewise linear in the step. Its knots are written into the run's configuration before the steps that
lead to them are made, so a run that is resumed or repeated sees the same shares, and with them the same rates.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from trivium.errors import CheckpointError

SEGMENT = 0.01  # of a budget in minutes until the clock is read again
CATCH_UP = 0.05  # of it in which a run that was slower or faster than expected is back on the clock


class Knot(NamedTuple):
    """The share of a run that is over after a step."""

    step: int
    share: float


@dataclass(slots=True)
class Timeline:
    """The share of a run that is over after each step, up to its last knot; a share of 1 is the end.

    `planned` is the number of steps that schedules count in. A run with a fixed number of steps has one knot, where
    the position of a step is its number.
    """

    planned: int
    knots: list[Knot] = field(default_factory=list)

    @classmethod
    def fixed(cls, steps: int) -> Timeline:
        """The timeline of a run with a fixed number of steps."""
        return cls(steps, [Knot(steps, 1.0)])

    @property
    def is_fixed(self) -> bool:
        return self.knots == [(self.planned, 1.0)]

    @property
    def is_complete(self) -> bool:
        """Whether the end is decided."""
        return bool(self.knots) and self.knots[-1].share >= 1

    @property
    def horizon(self) -> int:
        """The last step for which a share is decided."""
        return self.knots[-1].step if self.knots else 0

    @property
    def total(self) -> int:
        """The number of steps in all; an estimate until the end is decided."""
        if self.is_complete or not self.knots:
            return self.horizon or self.planned
        before, last = (Knot(0, 0.0), *self.knots)[-2:]
        slope = (last.share - before.share) / (last.step - before.step)
        return last.step + round((1 - last.share) / slope) if slope > 0 else max(self.planned, last.step + 1)

    def add(self, knot: Knot) -> None:
        """Decide one more knot; it takes the place of those that are not before it."""
        while self.knots and self.knots[-1].step >= knot.step:
            self.knots.pop()
        self.knots.append(knot)

    def ends(self, step: int) -> bool:
        """Whether `step` is the last one."""
        return self.is_complete and step == self.horizon

    def share(self, step: int) -> float:
        """The share of the run that is over after `step`; beyond the last knot that of the last knot."""
        index = bisect.bisect_left(self.knots, step, key=lambda knot: knot.step)
        if index == len(self.knots):
            return self.knots[-1].share if self.knots else 0.0
        start, end = self.knots[index - 1] if index else Knot(0, 0.0), self.knots[index]
        return start.share + (end.share - start.share) * ((step - start.step) / (end.step - start.step))

    def position(self, step: int) -> float:
        """`step` as a schedule counts it, of `planned`."""
        return step if self.is_fixed else self.planned * self.share(step)

    def due(self, every: float, step: int) -> bool:
        """Whether something that happens `every` so often happens after `step`; the end always counts."""
        if self.ends(step):
            return True
        if not every:
            return False
        if self.is_fixed or not _is_share(every):
            return step % interval(every, self.total) == 0
        return int(self.share(step) / every) > int(self.share(step - 1) / every)


def follow(timeline: Timeline, rows: Iterable[Mapping[str, Any]], path: Path) -> dict[int, bool]:
    """Lead a timeline through the decisions in the rows of a journal; which validations were to be made, by step."""
    validations: dict[int, bool] = {}
    try:
        for row in rows:
            step = int(row["step"])
            if "validate" in row:
                validations[step] = bool(row["validate"])
            elif step or row["share"]:
                timeline.add(Knot(step, float(row["share"])))
            else:  # back to the beginning
                timeline.knots.clear()
        shares = (0.0, *(knot.share for knot in timeline.knots), 1.0)
        if all(knot.step > 0 for knot in timeline.knots) and all(a <= b for a, b in pairwise(shares)):
            return validations
    except (KeyError, TypeError, ValueError, OverflowError):
        pass
    raise CheckpointError(f"{path} is damaged; delete it, and the run goes on by the clock")


def interval(every: float, total: int) -> int:
    """The steps between two times of something that happens `every` so often in a run of `total`, at least 1."""
    return max(1, (round(every * total) if _is_share(every) else int(every)) if every else total)


def times(every: float, total: int) -> int:
    """How often something happens in a run of about `total` steps."""
    return -(-max(1, total) // interval(every, max(1, total)))


def _is_share(every: float) -> bool:
    return isinstance(every, float) and 0 < every <= 1


def extend(timeline: Timeline, *, elapsed: float, seconds: float, step_seconds: float, reserve: float) -> Knot:
    """The next knot of a run that shall end after `seconds`, of which `elapsed` are over at its last knot.

    A step takes `step_seconds`; `reserve` is kept for what follows the last step. The share follows the clock: a run
    that is ahead or behind is back on it within CATCH_UP, at the latest at its end.
    """
    step, share = timeline.horizon, timeline.share(timeline.horizon)
    end = max(seconds - reserve, 1e-9)  # when the last step shall be over
    left = max(0.0, end - elapsed)
    steps_left = left / max(step_seconds, 1e-9)
    # shorter segments towards the end: a machine that turns slow there costs little
    count = max(1, round(min(SEGMENT * seconds, left / 3) / max(step_seconds, 1e-9)))
    if steps_left < 1.5 or count > steps_left - 0.5:
        return Knot(step + max(1, min(count, round(steps_left))), 1.0)
    ahead = min(CATCH_UP * seconds, left)
    slope = max(0.0, (elapsed + ahead) / end - share) / ahead
    return Knot(step + count, min(share + slope * count * step_seconds, 1 - (1 - share) / (steps_left + 1)))
