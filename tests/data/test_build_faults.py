"""Builds that end badly, and builds of texts larger than the memory they may use."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from trivium.data.config import DataConfig
from trivium.data.shards import build, open_shards
from trivium.errors import BusyError, DataError
from trivium.text.kinds import Bytes


def quick(path: Path, folder: Path) -> None:
    build(DataConfig(paths=(str(path),)), Bytes().build([]), folder, progress=lambda *_: None, say=lambda _: None)


def victim(path: Path, folder: Path) -> int:
    """A forked process that builds `folder` over and over."""
    if child := os.fork():
        return child
    try:
        while True:
            quick(path, folder)
            os.rename(folder, folder.with_name(f"done-{time.monotonic_ns()}"))
    finally:
        os._exit(1)


def test_a_killed_build_leaves_whole_folders_and_needs_no_cleaning(
    tmp_path: Path, count: Callable[[int, int], int]
) -> None:
    text = tmp_path / "a.txt"
    text.write_text(" ".join(map(str, range(20_000))))
    rng, whole, interrupted = random.Random(0), 0, 0
    for _ in range(count(15, 300)):
        child = victim(text, tmp_path / "out")
        time.sleep(rng.uniform(0.05, 0.15))
        os.kill(child, signal.SIGKILL)
        assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL
        interrupted += any(tmp_path.glob(".tmp-*"))
        for folder in [*tmp_path.glob("done-*"), *tmp_path.glob("out")]:
            open_shards(folder, verify=True)
            whole += 1
            folder.rename(tmp_path / f"seen-{whole}")
        for folder in tmp_path.glob("seen-*"):
            subprocess.run(["rm", "-r", folder], check=True)
    assert whole
    assert interrupted
    quick(text, tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.txt", "out"]


def test_a_build_that_is_still_going_on_is_left_alone(tmp_path: Path) -> None:
    text = tmp_path / "a.txt"
    text.write_text("some text")

    def meanwhile(_: str) -> None:
        with pytest.raises(BusyError, match="out is being built by another process; "):
            quick(text, tmp_path / "out")

    config = DataConfig(paths=(str(text),), valid=0.3)
    build(config, Bytes().build([]), tmp_path / "out", progress=lambda *_: None, say=meanwhile)
    open_shards(tmp_path / "out", verify=True)


def test_a_build_that_fails_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("good " * 300_000)
    (tmp_path / "b.txt").write_bytes(b"bad \xff")
    with pytest.raises(DataError, match=r"b\.txt is not UTF-8 text \(byte 4\)"):
        quick(tmp_path, tmp_path / "new" / "out")
    assert list((tmp_path / "new").iterdir()) == []


GROWTH = """
import resource, sys
from pathlib import Path
from trivium.data.config import DataConfig
from trivium.data.shards import build
from trivium.text.kinds import Bpe

peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
text, folder = map(Path, sys.argv[1:])
with text.open() as file:
    tokenizer = Bpe(size=1000).build([file.read(100_000)])
before = peak()
build(DataConfig(paths=(str(text),)), tokenizer, folder, progress=lambda *_: None, say=lambda _: None)
print((peak() - before) // 1024)
"""


def test_a_large_document_streams_through_bounded_memory(tmp_path: Path, count: Callable[[int, int], int]) -> None:
    size, bound = count(20, 200), 300  # MB; encoding 20 MB at once takes more than 1,000
    rng = random.Random(0)
    words = ["".join(rng.choices("etaoinshrdlu", k=rng.randint(1, 9))) for _ in range(5000)]
    block = " ".join(rng.choices(words, k=200_000)).encode()
    with (tmp_path / "a.txt").open("wb") as file:
        while file.tell() < size * 1_000_000:
            file.write(block)
    command = [sys.executable, "-c", GROWTH, str(tmp_path / "a.txt"), str(tmp_path / "out")]
    found = subprocess.run(command, check=True, capture_output=True, text=True)
    assert int(found.stdout) < bound
    shards = open_shards(tmp_path / "out", verify=True)
    assert shards.train.text_bytes + shards.valid.text_bytes == (tmp_path / "a.txt").stat().st_size
