"""How a model knows the order of its tokens (spec: architecture §2)."""

from __future__ import annotations

from trivium.parts.options.positions import (
    AlibiOptions,
    BothOptions,
    BucketOptions,
    LearnedOptions,
    NoPositionOptions,
    Position,
    RotaryOptions,
    ShawOptions,
    SinusoidalOptions,
)
from trivium.parts.positions.absolute import LearnedPositions, SinusoidalPositions
from trivium.parts.positions.base import Positions
from trivium.parts.positions.both import BothPositions
from trivium.parts.positions.relative import AlibiPositions, BucketPositions, ShawPositions
from trivium.parts.positions.rotary import RotaryPositions

__all__ = [
    "AlibiOptions",
    "AlibiPositions",
    "BothOptions",
    "BothPositions",
    "BucketOptions",
    "BucketPositions",
    "LearnedOptions",
    "LearnedPositions",
    "NoPositionOptions",
    "Position",
    "Positions",
    "RotaryOptions",
    "RotaryPositions",
    "ShawOptions",
    "ShawPositions",
    "SinusoidalOptions",
    "SinusoidalPositions",
]
