"""The command line in this process."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch

from trivium.cli.main import main


class Outcome(NamedTuple):
    """How a command ended and what it said."""

    code: int
    out: str
    err: str


Call = Callable[..., Outcome]


@pytest.fixture
def invoke(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Call:
    """Run a command in the current folder, with `piped` on standard input."""
    threads = torch.get_num_threads()

    def run(*arguments: object, piped: str = "") -> Outcome:
        monkeypatch.setattr(sys, "argv", ["trivium", *map(str, arguments)])
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(piped.encode())))
        code = 0
        try:
            main()
        except SystemExit as exit:
            code = exit.code if isinstance(exit.code, int) else 1 if exit.code else 0
        finally:
            torch.set_num_threads(threads)
        return Outcome(code, *capsys.readouterr())

    return run


def refused(outcome: Outcome, *words: str) -> None:
    """One sentence on standard error, exit code 2, nothing on standard output."""
    lines = outcome.err.strip().splitlines()
    assert outcome.code == 2, outcome
    assert len(lines) == 1, outcome.err
    assert lines[0].startswith("error: ")
    assert all(word in lines[0] for word in words), lines[0]
    assert outcome.out == ""
