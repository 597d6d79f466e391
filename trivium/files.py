"""Files that are whole or absent: atomic writes, bounded reads, checksums and the lock on a folder."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import itertools
import json
import os
import re
import shutil
import stat
import time
import weakref
from collections.abc import Collection, Iterator
from pathlib import Path
from types import TracebackType

from trivium.errors import BusyError, RequestError, shown

LOCK = ".lock"
# not what a save prepares inside a model: that has a lock of its own (checkpoints/model_files.py)
_TEMPORARY = re.compile(r"\.tmp-(?!\.new-model-)(.+)-(\d+)", re.DOTALL)
_AGAIN = 0.05  # seconds for which a lock that is held is tried once more: `is_held` takes it for a moment
_NOT_REGULAR = "it is not a regular file"


def as_path(value: str | os.PathLike[str]) -> Path:
    """The path that a caller gave; a RequestError if it is none."""
    try:
        path = Path(value)
        if b"\0" not in os.fsencode(path) and os.fspath(value):
            return path
    except (TypeError, UnicodeEncodeError):
        pass
    raise RequestError(f"{shown(value)} is not a path; give the name of a file or folder")


def is_file(path: Path) -> bool:
    """Whether it is a regular file; a name that no file can have, such as one that is too long, is not."""
    try:
        return path.is_file()
    except OSError:
        return False


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
    """An OSError of a write or a sync, which names no file, names `path`."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = str(path)
        raise


def temporary(path: Path) -> Path:
    """The hidden name beside `path` under which this process prepares or retires it."""
    return path.parent / f".tmp-{path.name}-{os.getpid()}"


def json_line(value: object, indent: int | None = None) -> bytes:
    """A value as JSON in UTF-8 with a line end; half a surrogate pair, as a stranger's text may have, is an escape."""
    text = json.dumps(value, indent=indent, ensure_ascii=False)
    return (text + "\n").encode(errors="backslashreplace")


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
    with naming(path), path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def sync_file(path: Path) -> None:
    """Force the content of a file that somebody else wrote to the disk."""
    with naming(path), path.open("rb") as file:
        os.fsync(file.fileno())


