"""S3: mutated files of every kind open, or are refused in a sentence, in bounded time and memory."""

from __future__ import annotations

import random
import resource
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.hostile.kinds import KINDS, Kind
from trivium.errors import LONGEST, TriviumError

SECONDS, BYTES = 20.0, 500 << 20  # measured: 2.6 s on an idle machine, for a head of 10,000,000 dimensions


def peak() -> int:
    """The most bytes that this process ever had."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


def outcome(kind: Kind, folder: Path) -> str:
    """The sentence with which the folder is refused, if it is."""
    began = time.monotonic()
    try:
        kind.use(folder)
        sentence = ""
    except TriviumError as error:
        sentence = str(error)
        assert sentence
        assert all(0 < len(line) <= LONGEST and line.isprintable() for line in sentence.split("\n"))
    assert time.monotonic() - began < SECONDS
    return sentence


@pytest.mark.parametrize("name", KINDS)
def test_a_mutated_file_opens_or_is_refused_in_a_sentence(
    name: str, tmp_path: Path, count: Callable[[int, int], int]
) -> None:
    kind = KINDS[name]
    seed = random.randrange(2**32) if count(0, 1) else 0
    whole, folder = tmp_path / "whole", tmp_path / "folder"
    kind.make(whole)
    shutil.copytree(whole, folder)
    assert outcome(kind, folder) == ""
    before, refused, rounds = peak(), 0, count(kind.few, kind.many)
    changed = [] if kind.writes else list(whole.rglob("*.json"))  # by `seal`
    kept = {path: path.read_bytes() for path in changed}
    for round in range(rounds):
        if kind.writes:
            shutil.rmtree(folder)
            shutil.copytree(whole, folder)
        print(f"seed {seed}, round {round}")
        draw = random.Random(seed * 1_000_003 + round)
        (folder / kind.name).write_bytes(kind.spoil((whole / kind.name).read_bytes(), draw))
        kind.seal(folder)
        refused += bool(outcome(kind, folder))
        for path, content in kept.items():
            (folder / path.relative_to(whole)).write_bytes(content)
    assert peak() - before < BYTES
    print(f"{refused} of {rounds} were refused")
