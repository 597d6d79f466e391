"""Rounds of two or more sides in turn, and the one table that every benchmark prints."""

from __future__ import annotations

import datetime
import os
import platform
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch


class Line(NamedTuple):
    """One side's share of the table; the ratio is its speed over that of the last side, round by round."""

    side: str
    tokens_per_second: float
    milliseconds: float  # of one step
    spread: float  # half the distance between the quartiles, as a share of the median
    ratio: float
    low: float  # the ratio's quartiles
    high: float


def rounds(
    sides: Mapping[str, Callable[[], object]], number: int, device: torch.device, clock: Callable[[], float]
) -> dict[str, list[float]]:
    """The seconds of every round of every side; the order turns round each time (ABBA), so that drift hits all."""
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for index in range(number):
        for name in list(sides)[:: -1 if index % 2 else 1]:
            wait(device)
            start = clock()
            sides[name]()
            wait(device)
            seconds[name].append(clock() - start)
    return seconds


def wait(device: torch.device) -> None:
    """Let the device finish what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def summary(seconds: Mapping[str, Sequence[float]], *, tokens: int, steps: int) -> list[Line]:
    """What the table says of rounds of `steps` steps that handle `tokens` tokens together."""
    last = seconds[list(seconds)[-1]]
    lines = []
    for side, own in seconds.items():
        middle = statistics.median(own)
        # each round against its neighbour: a busy minute slows both and leaves their ratio
        low, ratio, high = _quartiles([theirs / ours for ours, theirs in zip(own, last, strict=True)])
        first, _, third = _quartiles(own)
        spread = (third - first) / 2 / middle
        lines.append(Line(side, tokens / middle, middle / steps * 1e3, spread, ratio, low, high))
    return lines


def table(lines: Sequence[Line], step: str) -> Iterator[str]:
    """The printed table; `step` is what the milliseconds are of."""
    yield f"{'side':<12} {'tokens/s':>10} {'ms/' + step:>10} {'spread':>8} {'ratio':>7}   quartiles"
    for line in lines:
        yield (
            f"{line.side:<12} {line.tokens_per_second:>10,.0f} {line.milliseconds:>10.2f} {line.spread:>7.1%} "
            f"{line.ratio:>7.2f}   {line.low:.2f} to {line.high:.2f}"
        )


def machine(device: torch.device, versions: Mapping[str, str]) -> str:
    """Where and when: what the numbers depend on beside the code."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else _processor()
    busy = f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores"
    libraries = ", ".join(f"{library} {version}" for library, version in versions.items())
    today = datetime.datetime.now(tz=datetime.UTC).date().isoformat()
    return f"{name}, {busy}, {torch.get_num_threads()} threads, {libraries}, {today}"


def _quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    if len(values) < 2:
        return values[0], values[0], values[0]
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, middle, high


def _processor() -> str:
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.is_file() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
