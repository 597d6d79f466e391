"""What a run tells while it goes: the loop yields these, and whoever runs it shows or ignores them."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple


class Progress(NamedTuple):
    """Some steps are done: the mean loss over them, and how it goes."""

    step: int
    total: int
    loss: float
    norm: float
    rate: float
    tokens_per_second: float
    seconds_left: float


class Validated(NamedTuple):
    """The validation text was scored."""

    step: int
    loss: float
    bits_per_byte: float
    best: bool


class Sampled(NamedTuple):
    """The model wrote something."""

    step: int
    prompt: str
    text: str


class Saved(NamedTuple):
    """A checkpoint is on the disk."""

    step: int
    path: Path


class Said(NamedTuple):
    """A sentence for whoever watches."""

    text: str


Event = Progress | Validated | Sampled | Saved | Said
