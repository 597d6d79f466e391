"""A run as one self-contained page: the curve as a picture, scores, samples and the configuration."""

from __future__ import annotations

import html
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

Point = tuple[float, float]
_FILLS = ("masked", "spans")

_STYLE = """
:root { color-scheme: light dark; --ink: #1d2733; --paper: #fdfcfa; --soft: #6b7785; --line: #d9d5cd;
  --train: #8aa4c8; --valid: #c2552d; }
@media (prefers-color-scheme: dark) { :root { --ink: #e4e7eb; --paper: #15191f; --soft: #93a0ae; --line: #333b45;
  --train: #5d7ba6; --valid: #ef8354; } }
body { font: 16px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper); max-width: 56rem;
  margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.5rem; margin-bottom: .2rem } h2 { font-size: 1.1rem; margin-top: 2rem }
.soft { color: var(--soft) } table { border-collapse: collapse }
td, th { padding: .15rem .8rem .15rem 0; text-align: left }
td.number { text-align: right; font-variant-numeric: tabular-nums }
pre { white-space: pre-wrap; border-left: 3px solid var(--line); padding-left: .8rem; font-size: .9rem }
svg text { fill: var(--soft); font: 12px system-ui, sans-serif }
.grid { stroke: var(--line) } .train { stroke: var(--train) } .valid { stroke: var(--valid) }
"""


def use_of(about: Mapping[str, Any], run: Path) -> str:
    """The command that uses a trained model, by what it was trained for."""
    family, objective = about.get("family"), about.get("objective")
    if family == "encoder":
        return (
            f"trivium fill {run} 'A text with one [MASK] in it.'" if objective in _FILLS else f"trivium embed {run} A B"
        )
    if objective == "seq2seq":
        return f"trivium translate {run} 'A text.'"
    return f"trivium generate {run} 'It was'"


def page(folder: Path) -> str:
    """The page of the run in `folder`, made from the files that it holds."""
    metrics = _lines(folder / "metrics.jsonl")
    trained = [row for row in metrics if row.get("kind") == "train" and isinstance(row.get("loss"), int | float)]
    scored = [row for row in metrics if row.get("kind") == "valid" and isinstance(row.get("loss"), int | float)]
    tests = [row for row in metrics if row.get("kind") == "test"]
    sections = [
        f"<h1>{html.escape(folder.resolve().name)}</h1>",
        f'<p class="soft">{html.escape(_summary(trained, scored, tests))}</p>',
        "<h2>Loss, nats per token</h2>",
        curve([(row["step"], row["loss"]) for row in trained], [(row["step"], row["loss"]) for row in scored]),
        "<h2>Validation</h2>",
        _table(["step", "loss", "bits per byte"], [(r["step"], r["loss"], r.get("bits_per_byte")) for r in scored]),
        "<h2>Samples</h2>",
        *(_sample(row) for row in reversed(_lines(folder / "samples.jsonl"))),
        "<h2>Machine</h2>",
        f"<pre>{html.escape(_read(folder / 'env.json'))}</pre>",
        "<h2>Configuration</h2>",
        f"<details><summary>config.toml</summary><pre>{html.escape(_read(folder / 'config.toml'))}</pre></details>",
    ]
    title = html.escape(folder.resolve().name)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{title}</title><style>{_STYLE}</style></head>\n<body>\n" + "\n".join(sections) + "\n</body></html>\n"
    )


