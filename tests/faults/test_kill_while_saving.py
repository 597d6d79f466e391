"""R1: a process killed at any instant while saving leaves whole checkpoints only and loses none it acknowledged."""

from __future__ import annotations

import os
import random
import signal
import struct
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from trivium import files
from trivium.checkpoints import format
from trivium.checkpoints.store import Checkpoint, Store
from trivium.errors import CheckpointError

pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")

Tensors = dict[str, dict[str, torch.Tensor]]


@pytest.fixture
def tensors() -> Iterator[Tensors]:
    """About 1 MB, in a process that may be forked: no pool of threads that a child would miss."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    yield {
        "model": {f"layer{i}": torch.randn(128, 256, generator=generator) for i in range(4)},
        "optimizer": {f"layer{i}": torch.randn(128, 256, generator=generator) for i in range(4)},
    }
    torch.set_num_threads(threads)


def silent(message: str) -> None:
    raise AssertionError(message)


def victim(work: Callable[[int], None], first: int, delay: float) -> int:
    """Fork, `work(first)`, `work(first + 1)` …, SIGKILL after `delay`; the last number whose work was acknowledged."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.close(reading)
            os.write(writing, struct.pack("<q", first - 1))
            number = first
            while True:
                work(number)
                os.write(writing, struct.pack("<q", number))
                number += 1
        finally:
            os._exit(1)
    os.close(writing)
    os.read(reading, 8)  # it runs
    time.sleep(delay)
    os.kill(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    assert os.WIFSIGNALED(status), "the victim failed before it was killed"
    with os.fdopen(reading, "rb") as pipe:
        rest = pipe.read()
    return int(struct.unpack("<q", rest[-8:])[0]) if rest else first - 1


def seconds(work: Callable[[int], object]) -> float:
    """The time of one save here and now, so that kills fall everywhere within a few of them."""
    work(0)
    begin = time.perf_counter()
    for _ in range(3):
        work(0)
    return (time.perf_counter() - begin) / 3


def newest(folder: Path) -> Checkpoint:
    """The newest checkpoint after every visible one was found whole."""
    for path in folder.glob("step-*"):
        format.verify(path)
    found = Store(folder).newest(say=silent)
    assert found is not None
    return found


def test_a_torn_checkpoint_is_never_visible_and_no_acknowledged_step_is_lost(
    tmp_path: Path, tensors: Tensors, count: Callable[[int, int], int]
) -> None:
    def work(step: int) -> None:
        Store(tmp_path).save(step, tensors=tensors, documents={"state": {"step": step}}, score=float(step % 5))

    dice, span = random.Random(1), seconds(work)
    last, cut_short = 0, 0
    for _ in range(count(25, 1_000)):
        acknowledged = victim(work, last + 1, dice.uniform(0, 4 * span))
        cut_short += any(path.name.startswith(".tmp-") for path in tmp_path.iterdir())
        found = newest(tmp_path)
        assert found.step >= acknowledged
        assert format.document(found.path, "state") == {"step": found.step}
        last = found.step + 1
        work(last)  # a fresh store goes on, and nobody has to clean up
        assert not [path for path in tmp_path.iterdir() if path.name.startswith(".tmp-")]
        assert newest(tmp_path).step == last
    assert cut_short > 0, "no kill fell into a save: the test proves nothing"


def test_a_step_being_saved_again_is_always_there_whole(
    tmp_path: Path, tensors: Tensors, count: Callable[[int, int], int]
) -> None:
    def work(mark: int) -> None:
        Store(tmp_path).save(7, tensors=tensors, documents={"state": {"mark": mark}})

    dice, span = random.Random(2), seconds(work)
    last = 0
    for _ in range(count(15, 500)):
        acknowledged = victim(work, last + 1, dice.uniform(0, 4 * span))
        found = newest(tmp_path)
        last = format.document(found.path, "state")["mark"]
        assert last >= acknowledged
    work(last + 1)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000007"]


def test_a_file_being_written_is_old_or_new(tmp_path: Path, count: Callable[[int, int], int]) -> None:
    path = tmp_path / "config.toml"

    def work(number: int) -> None:
        files.write_atomic(path, struct.pack("<q", number) * 50_000)

    dice, span = random.Random(3), seconds(work)
    last = 0
    for _ in range(count(15, 300)):
        acknowledged = victim(work, last + 1, dice.uniform(0, 4 * span))
        data = path.read_bytes()
        last = int(struct.unpack("<q", data[:8])[0])
        assert data == struct.pack("<q", last) * 50_000
        assert last >= acknowledged
    files.remove_leftovers(tmp_path)
    assert os.listdir(tmp_path) == ["config.toml"]


def test_these_kills_do_tear_a_checkpoint_that_is_written_in_place(tmp_path: Path, tensors: Tensors) -> None:
    format.write(tmp_path / "whole", step=0, tensors=tensors, documents={}, notes={})
    manifest = (tmp_path / "whole" / "manifest.json").read_bytes()

    def work(step: int) -> None:
        folder = tmp_path / f"step-{step:08d}"
        folder.mkdir(exist_ok=True)
        for stem, group in tensors.items():
            save_file(group, folder / f"{stem}.safetensors")
            files.sync_file(folder / f"{stem}.safetensors")
        files.write_synced(folder / "manifest.json", manifest)

    dice, span = random.Random(4), seconds(work)
    format.verify(tmp_path / "step-00000000")
    last, torn = 0, 0
    for _ in range(12):
        victim(work, last + 1, dice.uniform(0, 4 * span))
        for path in tmp_path.glob("step-*"):
            last = max(last, int(path.name.removeprefix("step-")))
            try:
                format.verify(path)
            except CheckpointError:
                torn += 1
            files.remove(path)
    assert torn > 0
