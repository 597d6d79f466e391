"""How a model knows the order of its tokens (spec: architecture §2)."""

from __future__ import annotations

from trivium.parts.options.positions import (
    Alibi,
    Both,
    Buckets,
    Learned,
    NoPositions,
    Position,
    Rotary,
    Shaw,
    Sinusoidal,
)
from trivium.parts.positions.absolute import LearnedPositions, SinusoidalPositions
from trivium.parts.positions.base import Positions
from trivium.parts.positions.both import BothPositions
from trivium.parts.positions.relative import AlibiPositions, BucketPositions, ShawPositions
from trivium.parts.positions.rotary import RotaryPositions

__all__ = [
    "Alibi",
    "AlibiPositions",
    "Both",
    "BothPositions",
    "BucketPositions",
    "Buckets",
    "Learned",
    "LearnedPositions",
    "NoPositions",
    "Position",
    "Positions",
    "Rotary",
    "RotaryPositions",
    "Shaw",
    "ShawPositions",
    "Sinusoidal",
    "SinusoidalPositions",
]
