"""The page of a run, made from the files in its folder: text from models and files is text, nothing is fetched."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from itertools import groupby
from pathlib import Path

from trivium import records
from trivium.files import read_inside
from trivium.records import Broken, Row
from trivium.report.curve import curve
from trivium.report.facts import facts

_SHOWN = 4  # steps with samples, and examples of an evaluation, before the rest is folded
_ROWS = 12  # of the validation table before it is folded
_LONGEST = 2000  # characters of one sample
_LARGEST = 64 << 20  # bytes of a file that is shown whole
_UNITS = {
    "masked": "nats per masked token",
    "spans": "nats per masked token",
    "denoise": "nats per target token",
    "seq2seq": "nats per target token",
    "prefix": "nats per predicted token",
}
_STYLE = """
:root { color-scheme: light dark; --ink: #1d2733; --paper: #fdfcfa; --soft: #6b7785; --line: #d9d5cd;
  --train: #8aa4c8; --valid: #c2552d; --card: #f4f1ea; }
@media (prefers-color-scheme: dark) { :root { --ink: #e4e7eb; --paper: #15191f; --soft: #93a0ae; --line: #333b45;
  --train: #5d7ba6; --valid: #ef8354; --card: #1c222a; } }
body { font: 16px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper); max-width: 56rem;
  margin: 2rem auto; padding: 0 1rem; overflow-wrap: anywhere }
h1 { font-size: 1.6rem; margin-bottom: .2rem } h2 { font-size: 1.15rem; margin: 2.2rem 0 .5rem }
.soft, figcaption, summary { color: var(--soft) } figure { margin: .6rem 0 1.2rem } figcaption { font-size: .9rem }
table { border-collapse: collapse } td, th { padding: .2rem 1.2rem .2rem 0; text-align: left; vertical-align: top }
th { font-weight: 600; border-bottom: 1px solid var(--line) }
td.number, th.number { text-align: right; font-variant-numeric: tabular-nums }
th, td.number { overflow-wrap: normal } td.number { white-space: nowrap }
table.facts th { font-weight: 400; color: var(--soft); border: 0; white-space: nowrap }
table.samples { width: 100% } table.samples td { border-bottom: 1px solid var(--line); white-space: pre-wrap;
  font-size: .9rem; padding: .35rem 1rem .35rem 0; width: 33% }
pre { white-space: pre-wrap; border-left: 3px solid var(--line); padding-left: .8rem; font-size: .9rem;
  margin: .3rem 0 }
code { background: var(--card); padding: .1rem .35rem; border-radius: .25rem; font-size: .9rem }
svg { width: 100%; height: auto; display: block } svg text { fill: var(--soft); font: 12px system-ui, sans-serif }
.grid { stroke: var(--line) } .train { stroke: var(--train) }
.valid { stroke: var(--valid) } .dot { fill: var(--valid) }
"""


def page(folder: Path) -> str:
    """The page of the run in `folder`."""
    metrics, about = _rows(folder / records.METRICS), records.about(folder)
    trained, scored, tests = (records.of_kind(metrics, kind) for kind in ("train", "valid", "test"))
    title = escape(folder.resolve().name)
    unit = _UNITS.get(str(about.get("objective")), "nats per token")
    sections = [
        f"<h1>{title}</h1>",
        f'<p class="soft">{escape(_summary(trained, scored, tests, records.results(folder / records.RESULTS)))}</p>',
        facts(folder, about, trained),
        f"<h2>Loss, {unit}</h2>",
        curve([(row["step"], row["loss"]) for row in trained], [(row["step"], row["loss"]) for row in scored]),
        _validation(scored),
        _evaluations(folder, tests),
        _samples(_rows(folder / records.SAMPLES)),
        "<h2>Configuration</h2>",
        f"<details><summary>config.toml</summary><pre>{escape(_text(folder / records.CONFIG))}</pre></details>",
        f"<details><summary>env.json</summary><pre>{escape(_text(folder / 'env.json'))}</pre></details>",
    ]
    whole = (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{title}</title><style>{_STYLE}</style></head>\n<body>\n"
        + "\n".join(section for section in sections if section)
        + "\n</body></html>\n"
    )
    return whole.encode(errors="replace").decode()  # a line of JSON may hold half a surrogate pair


def _summary(trained: list[Row], scored: list[Row], tests: list[Row], results: list[Row]) -> str:
    if not trained:
        return "No step was finished yet."
    words = [f"{trained[-1]['step']:,} steps"]
    if (best := records.best(scored)) is not None:
        words.append(f"best validation {_score(best)} at step {best['step']:,}")
    words += [f"test {_score(row)}" for row in tests[-1:]]
    for found in results:
        name = {"bleu": "BLEU", "chrf": "chrF"}.get(found["metric"], found["metric"])
        if found["score"] is not None:
            words.append(f"{name} {found['score']:.4g} on {found['name']}, {found.get('split')}")
    return "; ".join(words) + "."


def _score(row: Row) -> str:
    """Bits per byte where an objective scores a whole text, else its own loss."""
    found = records.score(row)
    assert found is not None
    return f"{found[0]:.3f} {'bits per byte' if found[1] == 'bits/byte' else found[1]}"


def _validation(scored: list[Row]) -> str:
    """The table of validations; what was not measured has no column."""
    if not scored:
        return ""
    measured = any(records.score(row) is not None and row.get("bits_per_byte") is not None for row in scored)
    best = records.best(scored)
    head = ["step", "loss", *(["bits per byte"] if measured else []), ""]
    rows = [
        [f"{row['step']:,}", _number(row["loss"]), *([_number(row.get("bits_per_byte"))] if measured else []),
         "best" if row is best else ""]
        for row in scored
    ]  # fmt: skip
    table = _table(head, rows, numbers=len(head) - 1)
    if len(rows) > _ROWS:
        table = f"<details><summary>{len(rows)} validations</summary>{table}</details>"
    return f"<h2>Validation</h2>\n{table}"


def _evaluations(folder: Path, tests: list[Row]) -> str:
    """What was measured on corpora: scores with their signatures, and some examples."""
    parts = [f"<p>Test text: {escape(_score(row))} at step {row['step']:,}.</p>" for row in tests[-1:]]
    place = folder / records.RESULTS
    for path in sorted(place.glob("*.json")) if place.is_dir() else []:
        try:
            parts.append(_evaluation(records.table(path)))
        except Broken as error:
            parts.append(f'<p class="soft">{escape(str(error))}</p>')
    return "\n".join(["<h2>Evaluation</h2>", *parts]) if parts else ""


def _evaluation(found: Row) -> str:
    scores, signatures = _table_in(found, "scores"), _table_in(found, "signatures")
    rows = [
        [str(name).replace("_", " "), _number(value), str(signatures.get(name, ""))] for name, value in scores.items()
    ]
    title = f"{found.get('name', '')}, {found.get('split', '')}"
    examples = found.get("examples")
    folded = _examples([one for one in examples if isinstance(one, dict)]) if isinstance(examples, list) else ""
    signed = any(row[2] for row in rows)
    table = _table(["score", "value", *(["signature"] if signed else [])], [row[: 2 + signed] for row in rows], right=1)
    return f"<p><b>{escape(title)}</b></p>{table}{folded}"


def _table_in(found: Row, key: str) -> Row:
    value = found.get(key)
    return value if isinstance(value, dict) else {}


def _examples(found: list[Row]) -> str:
    if not found:
        return ""
    keys = [key for key in found[0] if key != "scores"]
    rows = [[_plain(row.get(key, "")) for key in keys] for row in found[: _SHOWN * 2]]
    return f"<details><summary>examples</summary>{_table(keys, rows, name='samples')}</details>"


def _plain(value: object) -> str:
    return _cut(" | ".join(map(str, value)) if isinstance(value, list) else value)


def _cut(value: object) -> str:
    text = str(value)
    return text if len(text) <= _LONGEST else text[:_LONGEST] + "…"


def _samples(found: list[Row]) -> str:
    """What the model wrote, the newest first; all but the newest few steps are folded."""
    rows = [row for row in found if records.is_count(row.get("step"))]
    if not rows:
        return ""
    steps = [(step, list(group)) for step, group in groupby(rows, key=lambda row: int(row["step"]))][::-1]
    blocks = [f'<p class="soft">step {step:,}</p>{_written(group)}' for step, group in steps]
    shown, folded = blocks[:_SHOWN], blocks[_SHOWN:]
    if folded:
        shown.append(f"<details><summary>earlier samples</summary>{''.join(folded)}</details>")
    return "\n".join(["<h2>Samples</h2>", *shown])


def _written(rows: list[Row]) -> str:
    if any("reference" in row for row in rows):
        cells = [[_cut(row.get(key, "")).strip("\n") for key in ("prompt", "text", "reference")] for row in rows]
        return _table(["given", "written", "reference"], cells, name="samples")
    texts = [(escape(_cut(row.get(key, ""))) for key in ("prompt", "text")) for row in rows]
    return "".join(f"<pre><b>{prompt}</b>{text}</pre>" for prompt, text in texts)


def _table(
    head: Sequence[str], rows: Iterable[Sequence[str]], *, numbers: int = 0, right: int = -1, name: str = ""
) -> str:
    """A table of texts; the first `numbers` columns, and the one numbered `right`, are aligned as numbers."""

    def mark(column: int) -> str:
        return ' class="number"' if column < numbers or column == right else ""

    top = "".join(f"<th{mark(column)}>{escape(cell)}</th>" for column, cell in enumerate(head))
    body = "".join(
        "<tr>" + "".join(f"<td{mark(column)}>{escape(cell)}</td>" for column, cell in enumerate(row)) + "</tr>"
        for row in rows
    )
    return f"<table{f' class={name!r}' if name else ''}><tr>{top}</tr>{body}</table>"


def _number(value: object) -> str:
    if isinstance(value, bool) or value is None:
        return ""
    return f"{value:,.4f}" if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else str(value)


def _rows(path: Path) -> list[Row]:
    try:
        return records.rows(path)
    except Broken:
        return []


def _text(path: Path) -> str:
    try:
        return read_inside(path.parent, path.name, _LARGEST).decode(errors="replace")
    except OSError:
        return ""
