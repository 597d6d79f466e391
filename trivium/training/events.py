"""What a run tells while it goes: the loop yields these, and whoever runs it shows or ignores them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:  # those who only print events do without numpy
    from trivium.training.recipe import Recipe


class Opened(NamedTuple):
    """The run is there, created or found, with its resolved recipe; training begins."""

    folder: Path
    recipe: Recipe


class Progress(NamedTuple):
    """Some steps are done: the mean loss over them, and how it goes."""

    step: int
    total: int
    loss: float
    norm: float
    rate: float
    tokens_per_second: float
    seconds_left: float
    losses: dict[str, float] = {}  # noqa: RUF012 - never written; the mean of every loss, where there are several


class Validated(NamedTuple):
    """The validation text was scored; bits per byte where every token is predicted once."""

    step: int
    loss: float
    bits_per_byte: float | None
    best: bool
    losses: dict[str, float] = {}  # noqa: RUF012 - never written; the mean of every loss, where there are several


class Sampled(NamedTuple):
    """The model wrote something: what it was given, what it made of it, and what would have been right."""

    step: int
    prompt: str
    text: str
    reference: str = ""  # empty where anything may follow


class Saved(NamedTuple):
    """A checkpoint is on the disk."""

    step: int
    path: Path


class Said(NamedTuple):
    """A sentence for whoever watches."""

    text: str


Event = Opened | Progress | Validated | Sampled | Saved | Said


def line(event: Event) -> str:
    """An event as plain text; empty for those that need none."""
    match event:
        case Progress(step, total, loss, norm, rate, speed, left, losses):
            pace = f"  {speed:>9,.0f} tok/s  {duration(left)} left" if speed else ""  # two steps make a speed
            return f"step {step:>6}/{total}  loss {loss:.4f}{terms(losses)}  norm {norm:.2f}  rate {rate:.2e}{pace}"
        case Validated(step, loss, bits, best, losses):
            measured = "" if bits is None else f"  {bits:.4f} bits/byte"
            return f"step {step:>6}  valid {loss:.4f}{terms(losses)}{measured}{'  best' if best else ''}"
        case Sampled(step, prompt, text, ""):
            return f"--- sample at step {step}\n{prompt}{text}\n---"
        case Sampled(step, prompt, text, reference):
            return f"--- sample at step {step}\ngiven     {prompt}\nwritten   {text}\nreference {reference}\n---"
        case Said(text):
            return text
        case _:
            return ""


def terms(losses: Mapping[str, float]) -> str:
    """The means of several losses, to stand behind their total."""
    shown = ", ".join(f"{name} {mean:.4f}" for name, mean in losses.items())
    return f" ({shown})" if losses else ""


def duration(seconds: float) -> str:
    """Seconds as a clock shows them."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
