"""How the rate changes over a run (spec: training §2): pure functions of the step, all that a resume needs.

Steps count updates from 1. Lengths below 1 are a share of the run, others a number of steps.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, Protocol

from trivium.config import at_least
from trivium.errors import ConfigError


class Schedule(Protocol):
    """The factor of the peak rate at update `step` of `total`; in a run that follows the clock a fraction."""

    def factor(self, step: float, total: int) -> float: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Constant:
    """Linear warm-up, then flat."""

    warmup: float = 0.0

    def __post_init__(self) -> None:
        at_least("warmup", self.warmup, 0)

    def factor(self, step: float, total: int) -> float:
        return _rise(step, _steps(self.warmup, total))


@dataclass(frozen=True, kw_only=True, slots=True)
class Cosine:
    """Linear warm-up, then half a cosine down to `floor` of the peak."""

    warmup: float = 0.02
    floor: float = 0.1

    def __post_init__(self) -> None:
        at_least("warmup", self.warmup, 0)
        _share("floor", self.floor)

    def factor(self, step: float, total: int) -> float:
        warmup = _steps(self.warmup, total)
        if step < warmup:
            return _rise(step, warmup)
        return self.floor + (1 - self.floor) * 0.5 * (1 + math.cos(math.pi * _way(step, warmup, total)))


@dataclass(frozen=True, kw_only=True, slots=True)
class Wsd:
    """Warm-up, stable, decay: flat until the last `decay` steps, which fall to `floor` of the peak."""

    warmup: float = 0.02
    decay: float = 0.2
    floor: float = 0.0
    shape: Literal["linear", "sqrt"] = "linear"

    def __post_init__(self) -> None:
        at_least("warmup", self.warmup, 0)
        _share("floor", self.floor)
        if not self.decay > 0:
            raise ConfigError(f"decay: {self.decay} is not positive; try 0.2, or the constant schedule")

    def factor(self, step: float, total: int) -> float:
        warmup, decay = _steps(self.warmup, total), _steps(self.decay, total)
        if step < warmup:
            return _rise(step, warmup)
        share = _way(step, total - decay, total)
        left = 1 - (math.sqrt(share) if self.shape == "sqrt" else share)
        return self.floor + (1 - self.floor) * left


@dataclass(frozen=True, kw_only=True, slots=True)
class Linear:
    """Linear warm-up, then a straight line down to `floor` of the peak."""

    warmup: float = 0.02
    floor: float = 0.0

    def __post_init__(self) -> None:
        at_least("warmup", self.warmup, 0)
        _share("floor", self.floor)

    def factor(self, step: float, total: int) -> float:
        warmup = _steps(self.warmup, total)
        if step < warmup:
            return _rise(step, warmup)
        return self.floor + (1 - self.floor) * (1 - _way(step, warmup, total))


@dataclass(frozen=True, kw_only=True, slots=True)
class Noam:
    """Linear warm-up to the peak, then one over the root of the step: Vaswani's, if `peak(width)` is the rate."""

    warmup: int = 4000  # steps, never a share: how the rate falls depends on their number alone

    def __post_init__(self) -> None:
        at_least("warmup", self.warmup, 0)

    def peak(self, width: int) -> float:
        """The paper's rate where it is highest, for a model of this width."""
        return float((width * max(1, self.warmup)) ** -0.5)

    def factor(self, step: float, total: int) -> float:
        warmup = max(1, self.warmup)
        return min(step / warmup, math.sqrt(warmup / max(1, step)))


@dataclass(frozen=True, kw_only=True, slots=True)
class InverseSqrt:
    """Flat for `plateau` steps, then one over the root of the step: T5's, if the rate is 1 / sqrt(plateau) = 0.01."""

    plateau: int = 10_000

    def __post_init__(self) -> None:
        at_least("plateau", self.plateau, 1)

    def factor(self, step: float, total: int) -> float:
        return math.sqrt(self.plateau / max(step, self.plateau))


@dataclass(frozen=True, kw_only=True, slots=True)
class Slanted:
    """Slanted triangles (ULMFiT): up from 1/`ratio` of the peak within the warm-up, then straight down to it again."""

    warmup: float = 0.1
    ratio: float = 32.0

    def __post_init__(self) -> None:
        at_least("warmup", self.warmup, 0)
        at_least("ratio", self.ratio, 1)

    def factor(self, step: float, total: int) -> float:
        cut = int(self.warmup * total if self.warmup < 1 else self.warmup)  # rounded down, as its paper has it
        height = step / cut if step < cut else 1 - _way(step, cut, total)
        return (1 + height * (self.ratio - 1)) / self.ratio


SCHEDULES: dict[str, type[Schedule]] = {
    "constant": Constant,
    "cosine": Cosine,
    "wsd": Wsd,
    "linear": Linear,
    "noam": Noam,
    "inverse-sqrt": InverseSqrt,
    "slanted": Slanted,
}


def _share(name: str, value: float) -> None:
    if not 0 <= value <= 1:
        raise ConfigError(f"{name}: {value} is not between 0 and 1; it is a share of the peak rate")


def _steps(length: float, total: int) -> int:
    return round(length * total) if length < 1 else int(length)


def _rise(step: float, warmup: int) -> float:
    return min(1.0, step / warmup) if warmup else 1.0


def _way(step: float, start: int, end: int) -> float:
    """How far `step` is on the way from `start` to `end`, from 0 to 1."""
    return min(1.0, max(0.0, (step - start) / max(1, end - start)))
