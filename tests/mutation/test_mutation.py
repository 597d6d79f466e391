"""Mutants of modules whose faults no crash shows: the tests beside them notice each, or a reason is written down."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections import Counter
from dataclasses import asdict
from pathlib import Path

import pytest

from tests.mutation.equivalent import EQUIVALENT
from tests.mutation.mutants import mutants
from tests.mutation.worker import Request

ROOT = Path(__file__).resolve().parents[2]
# The whole runs of tests/training/test_rollback.py take a minute: its mutants must fall to the tests of the log alone.
TESTS = {
    "trivium.training.spikes": "tests/training/test_spikes.py",
    "trivium.training.rollback": "tests/training/test_history.py",
    "trivium.data.bucketing": "tests/data/test_bucketing.py",
    "trivium.generation.sampling": "tests/generation/test_sampling.py",
}
LIBRARIES = ("numpy", "torch", "_hypothesis_pytestplugin", "transformers.generation.logits_process")


def outcomes(request: Request) -> dict[tuple[str, str], str]:
    """What became of each mutant, by its function and change."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
    done = subprocess.run(
        [sys.executable, "-m", "tests.mutation.worker", json.dumps(asdict(request))],
        cwd=ROOT,
        env=environment | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    return {(row["function"], row["change"]): row["outcome"] for row in rows}


@pytest.mark.full
@pytest.mark.parametrize("module", TESTS)
def test_every_mutant_is_noticed_or_has_a_written_reason(module: str) -> None:
    began = time.monotonic()
    found = outcomes(Request(root=str(ROOT), module=module, tests=[TESTS[module]], libraries=LIBRARIES))
    print(f"{module}: {len(found)} mutants, {dict(Counter(found.values()))}, {time.monotonic() - began:.0f} s")
    survivors = [name for name, outcome in found.items() if outcome == "survived" and name not in EQUIVALENT[module]]
    assert not survivors, "\n".join(f"{function or 'the module'}: {change}" for function, change in survivors)


@pytest.mark.parametrize("module", TESTS)
def test_every_reason_is_that_of_a_mutant(module: str) -> None:
    path = ROOT.joinpath(*module.split(".")).with_suffix(".py")
    names = {(mutant.function, mutant.change) for mutant in mutants(path.read_text(), str(path))}
    assert EQUIVALENT[module].keys() <= names
    assert all(reason.endswith(".") for reason in EQUIVALENT[module].values())


SAMPLE = """
def clamp(x, low, high):
    assert low < high
    if x <= low:
        return low
    return min(x, high)


def drain(items):
    while items:
        items.pop()


def unused():
    return 1
"""
SAMPLE_TESTS = """
from sample import clamp, drain

def test_clamp():
    assert [clamp(x, 0, 3) for x in (-1, 0, 2, 3, 5)] == [0, 0, 2, 3, 3]

def test_drain():
    drain([1, 2])
"""


def test_planted_mutants_are_found_and_what_changes_nothing_survives(tmp_path: Path) -> None:
    """`x < low` is the same function, and a loop without end counts as found."""
    (tmp_path / "sample.py").write_text(SAMPLE)
    (tmp_path / "test_sample.py").write_text(SAMPLE_TESTS)
    found = outcomes(Request(root=str(tmp_path), module="sample", tests=["test_sample.py"], spare=1.0))
    assert found == {
        ("clamp", "delete if x <= low:"): "killed",
        ("clamp", "if x < low:"): "survived",
        ("clamp", "None for return low"): "killed",
        ("clamp", "None for return min(x, high)"): "killed",
        ("clamp", "return max(x, high)"): "killed",
        ("drain", "delete items.pop()"): "slow",
        ("unused", "return 2"): "survived",
    }
    assert {path.name for path in tmp_path.iterdir()} == {"sample.py", "test_sample.py"}


@pytest.mark.parametrize(
    ("source", "change"),
    [
        ("x = a < b == c", "x = a <= b == c"),
        ("x = a < b == c", "x = a < b != c"),
        ("x = a is None", "x = a is not None"),
        ("x = a + b", "x = a - b"),
        ("x = a * b", "x = a / b"),
        ("x = a ** b", "x = a * b"),
        ("x = a // b", "x = a / b"),
        ("x = a and b", "x = a or b"),
        ("x = not a", "x = a"),
        ("x = -a", "x = a"),
        ("x = 0", "x = 1"),
        ("x = 0.5", "x = 1.5"),
        ("x = True", "x = False"),
        ("x = max(a, b)", "x = min(a, b)"),
        ("x = a.max()", "x = a.min()"),
        ("x = sorted(a)", "x = list(a)"),
        ("f(a)", "delete f(a)"),
        ("def f(a=1): pass", "def f(a=2):"),
        ("def f(*, a=b): pass", "def f(*, a=None):"),
        ("def f(): return a", "None for return a"),
        ("def f():\n return False", "return True"),
        ("def f():\n if a:\n  return\n b()", "delete return"),
    ],
)
def test_every_kind_of_change_is_made(source: str, change: str) -> None:
    assert change in [mutant.change for mutant in mutants(source, "source")]


@pytest.mark.parametrize("source", ["import a", "assert a < 1", "@f(1)\nclass A:\n x: 1", "def f(a: 1) -> 2:\n 'text'"])
def test_declarations_and_facts_are_left_alone(source: str) -> None:
    assert not list(mutants(source, "source"))