def curve(train: Sequence[Point], valid: Sequence[Point], *, width: int = 860, height: int = 320) -> str:
    """The training and validation loss over steps as an SVG picture."""
    points = [*train, *valid]
    if not points:
        return '<p class="soft">Nothing was measured yet.</p>'
    left, bottom, right, top = 46, 26, 10, 8
    last = max(x for x, _ in points) or 1
    # the first steps fall from log(V): without a cap they would press the rest flat
    low = min(y for _, y in points)
    high = max(_quantile([y for _, y in points], 0.98), low + 1e-6)
    low -= 0.05 * (high - low)

    def place(point: Point) -> str:
        x = left + (width - left - right) * point[0] / last
        y = top + (height - top - bottom) * (high - min(point[1], high)) / (high - low)
        return f"{x:.1f},{y:.1f}"

    parts = [f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="loss over steps">']
    for value in _ticks(low, high):
        at = place((0, value)).split(",")[1]
        parts.append(f'<line class="grid" x1="{left}" x2="{width - right}" y1="{at}" y2="{at}"/>')
        parts.append(f'<text x="{left - 6}" y="{at}" text-anchor="end" dominant-baseline="middle">{value:g}</text>')
    for value in _ticks(0, last):
        at = place((value, low)).split(",")[0]
        parts.append(f'<text x="{at}" y="{height - 6}" text-anchor="middle">{value:g}</text>')
    parts.append(_line(map(place, _thin(train)), "train", 1.2))
    parts.append(_line(map(place, valid), "valid", 2))
    for point in valid:
        x, y = place(point).split(",")
        parts.append(f'<circle class="valid" fill="var(--valid)" cx="{x}" cy="{y}" r="2.5"/>')
    parts.append(
        f'<text x="{width - right}" y="{top + 12}" text-anchor="end">blue: training, orange: validation</text>'
    )
    return "".join([*parts, "</svg>"])


def _line(points: Iterable[str], name: str, stroke: float) -> str:
    return f'<polyline class="{name}" fill="none" stroke-width="{stroke}" points="{" ".join(points)}"/>'


def _thin(points: Sequence[Point], most: int = 800) -> list[Point]:
    """At most `most` points, each the mean of a run of neighbours."""
    size = max(1, -(-len(points) // most))
    groups = [points[start : start + size] for start in range(0, len(points), size)]
    return [(sum(x for x, _ in g) / len(g), sum(y for _, y in g) / len(g)) for g in groups]


def _quantile(values: Sequence[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def _ticks(low: float, high: float) -> list[float]:
    """About five round numbers between two values."""
    rough = max(high - low, 1e-9) / 5
    power = 10 ** math.floor(math.log10(rough))
    step = next(m * power for m in (1, 2, 5, 10) if m * power >= rough)
    first = math.ceil(low / step)
    return [round(k * step, 10) for k in range(first, math.floor(high / step) + 1)]


def _summary(trained: list[dict[str, Any]], scored: list[dict[str, Any]], tests: list[dict[str, Any]]) -> str:
    if not trained:
        return "No step was finished yet."
    words = [f"{trained[-1]['step']} steps in {trained[-1].get('seconds', 0):.0f} s"]
    if scored:
        best = min(scored, key=lambda row: float(row["loss"]))
        words.append(f"best validation {_score(best)} at step {best['step']}")
    words += [f"test {_score(row)}" for row in tests[-1:]]
    return "; ".join(words) + "."


def _score(row: dict[str, Any]) -> str:
    """Bits per byte where an objective scores a whole text, else its own loss."""
    bits = row.get("bits_per_byte")
    return f"{row['loss']:.3f} nats" if bits is None else f"{bits:.3f} bits per byte"


def _table(head: Sequence[str], rows: Iterable[Sequence[float | None]]) -> str:
    top = "".join(f"<th>{html.escape(name)}</th>" for name in head)
    body = "".join("<tr>" + "".join(f'<td class="number">{_number(v)}</td>' for v in row) + "</tr>" for row in rows)
    return f"<table><tr>{top}</tr>{body}</table>"


def _number(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:.4f}" if isinstance(value, float) else html.escape(str(value))


def _sample(row: dict[str, Any]) -> str:
    prompt, text = html.escape(str(row.get("prompt", ""))), html.escape(str(row.get("text", "")))
    return f'<p class="soft">step {int(row.get("step", 0))}</p><pre><b>{prompt}</b>{text}</pre>'


def _lines(path: Path) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for line in _read(path).split("\n"):  # not splitlines: a sample may hold a line separator of its own
        try:
            row = json.loads(line)
        except ValueError:
            continue  # the last line of a run that was killed
        if isinstance(row, dict):
            rows.append(row)
    return rows


def _read(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""
