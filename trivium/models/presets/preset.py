"""A named system: what it is, and how to make its configuration."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from trivium.models.config import ModelConfig

S = TypeVar("S")


@dataclass(frozen=True, slots=True)
class Preset:
    """Calling it gives the configuration."""

    about: str  # one sentence, for lists
    make: Callable[[], ModelConfig]

    def __call__(self) -> ModelConfig:
        return self.make()


def rows(about: str, make: Callable[[S], ModelConfig], shapes: Mapping[str, S]) -> dict[str, Preset]:
    """One preset for each row of a table of shapes."""
    return {name: Preset(about, partial(make, shape)) for name, shape in shapes.items()}
