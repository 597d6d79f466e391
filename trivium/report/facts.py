"""The table at the head of a page: what the model is, what it read, how long and where, and what to type next."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from datetime import datetime
from html import escape
from pathlib import Path
from shlex import quote
from typing import Any

from trivium import records
from trivium.records import Broken, Row

_FILLS = ("masked", "spans")  # objectives of encoders that can fill a gap
_LEARNS = {
    "causal": "the next token",
    "masked": "hidden tokens",
    "spans": "hidden spans",
    "denoise": "spans cut out of a text",
    "prefix": "the rest of a text",
    "seq2seq": "the target of a pair",
}


def use_of(about: Mapping[str, Any], folder: Path) -> str:
    """The command that uses a trained model, by what it was trained for."""
    family, objective, run = about.get("family"), about.get("objective"), quote(str(folder))
    if family == "encoder":
        filling = f"trivium fill {run} 'A text with one [MASK] in it.'"
        return filling if objective in _FILLS else f"trivium embed {run} 'A text.'"
    if objective == "seq2seq":
        return f"trivium translate {run} 'A text.'"
    return f"trivium generate {run} 'It was'"


def facts(folder: Path, about: Row, trained: list[Row]) -> str:
    """What the model is, what it read, for how long and where, and what to type next."""
    run = Path(folder.resolve().parent.name) / folder.resolve().name
    rows = {
        "Model": _model(about),
        "Size": _size(about),
        "Tokenizer": _tokenizer(about),
        "Learns": _LEARNS.get(str(about.get("objective")), ""),
        "Training text": _split(about, "train"),
        "Validation text": _split(about, "valid"),
        "Training": _training(about, trained),
        "Machine": _machine(folder),
    }
    lines = [f"<tr><th>{name}</th><td>{escape(text)}</td></tr>" for name, text in rows.items() if text]
    more = f"trivium train {quote(str(run))}" + (f" budget.steps={2 * trained[-1]['step']}" if trained else "")
    for name, command in (("Use it", use_of(about, run)), ("Go on with it", more)):
        lines.append(f"<tr><th>{name}</th><td><code>{escape(command)}</code></td></tr>")
    return f'<table class="facts">{"".join(lines)}</table>'


def _model(about: Row) -> str:
    preset, family = (str(about.get(key) or "") for key in ("preset", "family"))
    return f"{family} ({preset})" if preset and family else family


def _size(about: Row) -> str:
    layers = about.get("layers")
    sides = [f"{count} {side}" for side, count in layers.items()] if isinstance(layers, dict) else []
    words = [f"{_whole(about['parameters'])} parameters"] if "parameters" in about else []
    words += [f"{' and '.join(sides)} layers"] if sides else []
    words += [f"{name} {_whole(about[name])}" for name in ("width", "context") if name in about]
    return ", ".join(words)


def _tokenizer(about: Row) -> str:
    kind, vocab = about.get("tokenizer"), about.get("vocab")
    return f"{kind}, {_whole(vocab)} ids" if kind and vocab else ""


def _split(about: Row, name: str) -> str:
    found = about.get("data")
    split = found.get(name) if isinstance(found, dict) else None
    if not (isinstance(found, dict) and isinstance(split, dict)):
        return ""
    documents = split.get("documents")
    if not (isinstance(documents, int) and documents):
        return "none"
    single = f"{_whole(documents)} document{'s' * (documents != 1)}"
    what = f"{_whole(documents // 2)} pairs" if found.get("form") == "pairs" else single
    text = f"{_whole(split.get('tokens'))} tokens in {what}, {_bytes(split.get('text_bytes'))}"
    files = found.get("files")
    return f"{text}; from {_listed(files)}" if name == "train" and isinstance(files, list) and files else text


def _listed(names: Sequence[object], most: int = 6) -> str:
    more = f" and {len(names) - most} more files" if len(names) > most else ""
    return ", ".join(map(str, names[:most])) + more


def _training(about: Row, trained: list[Row]) -> str:
    if not trained:
        return ""
    tokens = sum(row["tokens"] for row in trained if records.is_count(row.get("tokens")))
    seconds = trained[-1].get("seconds")
    words = [f"{trained[-1]['step']:,} steps"]
    words += [f"{tokens:,} tokens learned"] if tokens else []
    words += [_duration(seconds)] if records.is_number(seconds) else []
    with contextlib.suppress(ValueError):
        words.append(f"begun {datetime.fromisoformat(str(about.get('started'))):%Y-%m-%d %H:%M} UTC")
    return ", ".join(words)


def _machine(folder: Path) -> str:
    try:
        found = records.table(folder / "env.json")
    except Broken:
        return ""
    words = [str(found["device"])] if found.get("device") else []
    words += [f"{name} {_whole(found[name])}" for name in ("cores", "threads") if name in found]
    words += [f"{name} {found[name]}" for name in ("torch", "trivium") if name in found]
    return ", ".join(words)


def _whole(value: object) -> str:
    return f"{value:,}" if isinstance(value, int) and records.is_count(value) else "?"


def _bytes(value: object) -> str:
    if not (isinstance(value, int) and records.is_count(value)):
        return "?"
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if value >= size:
            return f"{value / size:,.1f} {unit}"
    return f"{value} bytes"


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.1f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
