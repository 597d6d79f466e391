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

from trivium.errors import TriviumError


class Line(NamedTuple):
    """One side's share of the table; the ratio is its speed over that of the last side, round by round."""

    side: str
    tokens_per_second: float
    milliseconds: float  # of one step
    spread: float  # half the distance between the quartiles, as a share of the median
    ratio: float
    low: float  # the ratio's quartiles
    high: float
    work: Work | None = None


class Work(NamedTuple):
    """What a side's speed comes to on this device, where that was asked for; None where nobody could say."""

    rate: float | None = None  # operations a second by formula (training), or bytes (decoding)
    share: float | None = None  # of the measured ceiling
    memory: float | None = None  # the most bytes at a time


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


def summary(
    seconds: Mapping[str, Sequence[float]],
    *,
    tokens: float | Mapping[str, Sequence[float]],
    steps: int,
    against: str = "",
) -> list[Line]:
    """What the table says of rounds of `steps` steps; `against` is the side that ratios are over, "" the last one.

    `tokens` are those of a round, or of every round of every side where they differ.
    """
    counts = tokens if isinstance(tokens, Mapping) else {side: [tokens] * len(own) for side, own in seconds.items()}
    rates = {side: [many / long for many, long in zip(counts[side], own, strict=True)] for side, own in seconds.items()}
    last = rates[against or list(seconds)[-1]]
    lines = []
    for side, own in rates.items():
        # each round against its neighbour: a busy minute slows both and leaves their ratio
        low, ratio, high = _quartiles([ours / theirs for ours, theirs in zip(own, last, strict=True)])
        middle = statistics.median(seconds[side])
        # of the time that a token takes: rounds may have different numbers of them
        first, each, third = _quartiles([1 / rate for rate in own])
        spread = (third - first) / 2 / each
        lines.append(Line(side, 1 / each, middle / steps * 1e3, spread, ratio, low, high))
    return lines


def fastest(lines: Sequence[Line], sides: Sequence[str]) -> str:
    """The name of the fastest of some sides."""
    return max((line for line in lines if line.side in sides), key=lambda line: line.tokens_per_second).side


def table(lines: Sequence[Line], step: str, *, unit: str = "TFLOP/s", what: str = "tokens") -> Iterator[str]:
    """The printed table; `step` is what the milliseconds are of, `unit` what the work is counted in (10**12)."""
    worked = any(line.work for line in lines)
    wide = max(12, *(len(line.side) for line in lines))
    head = f" {unit:>8} {'ceiling':>8} {'GB':>7}" if worked else ""
    yield f"{'side':<{wide}} {what + '/s':>11} {'ms/' + step:>11}{head} {'spread':>7} {'ratio':>7}   quartiles"
    for line in lines:
        middle = _worked(line.work or Work()) if worked else ""
        yield (
            f"{line.side:<{wide}} {line.tokens_per_second:>11,.0f} {line.milliseconds:>11.2f}{middle} "
            f"{line.spread:>7.1%} {line.ratio:>7.2f}   {line.low:.2f} to {line.high:.2f}"
        )


def _worked(work: Work) -> str:
    rate = "-" if work.rate is None else f"{work.rate / 1e12:.3g}"
    share = "-" if work.share is None else f"{work.share:.1%}"
    memory = "-" if work.memory is None else f"{work.memory / 1e9:.2f}"
    return f" {rate:>8} {share:>8} {memory:>7}"


def machine(device: torch.device, versions: Mapping[str, str]) -> str:
    """Where and when: what the numbers depend on beside the code."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else _processor()
    busy = f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores"
    libraries = ", ".join(f"{library} {version}" for library, version in versions.items())
    today = datetime.datetime.now(tz=datetime.UTC).date().isoformat()
    return f"{name}, {busy}, {torch.get_num_threads()} threads, {libraries}, {today}"


def typed(main: Callable[[], None]) -> None:
    """Run what was typed; what the caller can mend is told in a sentence."""
    try:
        main()
    except TriviumError as error:
        raise SystemExit(str(error)) from None


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
