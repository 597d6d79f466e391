from __future__ import annotations

import errno
import hashlib
import os
import signal
import stat
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trivium import files
from trivium.errors import BusyError

pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")


def in_child(body: Callable[[], None]) -> int:
    """The process number of a fork that runs `body` and exits with 1 if that fails."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            body()
            code = 0
        finally:
            os._exit(code)
    return pid


def holder(folder: Path, then: Callable[[int], None]) -> int:
    """A fork that holds the lock of `folder` and calls `then` with the writing end of a pipe; returns once it holds."""
    reading, writing = os.pipe()

    def body() -> None:
        with files.Lock(folder):
            then(writing)

    pid = in_child(body)
    os.close(writing)
    assert os.read(reading, 1) == b"!"
    os.close(reading)
    return pid


def hold(writing: int) -> None:
    os.write(writing, b"!")
    signal.pause()


@settings(max_examples=30, deadline=None)
@given(data=st.binary(max_size=3000))
def test_sha256_agrees_with_hashlib(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    path = tmp_path_factory.mktemp("hash") / "file"
    files.write_atomic(path, data)
    assert path.read_bytes() == data
    assert files.sha256(path) == hashlib.sha256(data).hexdigest()


def test_an_atomic_write_replaces_the_file_and_leaves_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "file"
    files.write_atomic(path, b"old")
    files.write_atomic(path, b"new")
    assert path.read_bytes() == b"new"
    assert os.listdir(tmp_path) == ["file"]
    plain = tmp_path / "plain"
    plain.write_bytes(b"")
    assert stat.S_IMODE(path.stat().st_mode) == stat.S_IMODE(plain.stat().st_mode)


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_a_full_disk_leaves_the_old_file_and_no_leftover(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    path = tmp_path / "file"
    files.write_atomic(path, b"old")

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, call, full)
    with pytest.raises(OSError, match="No space left"):
        files.write_atomic(path, b"new")
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["file"]


def test_the_content_is_on_the_disk_before_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []
    fsync, replace = os.fsync, os.replace

    def recording_fsync(descriptor: int) -> None:
        events.append("folder" if stat.S_ISDIR(os.fstat(descriptor).st_mode) else "content")
        fsync(descriptor)

    def recording_replace(source: Path, target: Path) -> None:
        events.append("name")
        replace(source, target)

    monkeypatch.setattr(os, "fsync", recording_fsync)
    monkeypatch.setattr(os, "replace", recording_replace)
    files.write_atomic(tmp_path / "file", b"data")
    assert events == ["content", "name", "folder"]


def test_only_our_own_leftovers_are_removed(tmp_path: Path) -> None:
    for name in (".tmp-model.json-17", "model.json", ".tmp", ".tmp-notes", "tmp-a-1", ".lock"):
        (tmp_path / name).write_bytes(b"x")
    (tmp_path / ".tmp-step-00000001-4").mkdir()
    (tmp_path / ".tmp-step-00000001-4" / "model.safetensors").write_bytes(b"x")
    (tmp_path / ".tmp-link-9").symlink_to(tmp_path / "model.json")
    files.remove_leftovers(tmp_path)
    assert sorted(os.listdir(tmp_path)) == [".lock", ".tmp", ".tmp-notes", "model.json", "tmp-a-1"]


def test_a_second_process_is_refused_with_the_folder_and_the_holder(tmp_path: Path) -> None:
    pid = holder(tmp_path, hold)
    try:
        with pytest.raises(BusyError) as caught, files.Lock(tmp_path):
            pass
        assert str(tmp_path) in str(caught.value)
        assert f"process {pid};" in str(caught.value)
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def test_a_killed_holder_is_no_obstacle(tmp_path: Path) -> None:
    pid = holder(tmp_path, hold)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    assert (tmp_path / ".lock").read_text() == str(pid)
    with files.Lock(tmp_path):
        assert (tmp_path / ".lock").read_text() == str(os.getpid())


def test_a_worker_that_outlives_a_killed_holder_is_no_obstacle(tmp_path: Path) -> None:
    worker = tmp_path / "worker"

    def fork_and_hold(writing: int) -> None:
        worker.write_text(str(in_child(lambda: hold(writing))))  # the worker itself says that it runs
        signal.pause()

    pid = holder(tmp_path, fork_and_hold)
    while not (worker.exists() and worker.read_text()):
        time.sleep(0.001)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    orphan = int(worker.read_text())
    try:
        os.kill(orphan, 0)  # it still lives
        with files.Lock(tmp_path):
            pass
    finally:
        os.kill(orphan, signal.SIGKILL)


def test_a_worker_that_ends_does_not_unlock_the_folder(tmp_path: Path) -> None:
    with files.Lock(tmp_path) as lock:
        pid = in_child(lambda: lock.__exit__(None, None, None))
        assert os.waitpid(pid, 0)[1] == 0
        with pytest.raises(BusyError), files.Lock(tmp_path):
            pass


def test_one_process_cannot_lock_a_folder_twice(tmp_path: Path) -> None:
    with files.Lock(tmp_path) as lock:
        for second in (files.Lock(tmp_path), lock):
            with pytest.raises(BusyError, match=f"process {os.getpid()};"), second:
                pass
    with files.Lock(tmp_path), pytest.raises(BusyError), files.Lock(tmp_path):
        pass


def test_a_lock_without_a_readable_holder_still_refuses(tmp_path: Path) -> None:
    with files.Lock(tmp_path):
        (tmp_path / ".lock").write_bytes(b"\xff\xfe")
        with pytest.raises(BusyError, match="another process"), files.Lock(tmp_path):
            pass
