"""R6: the disk is full or the folder is gone in mid-run; training goes on, warns, and writes when it can again."""

from __future__ import annotations

import errno
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.training.conftest import SMALL, finish, resume, start
from tests.training.test_resume import assert_equal_ends
from trivium.checkpoints import format
from trivium.checkpoints.store import Store
from trivium.config import load, overrides, write
from trivium.errors import BusyError, Interrupted, TriviumError
from trivium.files import Lock
from trivium.training.events import Event, Progress, Said, Saved
from trivium.training.metrics import JsonLines, rows
from trivium.training.persist import WAITS, RetryingWriter
from trivium.training.recipe import Recipe
from trivium.training.session import Session

Make = Callable[..., Recipe]
ROOT = Path(__file__).resolve().parents[2]
FEW: dict[str, Any] = {
    "budget.steps": 40,
    "log": 5,
    "checkpoint.every": 5.0,
    "evaluate.every": 20.0,
    "sample.every": 20.0,
    "batch.micro": 0,
    "track": ["csv"],
}


@pytest.fixture(scope="module")
def clean(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same run on a disk with room."""
    recipe = load(Recipe, overrides({**SMALL, "data.paths": [str(text)], **FEW}))
    session = start(recipe, tmp_path_factory.mktemp("clean"))
    finish(session)
    return session.folder


@contextmanager
def no_file_above(size: int) -> Iterator[None]:
    """A real refusal by the kernel: no file may grow above `size` bytes (Python ignores the signal)."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


class Disk:
    """A disk that can be made to refuse everything that is synced, renamed or appended."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
        self.full = False

        def refusing(honest: Callable[..., Any]) -> Callable[..., Any]:
            def call(*arguments: Any, **options: Any) -> Any:
                if self.full:
                    raise OSError(number, os.strerror(number))
                return honest(*arguments, **options)

            return call

        for name in ("fsync", "rename", "replace"):
            monkeypatch.setattr(os, name, refusing(getattr(os, name)))
        monkeypatch.setattr(JsonLines, "flush", refusing(JsonLines.flush))


def assert_equal_runs(one: Path, two: Path, step: int) -> None:
    """Everything equal, and the table for other tools but for its last column, the clock."""
    assert_equal_ends(one, two, step)
    tables = [(run / "metrics.csv").read_text().splitlines() for run in (one, two)]
    first, second = ([line.rpartition(",")[0] for line in table] for table in tables)
    assert first == second


def said(events: list[Event]) -> list[str]:
    return [event.text for event in events if isinstance(event, Said)]


def watched(session: Session, at: Callable[[Event], None]) -> list[Event]:
    """All events of a run, with something done at each of them."""
    events: list[Event] = []
    for event in session.events():
        events.append(event)
        at(event)
    return events


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS])
def test_a_run_survives_a_disk_that_refuses_for_a_while(
    small: Make, clean: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    disk = Disk(monkeypatch, number)
    session = start(small(**FEW), tmp_path / "full")
    intact: list[int] = []

    def at(event: Event) -> None:
        if isinstance(event, Saved) and event.step == 10:
            disk.full = True
        if isinstance(event, Progress) and event.step == 25:
            intact.extend(item.step for item in session.store.checkpoints())
            for item in session.store.checkpoints():
                format.verify(item.path)
            disk.full = False

    events = watched(session, at)
    assert max(intact) == 10
    assert not [path for path in (session.folder / "checkpoints").iterdir() if path.name.startswith(".tmp")]
    told = said(events)
    for what in ("metrics.jsonl", "the checkpoint"):
        warnings = [text for text in told if text.startswith(f"{what} could not be written")]
        assert len(warnings) == 1
        assert os.strerror(number) in warnings[0]
        assert len([text for text in told if text.startswith(f"{what} could be written again")]) == 1
    assert_equal_runs(clean, session.folder, 40)


def test_without_the_guard_the_run_would_end(small: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = Disk(monkeypatch, errno.ENOSPC)
    monkeypatch.setattr(RetryingWriter, "attempt", lambda self, step, write, now=False: write())
    session = start(small(**FEW), tmp_path)
    with pytest.raises(OSError, match="No space left"):
        watched(session, lambda event: setattr(disk, "full", isinstance(event, Progress)))


def test_a_save_that_the_kernel_refuses_leaves_the_one_before(small: Make, clean: Path, tmp_path: Path) -> None:
    """No pretence: files above 12 kB are refused, so metrics can be written and weights cannot."""
    session = start(small(**FEW), tmp_path / "full")
    events: list[Event] = []
    iterator = session.events()
    for event in iterator:
        events.append(event)
        if isinstance(event, Saved):
            break
    with no_file_above(12_000):
        for event in iterator:
            events.append(event)
            if isinstance(event, Progress) and event.step == 30:
                break
        newest = Store(session.folder / "checkpoints").newest(say=print)
        assert newest is not None
        assert newest.step == 5
    events.extend(iterator)
    [warning] = [text for text in said(events) if "could not be written" in text]
    assert warning.startswith("the checkpoint could not be written at step 10 (File too large)")
    assert_equal_runs(clean, session.folder, 40)


@given(limit=st.integers(1, 400), before=st.integers(0, 5), after=st.integers(1, 9))
@settings(max_examples=40, deadline=None)
def test_a_line_cut_short_by_a_full_disk_is_completed(
    tmp_path_factory: pytest.TempPathFactory, limit: int, before: int, after: int
) -> None:
    """The kernel writes as many bytes as fit; what follows later must be exactly the rest."""
    path = tmp_path_factory.mktemp("journal") / "metrics.jsonl"
    lines = [{"step": step, "text": "ä\u2028" * step} for step in range(before + after)]
    journal = JsonLines(path)
    journal.write(lines[:before])
    refused = False
    with no_file_above(limit):
        for line in lines[before:]:
            try:
                journal.write([line])
            except OSError as error:
                refused = error.errno == errno.EFBIG
    size = sum(len(json.dumps(line, ensure_ascii=False).encode()) + 1 for line in lines)
    assert refused == (size > limit)
    assert journal.rows() == lines
    journal.flush()
    journal.close()
    assert rows(path) == lines


def test_a_cut_that_cannot_be_written_is_made_up_for(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    journal = JsonLines(path)
    journal.write({"step": step} for step in range(20))
    with no_file_above(10), pytest.raises(OSError, match="File too large"):
        journal.cut(9)
    assert len(rows(path)) == 20
    journal.add([{"step": 10, "new": True}])
    assert journal.rows() == [*({"step": step} for step in range(10)), {"step": 10, "new": True}]
    journal.flush()
    assert rows(path) == journal.rows()
    journal.close()


def test_a_folder_that_is_gone_is_made_again(small: Make, clean: Path, tmp_path: Path) -> None:
    session = start(small(**FEW), tmp_path / "gone")

    def at(event: Event) -> None:
        if isinstance(event, Saved) and event.step == 15:
            shutil.rmtree(session.folder.parent)
        if isinstance(event, Saved) and event.step == 20:
            with pytest.raises(BusyError), Lock(session.folder):
                pass

    events = watched(session, at)
    assert [event.step for event in events if isinstance(event, Saved)] == [5, 10, 15, 20, 25, 30, 35, 40]
    assert_equal_runs(clean, session.folder, 40)  # with every line of the metrics from the first step on
    for name in ("config.toml", "tokenizer.json"):
        assert (session.folder / name).read_bytes() == (clean / name).read_bytes()
    assert (session.folder / "env.json").is_file()


def test_a_run_whose_folder_was_made_again_can_be_gone_on_with(small: Make, clean: Path, tmp_path: Path) -> None:
    session = start(small(**FEW), tmp_path / "gone")
    events = session.events()
    for event in events:
        if isinstance(event, Saved) and event.step == 15:
            shutil.rmtree(session.folder)
        if isinstance(event, Saved) and event.step == 25:
            break
    events.close()  # type: ignore[attr-defined]
    finish(resume(session.folder))
    assert_equal_runs(clean, session.folder, 40)


def test_another_run_in_the_place_of_the_folder_is_not_overwritten(small: Make, tmp_path: Path) -> None:
    session = start(small(**FEW), tmp_path)
    events = session.events()
    next(event for event in events if isinstance(event, Saved))
    shutil.rmtree(session.folder)
    other = start(small(**FEW, seed=1), tmp_path)
    with Lock(other.folder), pytest.raises(BusyError, match="in use by process"):
        list(events)


@pytest.mark.parametrize("freed", [False, True])
def test_the_end_of_a_run_waits_for_room_and_then_gives_up_cleanly(
    small: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, freed: bool
) -> None:
    disk = Disk(monkeypatch, errno.ENOSPC)
    session = start(small(**FEW), tmp_path)
    waits: list[float] = []

    def sleep(seconds: float) -> None:
        waits.append(seconds)
        disk.full = not (freed and len(waits) == 2)

    def at(event: Event) -> None:
        disk.full = disk.full or (isinstance(event, Progress) and event.step == 30)

    session.sleep = sleep
    if freed:
        watched(session, at)
        assert waits == [*WAITS[:2]]
        assert (session.folder / "model.json").is_file()
        assert rows(session.folder / "metrics.jsonl")[-1]["step"] == 40
        return
    with pytest.raises(TriviumError, match=r"the model of step 40 could not be written .*No space.* go on with") as end:
        watched(session, at)
    assert end.value.exit_code == 1
    assert waits == [*WAITS]
    disk.full = False
    assert session.store.newest(say=print) is not None
    finish(resume(session.folder))
    assert (session.folder / "model.json").is_file()


def test_a_stop_on_a_full_disk_says_that_nothing_was_saved(
    small: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = Disk(monkeypatch, errno.ENOSPC)
    session = start(small(**FEW), tmp_path)

    def at(event: Event) -> None:
        if isinstance(event, Saved) and event.step == 10:
            disk.full = True
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(Interrupted, match=r"stopped at step 11 of 40, which could not be saved \(No space left") as end:
        watched(session, at)
    assert end.value.exit_code == 130
    newest = session.store.newest(say=print)
    assert newest is not None
    assert newest.step == 10


NAMESPACE = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c"]
REAL = """
import sys
from pathlib import Path
from trivium.config import read
from trivium.training.events import Progress, Said, Saved
from trivium.training.run import open_run

recipe, disk, filler = Path(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[2]) / "filler"
session = open_run(recipe, {}, runs=disk, say=print, tick=lambda *_: None)
for event in session.events():
    if isinstance(event, Saved) and event.step == 10:
        with filler.open("wb", buffering=0) as file:
            try:
                while True:
                    file.write(bytes(4096))
            except OSError:
                pass
    if isinstance(event, Progress) and event.step == 30:
        filler.unlink()
    if isinstance(event, Said):
        print(event.text)
"""


def test_a_small_real_disk_that_runs_full(small: Make, clean: Path, tmp_path: Path) -> None:
    """A file system of 3 MB in a name space of its own, filled to the last byte in mid-run."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = f"mount -t tmpfs -o size=3m none {disk}"
    if shutil.which("unshare") is None or subprocess.run([*NAMESPACE, mount], capture_output=True).returncode:
        pytest.skip("needs a name space in which a file system can be mounted")
    (tmp_path / "recipe.toml").write_text(write(small(**FEW)))
    command = f'{mount} && "$0" -c "$1" {tmp_path}/recipe.toml {disk} && cp -r {disk}/small {tmp_path}/kept'
    result = subprocess.run([*NAMESPACE, command, sys.executable, REAL], cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert "could not be written" in result.stdout
    assert "No space left on device" in result.stdout
    assert "could be written again" in result.stdout
    assert_equal_runs(clean, tmp_path / "kept", 40)


def test_the_waiting_doubles_and_the_last_failure_is_forgotten_after_success() -> None:
    told: list[str] = []
    retry = RetryingWriter("it", told.append)
    tries: list[int] = []

    def refused() -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    for step in range(3000):
        if retry.due(step) or step == 0:
            tries.append(step)
            retry.attempt(step, refused)
    assert tries == [0, 10, 30, 70, 150, 310, 630, 1270, 1910, 2550]
    assert retry.attempt(2560, lambda: 1) is None  # not yet
    assert retry.attempt(2560, lambda: 1, now=True) == 1
    assert [text.split(" (")[0] for text in told] == [
        "it could not be written at step 0",
        "it could be written again at step 2560",
    ]
    retry.attempt(2570, refused)
    assert retry.due(2580)
