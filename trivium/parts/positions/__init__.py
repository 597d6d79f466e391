"""How a model knows the order of its tokens (spec: architecture §2)."""

from __future__ import annotations

from trivium.parts.positions.absolute import Learned, LearnedPositions, NoPositions, Sinusoidal, SinusoidalPositions
from trivium.parts.positions.base import Position, Positions
from trivium.parts.positions.both import Both, BothPositions
from trivium.parts.positions.relative import Alibi, AlibiPositions, BucketPositions, Buckets, Shaw, ShawPositions
from trivium.parts.positions.rotary import Rotary, RotaryPositions
from trivium.parts.positions.scaling import SCALINGS, LinearScaling, Llama3, NoScaling, Ntk, Scaling, Yarn

__all__ = [
    "POSITIONS",
    "SCALINGS",
    "Alibi",
    "AlibiPositions",
    "Both",
    "BothPositions",
    "BucketPositions",
    "Buckets",
    "Learned",
    "LearnedPositions",
    "LinearScaling",
    "Llama3",
    "NoPositions",
    "NoScaling",
    "Ntk",
    "Position",
    "Positions",
    "Rotary",
    "RotaryPositions",
    "Scaling",
    "Shaw",
    "ShawPositions",
    "Sinusoidal",
    "SinusoidalPositions",
    "Yarn",
]

POSITIONS: dict[str, type[Position]] = {
    "none": NoPositions,
    "sinusoidal": Sinusoidal,
    "learned": Learned,
    "shaw": Shaw,
    "t5": Buckets,
    "rotary": Rotary,
    "alibi": Alibi,
    "both": Both,
}
