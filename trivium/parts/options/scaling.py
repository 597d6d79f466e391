"""How rotary frequencies are changed so that a model reads further than it was trained to (spec: architecture §2.6)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

from trivium.config import at_least
from trivium.errors import ConfigError


class Scaling(Protocol):
    """The options of a frequency scaling."""

    @property
    def strength(self) -> float:
        """What cosines and sines are multiplied by; scores grow with its square."""
        ...

    def frequencies(self, theta: float, size: int) -> list[float]:
        """The angle per position of each of the size/2 pairs."""
        ...


def plain(theta: float, size: int) -> list[float]:
    """The frequencies as trained: 1 down to nearly 1/theta."""
    return [theta ** -(index / size) for index in range(0, size, 2)]


@dataclass(frozen=True, kw_only=True, slots=True)
class NoScaling:
    """Frequencies as they are."""

    @property
    def strength(self) -> float:
        return 1.0

    def frequencies(self, theta: float, size: int) -> list[float]:
        return plain(theta, size)


@dataclass(frozen=True, kw_only=True, slots=True)
class LinearScaling:
    """Every position divided by `factor` (position interpolation, Chen 2023)."""

    factor: float = 2.0

    def __post_init__(self) -> None:
        at_least("factor", self.factor, 1)

    @property
    def strength(self) -> float:
        return 1.0

    def frequencies(self, theta: float, size: int) -> list[float]:
        return [frequency / self.factor for frequency in plain(theta, size)]


@dataclass(frozen=True, kw_only=True, slots=True)
class Ntk:
    """A larger theta, chosen so that the lowest frequency is divided by `factor` and the highest stays."""

    factor: float = 2.0

    def __post_init__(self) -> None:
        at_least("factor", self.factor, 1)

    @property
    def strength(self) -> float:
        return 1.0

    def frequencies(self, theta: float, size: int) -> list[float]:
        if size < 4:
            raise ConfigError(f"scaling: ntk stretches between two pairs, so {size} rotated dimensions are too few")
        return plain(theta * self.factor ** (size / (size - 2)), size)


@dataclass(frozen=True, kw_only=True, slots=True)
class Yarn:
    """Pairs that turn often stay, pairs that turn seldom are interpolated, a ramp between; scores are sharpened."""

    factor: float = 4.0
    original: int = 2048  # the context the model was trained with
    fast: float = 32.0  # pairs that turn more often than this within it stay as they are
    slow: float = 1.0  # pairs that turn less often than this are divided by the factor
    attention: float = 0.0  # multiplies cosines and sines; 0 means 0.1 ln(factor) + 1

    def __post_init__(self) -> None:
        at_least("factor", self.factor, 1)
        at_least("original", self.original, 1)
        at_least("attention", self.attention, 0)
        if not 0 < self.slow < self.fast:
            raise ConfigError(f"slow: {self.slow} is not between 0 and fast ({self.fast}); try 1 and 32")

    @property
    def strength(self) -> float:
        return self.attention or 0.1 * math.log(self.factor) + 1

    def frequencies(self, theta: float, size: int) -> list[float]:
        if not theta > 1:
            raise ConfigError(f"theta: yarn needs frequencies that fall, so {theta} must be above 1; try 10000")

        def pair(turns: float) -> float:
            """The pair, as a real number, that turns so often within the original context."""
            return size * math.log(self.original / (turns * 2 * math.pi)) / (2 * math.log(theta))

        first, last = max(math.floor(pair(self.fast)), 0), min(math.ceil(pair(self.slow)), size - 1)
        width = last - first or 1  # a step where the ramp has no length
        result = []
        for index, frequency in enumerate(plain(theta, size)):
            kept = 1 - min(max((index - first) / width, 0), 1)
            result.append(frequency * kept + frequency / self.factor * (1 - kept))
        return result


@dataclass(frozen=True, kw_only=True, slots=True)
class Llama3:
    """As YaRN, but the ramp runs over the number of turns and scores stay as they are: LLaMA 3.1 and later."""

    factor: float = 8.0  # LLaMA 3.2: 32
    low: float = 1.0  # pairs that turn less often than this within the original context are divided by the factor
    high: float = 4.0  # pairs that turn more often stay as they are
    original: int = 8192

    def __post_init__(self) -> None:
        at_least("factor", self.factor, 1)
        at_least("original", self.original, 1)
        if not 0 < self.low < self.high:
            raise ConfigError(f"low: {self.low} is not between 0 and high ({self.high}); try 1 and 4")

    @property
    def strength(self) -> float:
        return 1.0

    def frequencies(self, theta: float, size: int) -> list[float]:
        result = []
        for frequency in plain(theta, size):
            turns = self.original * frequency / (2 * math.pi)
            kept = min(max((turns - self.low) / (self.high - self.low), 0), 1)
            result.append(frequency * kept + frequency / self.factor * (1 - kept))
        return result


SCALINGS: dict[str, type[Scaling]] = {
    "none": NoScaling,
    "linear": LinearScaling,
    "ntk": Ntk,
    "yarn": Yarn,
    "llama3": Llama3,
}
