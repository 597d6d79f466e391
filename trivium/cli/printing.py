"""How answers are printed, and how standard input is read."""

from __future__ import annotations

import json
import os
import select
import stat
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from trivium import records
from trivium.errors import RequestError
from trivium.files import naming

Json = Annotated[bool, typer.Option("--json", help="Print one JSON document on standard output.")]


def is_piped() -> bool:
    """Whether standard input is a pipe or a file and no terminal."""
    return sys.stdin is not None and not sys.stdin.isatty()


def is_waiting() -> bool:
    """Whether a pipe to standard input holds data; nothing is read, and a file or a terminal does not count."""
    try:
        number = sys.stdin.fileno()
        return stat.S_ISFIFO(os.fstat(number).st_mode) and bool(select.select([number], [], [], 0)[0])
    except (AttributeError, OSError, ValueError):  # no standard input, or one that is no file
        return False


def standard_input() -> str:
    """Everything that was piped in, as text."""
    if sys.stdin is None:  # closed by whoever called
        raise RequestError("standard input is closed; pipe a text in, or give it as an argument")
    try:
        with naming(Path("standard input")):
            return sys.stdin.buffer.read().decode()
    except UnicodeDecodeError as error:
        raise RequestError(f"standard input is not UTF-8 text (byte {error.start})") from None


def quoted(text: str) -> str:
    """A text as it is, or in quotes where one could not see it."""
    return text if text.isprintable() and text.strip() == text and text else json.dumps(text, ensure_ascii=False)


def print_json(value: Any) -> None:
    """One document on standard output."""
    text = json.dumps(value, ensure_ascii=False, indent=2)
    # half a surrogate pair, which a stranger's file may hold, becomes JSON's own escape
    typer.echo(text.encode(errors="backslashreplace").decode())


def print_table(head: list[str], rows: Iterable[list[str]]) -> None:
    """Columns as wide as their widest cell."""
    table = [head, *rows]
    widths = [max(len(row[column]) for row in table) for column in range(len(head))]
    for row in table:
        typer.echo("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def cell(value: Any) -> str:
    """A value as people read it."""
    return f"{value:,}" if isinstance(value, int) else f"{value:,.3f}" if isinstance(value, float) else str(value)


def bits(row: object) -> str:
    """The score in a row of metrics, if there is one."""
    found = records.score(row)
    return "" if found is None else f"{found[0]:.4f} {found[1]}"


def leaves(table: Mapping[str, Any], prefix: str = "") -> Iterable[tuple[str, Any]]:
    """Every leaf of nested tables under its dotted name."""
    for name, value in table.items():
        if isinstance(value, Mapping):
            yield from leaves(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value
