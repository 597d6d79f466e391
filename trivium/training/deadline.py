"""A budget in minutes: the clock decides how far the timeline of a run goes on, and the journal keeps it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from trivium.training.metrics import JsonLines
from trivium.training.pace import Pace
from trivium.training.recipe import Budget, Recipe
from trivium.training.timeline import SEGMENT, Knot, Timeline, extend, follow

VALIDATION = 0.1  # the largest share of the minutes that validations take


class Deadline:
    """Moves the horizon of a run on; without minutes in its budget there is nothing to decide."""

    def __init__(self, budget: Budget, pace: Pace, journal: JsonLines) -> None:
        self.seconds = 60 * budget.minutes
        self.pace = pace
        self.journal = journal
        self.validating = 0.0  # seconds of all validations
        self.validations = dict.fromkeys(budget.skipped, False)  # whether one that is due is made, by its step
        self._repeated = budget.timeline.horizon if budget.timeline.is_complete else 0
        self._step_seconds = 0.0  # the length of a step when the clock was last read
        self._expected = math.inf  # when the last knot is due, or late

    def take_up(self, timeline: Timeline) -> None:
        """Take what was decided in earlier sittings from the journal."""
        if self.seconds and not timeline.is_complete:
            self.validations |= follow(timeline, self.journal.rows(), self.journal.path)

    def resume(self, timeline: Timeline, step: int, state: Mapping[str, Any]) -> None:
        """Go to a checkpoint; its own share stands in for decisions that a power failure took from the journal."""
        self.pace.reach(float(state["seconds"]))
        self.validating = max(self.validating, float(state.get("validating", 0.0)))
        self._step_seconds = float(state.get("step_seconds", 0.0))
        self.pace.last = {**state.get("pauses", {}), **self.pace.last}
        if self.seconds and timeline.horizon < step:
            self._decided(timeline, Knot(step, float(state["share"])))

    def state(self, timeline: Timeline, step: int) -> dict[str, Any]:
        """What a checkpoint keeps."""
        if not self.seconds:
            return {"seconds": self.pace.seconds}
        return {
            "seconds": self.pace.seconds,
            "validating": self.validating,
            "share": timeline.share(step),
            "step_seconds": self.pace.lap_step(step) or self._step_seconds,
            "pauses": dict(self.pace.last),
        }

    def extend(self, timeline: Timeline, step: int) -> bool:
        """Decide how the timeline goes on after `step`, if it is the last one that is decided or the clock is ahead.

        Whether the journal has new rows.
        """
        if not self.seconds or timeline.ends(step):
            return False
        if step < timeline.horizon:
            if self.pace.seconds < self._expected:
                return False
            self._decided(timeline, Knot(step, timeline.share(step)))  # the same line, only shorter
        self._step_seconds = self.pace.lap_step(step) or self._step_seconds or self.seconds / timeline.planned
        self.pace.begin_lap(step)
        knot = extend(
            timeline,
            elapsed=self.pace.seconds,
            seconds=self.seconds,
            step_seconds=self._step_seconds,
            reserve=self._reserve(),
        )
        self._decided(timeline, knot)
        self._expected = self.pace.seconds + max(2 * (knot.step - step) * self._step_seconds, SEGMENT * self.seconds)
        return True

    def _reserve(self) -> float:
        """The seconds after the last step: its validation and sample, its checkpoint and the model itself."""
        pauses = self.pace.last
        return pauses.get("validation", 0.0) + pauses.get("sample", 0.0) + 2 * pauses.get("save", 0.0)

    def allows_validation(self, step: int) -> bool:
        """Whether the validation that is due after `step` is made: it must leave nine tenths of the minutes.

        That is decided once and written down: the run that is resumed or repeated makes the same ones.
        """
        if not self.seconds or step <= self._repeated:
            return self.validations.get(step, True)
        if step not in self.validations:
            spent = self.validating + self.pace.last.get("validation", 0.0)
            self.validations[step] = spent <= VALIDATION * self.seconds
            self.journal.add([{"step": step, "validate": self.validations[step]}])
        return self.validations[step]

    def validated(self) -> None:
        """Count the validation that has just ended."""
        self.validating += self.pace.last["validation"]

    def seconds_left(self, steps: int) -> float:
        """Until the end of the run, which has so many steps to go if their number is fixed."""
        left = self.seconds - self.pace.seconds if self.seconds else steps * self.pace.step_seconds
        return max(0.0, left)

    def _decided(self, timeline: Timeline, knot: Knot) -> None:
        row = knot._asdict()
        follow(timeline, [row], self.journal.path)
        self.journal.add([row])


def repeatable(recipe: Recipe, timeline: Timeline, validations: Mapping[int, bool]) -> Recipe:
    """The recipe with what the clock has decided, so that it repeats the run."""
    if not recipe.budget.minutes:
        return recipe
    knots, shares = zip(*timeline.knots, strict=True)
    skipped = tuple(sorted(step for step, made in validations.items() if not made and step <= timeline.horizon))
    return replace(recipe, budget=replace(recipe.budget, knots=knots, shares=shares, skipped=skipped))
