"""Loss spikes: what counts as one, and which rows a run leaves out after going back before it.

A spike is a loss far above its own recent past for several steps, or for one with a gradient norm many times its
median, a number that is not finite, or an fp16 loss scale below 1 (OPT's sign of a collapse). The answer is PaLM's:
go back to a checkpoint well before it and leave out the batches around it.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from trivium.config import at_least

Span = tuple[int, int]  # rows [first, end) of the data order, in positions as `Job.cursor` counts them

# A smooth curve has a spread near zero, and then any bump would be many spreads high: nats, and a share of the median.
_LEAST_SPREAD, _LEAST_SHARE = 0.05, 0.01
_LEAST_PAST = 4  # a fourth of the window must be known before anything is judged


@dataclass(frozen=True, kw_only=True, slots=True)
class Off:
    """Loss spikes are left alone."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Rollback:
    """Go back to a checkpoint before a spike and leave out the batches that brought it."""

    window: int = 128  # steps that a new one is compared with
    threshold: float = 6.0  # a loss is high above the median by so many median absolute deviations
    patience: int = 3  # so many high losses in a row are a spike
    norm: float = 10.0  # a single one is, if the gradient norm was so many medians high and above `clip`
    margin: int = 100  # steps between the checkpoint and the spike
    attempts: int = 3  # rollbacks from one region before the run stops

    def __post_init__(self) -> None:
        at_least("window", self.window, 8)
        at_least("threshold", self.threshold, 1)
        at_least("patience", self.patience, 1)
        at_least("norm", self.norm, 2)
        at_least("margin", self.margin, 1)
        at_least("attempts", self.attempts, 1)


Spikes = Off | Rollback
SPIKES: dict[str, type[Off] | type[Rollback]] = {"off": Off, "rollback": Rollback}


class Alarm(NamedTuple):
    """A spike: the step where it began, the step at which it was found, and what gave it away."""

    onset: int
    found: int
    trigger: str  # loss, norm, nonfinite or scale
    words: str


class Detector:
    """Sees the numbers of every update in order; the last `window + patience` of them alone decide what it says,
    so a run that was stopped is judged as one that was not.
    """

    def __init__(self, options: Rollback, *, clip: float = 0.0, nonfinite: bool = False) -> None:
        self.options = options
        self.clip = clip  # norms up to here reach the weights whole by the user's own choice
        self.nonfinite = nonfinite  # whether a number that is not finite is an alarm too
        self._seen: deque[tuple[int, float, float]] = deque(maxlen=options.window + options.patience)

    def see(self, step: int, loss: float, norm: float, *, finite: bool = True, scale: float = math.inf) -> Alarm | None:
        """The numbers of one update; an alarm if they complete a spike. `scale` is the loss scale of fp16."""
        if scale < 1:
            return Alarm(step, step, "scale", f"the loss scale fell to {scale:g}")
        if not (finite and math.isfinite(loss) and math.isfinite(norm)):
            bad = self.nonfinite and not finite
            return Alarm(step, step, "nonfinite", "the loss or a gradient was not finite") if bad else None
        self._seen.append((step, loss, norm))
        seen = list(self._seen)
        before, recent = seen[: -self.options.patience], seen[-self.options.patience :]
        if len(before) * _LEAST_PAST < self.options.window:
            return None
        high = limit([loss for _, loss, _ in before], self.options.threshold)
        if loss <= high:
            return None
        return self._by_norm(before, recent, high) or self._by_loss(recent, high)

    def _by_loss(self, recent: list[tuple[int, float, float]], high: float) -> Alarm | None:
        least = min(loss for _, loss, _ in recent)
        if least <= high:
            return None
        steps = "1 step" if len(recent) == 1 else f"{len(recent)} steps"
        words = f"the loss was above {high:.4g} (now {recent[-1][1]:.4g}) for {steps}"
        return Alarm(recent[0][0], recent[-1][0], "loss", words)

    def _by_norm(
        self, before: list[tuple[int, float, float]], recent: list[tuple[int, float, float]], high: float
    ) -> Alarm | None:
        """A large norm counts once the loss is high too: alone it is a rare batch, and clipping makes it harmless."""
        usual = statistics.median(norm for _, _, norm in before)
        for step, _, norm in recent:
            if norm > max(self.clip, self.options.norm * usual):
                words = (
                    f"the gradient norm was {norm:.3g}, {norm / max(usual, 1e-9):.0f} times its median, "
                    f"and the loss {recent[-1][1]:.4g}, above {high:.4g}"
                )
                return Alarm(step, recent[-1][0], "norm", words)
        return None


def limit(past: Sequence[float], threshold: float) -> float:
    """The loss above which a step is out of the ordinary: the median and `threshold` median absolute deviations."""
    middle = statistics.median(past)
    spread = statistics.median(abs(loss - middle) for loss in past)
    return middle + threshold * max(spread, _LEAST_SPREAD, _LEAST_SHARE * middle)


def past(skipped: Iterable[Span], cursor: int, rows: int) -> int:
    """Where the batch of `rows` at `cursor` begins after all: one that touches a skipped span starts behind it."""
    for first, end in sorted(skipped):
        if first < cursor + rows and cursor < end:
            cursor = end
    return cursor


def position(skipped: Iterable[Span], step: int, rows: int) -> int:
    """The cursor before the update after `step`, from the beginning of the run."""
    cursor = step * rows
    for first, end in sorted(skipped):
        if first <= cursor:
            cursor += end - first
    return cursor