def sync_folder(path: Path) -> None:
    """Force the names in a folder to the disk: without it a rename may not survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with naming(path):
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


def regular_inside(folder: Path, name: str) -> Path:
    """Where a regular file of a folder truly is, by `inside`; else an OSError whose `strerror` says why."""
    real = inside(folder, name)
    if not stat.S_ISREG(real.stat().st_mode):
        raise OSError(errno.EINVAL, _NOT_REGULAR, str(folder / name))
    return real


def read_inside(folder: Path, name: str, most: int) -> bytes:
    """The content of a regular file of a folder, by `inside`, at most so many bytes; else an OSError as above."""
    return _read(inside(folder, name), folder / name, most, os.O_NOFOLLOW)


def read_regular(path: Path, most: int) -> bytes:
    """The content of a regular file that a user named, which may be a link to anywhere, bounded as above."""
    return _read(path, path, most, 0)


def _read(path: Path, name: Path, most: int, flags: int) -> bytes:
    # O_NONBLOCK: opening a pipe must not wait for a writer
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | flags)
    try:
        found = os.fstat(descriptor)
        if stat.S_ISDIR(found.st_mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(name))
        if not stat.S_ISREG(found.st_mode):
            raise OSError(errno.EINVAL, _NOT_REGULAR, str(name))
        with open(descriptor, "rb", closefd=False) as file:
            data = b"" if found.st_size > most else file.read(most + 1)
    finally:
        os.close(descriptor)
    if max(len(data), found.st_size) > most:
        raise OSError(errno.EFBIG, f"it has more than {most:,} bytes", str(name))
    return data


def exists_already(path: Path) -> str:
    """The sentence about a place that is taken: it names another one, and never asks for anything to be deleted."""
    path = path if path.name else path.absolute()
    base = Path("exported") / path.name if (path / "config.toml").exists() else path
    return f"{path} already exists and is not replaced; name another place, such as {free_name(base)}"


def free_name(path: Path) -> Path:
    """A path like this one at which nothing is yet: with -2, -3 and so on at its end where it is taken."""
    names = (path.with_name(f"{path.stem}-{number}{path.suffix}") for number in itertools.count(2))
    return next(other for other in itertools.chain([path], names) if not os.path.lexists(other))


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


def is_leftover(path: Path) -> bool:
    """Whether it has a name under which something is prepared or retired."""
    return _TEMPORARY.fullmatch(path.name) is not None


def prepared_by(path: Path) -> tuple[str, int] | None:
    """What is prepared or retired under this name, and the number of the process; None if nothing is."""
    found = _TEMPORARY.fullmatch(path.name)
    return None if found is None else (found[1], int(found[2][:18]))


def sweep_prepared(path: Path, holds: Collection[str] = ()) -> None:
    """Remove what killed processes were preparing for `path`: a file, or a folder of no other files than `holds`."""
    with contextlib.suppress(OSError):  # what cannot be removed is no reason to fail
        for other in sorted(path.parent.iterdir()):
            name, process = prepared_by(other) or ("", 0)
            if name == path.name and not is_alive(process) and not other.is_symlink() and _holds_only(other, holds):
                remove(other)


def _holds_only(path: Path, names: Collection[str]) -> bool:
    if not names:
        return path.is_file()
    return path.is_dir() and all(inner.name in names or is_leftover(inner) for inner in path.iterdir())


def is_alive(process: int) -> bool:
    """Whether another process has this number; one that had our own is dead."""
    try:
        os.kill(process, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        return True
    return process != os.getpid()


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
    """`with Lock(folder):` is held by one holder at a time; a second one gets a BusyError after `wait` seconds.

    The kernel releases it when the holder dies, so a lock file that is left in the folder is no obstacle. With `remove`
    the file goes when the lock is released.
    """

    def __init__(self, folder: Path, name: str = LOCK, *, wait: float = _AGAIN, remove: bool = False) -> None:
        self.folder = folder
        self.file = folder / name
        self._wait, self._remove = wait, remove
        self._descriptor = -1

    def __enter__(self) -> Lock:
        deadline = time.monotonic() + self._wait
        while not self._acquired(last=time.monotonic() >= deadline):
            time.sleep(0.02)
        _HELD.add(self)
        return self

    def _acquired(self, last: bool) -> bool:
        """Whether this try succeeded; the last one raises BusyError if it did not."""
        descriptor = os.open(self.file, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
        try:
            # flock, not lockf: it belongs to this opening of the file, so it also refuses within one process.
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if self._remove and not self._is_at(descriptor):  # the holder before removed it after it was opened here
                os.close(descriptor)
                return False
            with contextlib.suppress(OSError):  # on a full disk the lock holds without the number of its holder
                os.ftruncate(descriptor, 0)
                os.write(descriptor, str(os.getpid()).encode())
        except BlockingIOError:
            holder = os.pread(descriptor, 20, 0).decode("ascii", "replace").strip()
            os.close(descriptor)
            if not last:
                return False
            who = f"process {holder}" if holder.isdigit() else "another process"
            raise BusyError(f"{self.folder} is in use by {who}; wait for it, stop it, or name another folder") from None
        except BaseException:
            os.close(descriptor)
            raise
        self._descriptor = descriptor
        return True

    def _is_at(self, descriptor: int) -> bool:
        try:
            return os.path.samestat(os.fstat(descriptor), self.file.stat())
        except FileNotFoundError:
            return False

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._remove and self._descriptor >= 0:
            with contextlib.suppress(OSError):
                self.file.unlink()  # while it is held: nobody else can have locked this file
        self._close()

    def _close(self) -> None:
        """Close this process's handle; the lock is free once no process has one."""
        # Closing and never LOCK_UN: a forked child that unwinds must not unlock its parent's folder.
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


_HELD: weakref.WeakSet[Lock] = weakref.WeakSet()


def _close_in_child() -> None:
    """Forked workers share the handles: one that outlives a killed run would keep its folder locked."""
    for lock in list(_HELD):
        lock._close()


os.register_at_fork(after_in_child=_close_in_child)
