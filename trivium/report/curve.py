"""Loss over steps as SVG pictures: the whole run, and its later part enlarged."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from html import escape
from typing import NamedTuple

Point = tuple[float, float]

_WIDTH = 860
_LEFT, _RIGHT, _TOP, _BOTTOM = 52, 30, 14, 34
_RAW = 32  # first points that are never averaged: the fall from log V is in them
_POINTS = 800  # of a line
_LATER = 0.2  # the share of a run that the enlarged picture leaves out
_TALL = 4.0  # a value so many times the level of the start is cut off, and said to be
_USUAL = 0.995  # the share of the values that the enlarged picture has room for


class _Frame(NamedTuple):
    """What of the numbers a picture shows, and how high it is."""

    first: float
    last: float
    low: float
    high: float
    height: int

    def x(self, step: float) -> float:
        return _LEFT + (_WIDTH - _LEFT - _RIGHT) * (step - self.first) / max(self.last - self.first, 1e-9)

    def y(self, value: float) -> float:
        share = (self.high - min(value, self.high)) / max(self.high - self.low, 1e-9)
        return _TOP + (self.height - _TOP - _BOTTOM) * share


def curve(train: Sequence[Point], valid: Sequence[Point]) -> str:
    """The training and validation loss: all of it from the first step on, then what comes after the first fifth."""
    points = [*train, *valid]
    if not points:
        return '<p class="soft">Nothing was measured yet.</p>'
    last = max(step for step, _ in points)
    whole = _picture(train, valid, "Loss of the whole run", 320)
    after = _LATER * last
    late_train, late_valid = ([point for point in line if point[0] >= after] for line in (train, valid))
    if len(late_train) < 10 or not _worth([y for _, y in points], [y for _, y in (*late_train, *late_valid)]):
        return whole
    title = f"The same from step {math.ceil(after):,} on, enlarged"
    return f"{whole}\n{_picture(late_train, late_valid, title, 260, usual=True)}"


def _worth(all_values: Sequence[float], late: Sequence[float]) -> bool:
    """Whether the later part would be pressed flat in a picture of the whole."""
    return _quantile(late, _USUAL) - min(late) < 0.6 * (max(all_values) - min(all_values))


def _quantile(values: Sequence[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def _picture(train: Sequence[Point], valid: Sequence[Point], title: str, height: int, *, usual: bool = False) -> str:
    frame, cut = _frame([*train, *valid], height, usual=usual)
    caption = f"{title}; {cut}" if cut else title
    parts = [f'<figure><figcaption>{escape(caption)}</figcaption><svg viewBox="0 0 {_WIDTH} {height}" role="img">']
    parts.append(f"<title>{escape(title)}</title>")
    for value in _ticks(frame.low, frame.high):
        at = f"{frame.y(value):.1f}"
        parts.append(f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{at}" y2="{at}"/>')
        parts.append(f'<text x="{_LEFT - 6}" y="{at}" text-anchor="end" dominant-baseline="middle">{value:g}</text>')
    steps = _ticks(frame.first, frame.last)
    for value in [*([] if frame.x(steps[0]) - _LEFT < 60 else [frame.first]), *steps] if steps else [frame.first]:
        parts.append(f'<text x="{frame.x(value):.1f}" y="{height - 18}" text-anchor="middle">{_count(value)}</text>')
    parts.append(f'<text x="{_WIDTH - _RIGHT}" y="{height - 3}" text-anchor="end">step</text>')
    parts.append(_line(frame, _thin(train, 0 if usual else _RAW), "train", 1.2))
    parts.append(_line(frame, valid, "valid", 2))
    for step, value in valid if len(valid) <= _POINTS // 4 else []:
        place = f'cx="{frame.x(step):.1f}" cy="{frame.y(value):.1f}"'
        parts.append(f'<circle class="dot" {place} r="2.8"><title>step {_count(step)}: {value:.4f}</title></circle>')
    parts.append(_legend(bool(train), bool(valid)))
    return "".join([*parts, "</svg></figure>"])


def _frame(points: Sequence[Point], height: int, *, usual: bool) -> tuple[_Frame, str]:
    """The range of the numbers, and a sentence about values that are cut off.

    Of a whole run those far above the level at which it starts, else (`usual`) the few that are far from all others.
    """
    values = [value for _, value in points]
    low, high, cut = min(values), max(values), ""
    start = [value for _, value in sorted(points)[: max(1, min(_RAW, len(points) // 10))]]
    level = _quantile(values, _USUAL) if usual else max(*start, _quantile(values, 0.9))
    border = level + (level - low) if usual else _TALL * level
    if high > border > low:
        step = next(step for step, value in points if value == high)
        high, tallest = level + 0.2 * (level - low), high
        cut = f"cut off at {high:,.4g}: the highest value is {tallest:,.4g}, at step {_count(step)}"
    margin = 0.04 * (high - low) or 0.5
    first, last = min(step for step, _ in points), max(step for step, _ in points)
    return _Frame(first, max(last, first + 1), low - margin, high if cut else high + margin, height), cut


def _line(frame: _Frame, points: Iterable[Point], name: str, stroke: float) -> str:
    placed = " ".join(f"{frame.x(step):.1f},{frame.y(value):.1f}" for step, value in points)
    return f'<polyline class="{name}" fill="none" stroke-width="{stroke}" points="{placed}"/>' if placed else ""


def _legend(train: bool, valid: bool) -> str:
    names = [("train", "training")] * train + [("valid", "validation")] * valid
    parts, at = [], _WIDTH - _RIGHT - 96
    for name, word in names[::-1]:
        parts.append(
            f'<line class="{name}" stroke-width="3" x1="{at}" x2="{at + 22}" y1="{_TOP + 6}" y2="{_TOP + 6}"/>'
        )
        parts.append(f'<text x="{at + 28}" y="{_TOP + 10}">{word}</text>')
        at -= 96
    return "".join(parts)


def _thin(points: Sequence[Point], raw: int) -> list[Point]:
    """At most about `_POINTS` points: the first `raw` as they are, then each the mean of a run of neighbours."""
    head, rest = list(points[:raw]), points[raw:]
    size = max(1, -(-len(rest) // _POINTS))
    groups = [rest[start : start + size] for start in range(0, len(rest), size)]
    return head + [(sum(x for x, _ in g) / len(g), sum(y for _, y in g) / len(g)) for g in groups]


def _count(step: float) -> str:
    return f"{step:,.0f}"


def _ticks(low: float, high: float) -> list[float]:
    """About five round numbers between two values."""
    rough = max(high - low, 1e-9) / 5
    power = 10 ** math.floor(math.log10(rough))
    step = next(m * power for m in (1, 2, 5, 10) if m * power >= rough * (1 - 1e-9))
    first = math.ceil(low / step - 1e-9)
    return [round(k * step, 10) for k in range(first, math.floor(high / step + 1e-9) + 1)]
