"""How a model knows the order of its tokens (spec: architecture §2)."""

from __future__ import annotations

from trivium.parts.positions.absolute import LearnedPositions, SinusoidalPositions
from trivium.parts.positions.base import Positions
from trivium.parts.positions.both import BothPositions
from trivium.parts.positions.relative import AlibiPositions, BucketPositions, ShawPositions
from trivium.parts.positions.rotary import RotaryPositions

__all__ = [
    "AlibiPositions",
    "BothPositions",
    "BucketPositions",
    "LearnedPositions",
    "Positions",
    "RotaryPositions",
    "ShawPositions",
    "SinusoidalPositions",
]
