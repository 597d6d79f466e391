"""Files that are whole or absent: atomic writes, bounded reads, checksums and the lock on a folder."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import itertools
import os
import re
import shutil
import stat
import time
import weakref
from pathlib import Path
from types import TracebackType

from trivium.errors import BusyError

LOCK = ".lock"
_TEMPORARY = re.compile(r"\.tmp-.+-\d+", re.DOTALL)
_AGAIN = 0.05  # seconds until a lock that is held is tried once more: `is_held` takes it for a moment


def temporary(path: Path) -> Path:
    """The hidden name beside `path` under which this process prepares or retires it."""
    return path.parent / f".tmp-{path.name}-{os.getpid()}"


def write_atomic(path: Path, data: bytes) -> None:
    """`data` at `path`, durably: whoever looks, even after a crash, finds the old content or the new."""
    hidden = temporary(path)
    try:
        write_synced(hidden, data)
        os.replace(hidden, path)
    except BaseException:
        hidden.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def write_synced(path: Path, data: bytes) -> None:
    """`data` at `path` and on the disk, for a name that nobody looks at yet."""
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def sync_file(path: Path) -> None:
    """Force the content of a file that somebody else wrote to the disk."""
    with path.open("rb") as file:
        os.fsync(file.fileno())


def sync_folder(path: Path) -> None:
    """Force the names in a folder to the disk: without it a rename may not survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def inside(folder: Path, name: str) -> Path:
    """Where the file `name` of a folder truly is; an OSError if a link leads out of the folder, or nowhere.

    The cache of the Hugging Face Hub keeps its files as links from `snapshots/ID/` to `blobs/`, which are its own.
    """
    path, home = folder / name, folder.resolve()
    homes = [home] + ([home.parent.parent / "blobs"] if home.parent.name == "snapshots" else [])
    try:
        real = path.resolve(strict=True)
    except RuntimeError:
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path)) from None
    if not any(real.is_relative_to(one) for one in homes):
        raise OSError(errno.EXDEV, "it leads out of its folder", str(path))
    return real


def read_inside(folder: Path, name: str, most: int) -> bytes:
    """The content of a regular file of a folder, at most so many bytes; else an OSError whose `strerror` says why."""
    # without waiting for whoever might write to a pipe
    descriptor = os.open(inside(folder, name), os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "it is not a regular file", str(folder / name))
        with open(descriptor, "rb", closefd=False) as file:
            data = file.read(most + 1)
    finally:
        os.close(descriptor)
    if len(data) > most:
        raise OSError(errno.EFBIG, f"it has more than {most:,} bytes", str(folder / name))
    return data


def exists_already(path: Path) -> str:
    """The sentence about a place that is taken: it names another one, and never asks for anything to be deleted."""
    base = Path("exported") / path.name if (path / "config.toml").exists() else path
    names = (base.with_name(f"{base.stem}-{number}{base.suffix}") for number in itertools.count(2))
    free = next(other for other in itertools.chain([base], names) if not os.path.lexists(other))
    return f"{path} already exists and is not replaced; name another place, such as {free}"


def sha256(path: Path) -> str:
    """The sha256 of a file in hexadecimal, in bounded memory."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def remove_leftovers(folder: Path) -> None:
    """Delete what a killed process was still preparing in `folder`; the caller holds the folder's lock.

    The process number in a name is no reason to spare it: in a container the next run often has the same one.
    """
    for path in folder.iterdir():
        if is_leftover(path):
            remove(path)


def final_name(path: str) -> str:
    """A path as the user knows it: what is being prepared by the name that it is going to have."""
    return re.sub(r"(?:^|(?<=/))\.tmp-([^/]+)-\d+(?=/|$)", r"\1", path)


def is_leftover(path: Path) -> bool:
    """Whether it has a name under which something is prepared or retired."""
    return _TEMPORARY.fullmatch(path.name) is not None


def remove(path: Path) -> None:
    """Delete a file or a whole folder."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def is_held(folder: Path) -> bool:
    """Whether a process that lives holds the lock on a folder."""
    try:
        descriptor = os.open(folder / LOCK, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError as error:
        return isinstance(error, BlockingIOError)
    finally:
        os.close(descriptor)
    return False


class Lock:
    """`with Lock(folder):` is held by one holder at a time; a second one gets a BusyError.

    The kernel lets go when the holder dies, so the file `.lock` that stays behind is no obstacle.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._descriptor = -1

    def __enter__(self) -> Lock:
        descriptor = os.open(self.folder / LOCK, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            _take(descriptor)
            os.ftruncate(descriptor, 0)
            os.write(descriptor, str(os.getpid()).encode())
        except BlockingIOError:
            holder = os.pread(descriptor, 20, 0).decode("ascii", "replace").strip()
            os.close(descriptor)
            who = f"process {holder}" if holder.isdigit() else "another process"
            raise BusyError(f"{self.folder} is in use by {who}; wait for it, stop it, or name another folder") from None
        except BaseException:
            os.close(descriptor)
            raise
        self._descriptor = descriptor
        _close_in_children(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close()

    def _close(self) -> None:
        """Close this process's handle; the lock is free once no process has one."""
        # Closing and never LOCK_UN: a forked child that unwinds must not unlock its parent's folder.
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def _take(descriptor: int) -> None:
    # flock, not lockf: it belongs to this opening of the file, so it also refuses within one process.
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        time.sleep(_AGAIN)
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _close_in_children(lock: Lock) -> None:
    """Forked workers share the handle: one that outlives a killed run would keep its folder locked."""
    held = weakref.ref(lock)

    def close() -> None:
        if (lock := held()) is not None:
            lock._close()

    os.register_at_fork(after_in_child=close)
