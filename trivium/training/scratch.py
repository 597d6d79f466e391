"""A folder that appears whole or not at all, however its making ends."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from pathlib import Path

from trivium.errors import BusyError, DataError
from trivium.files import LOCK, Lock, is_held, is_leftover, remove, remove_leftovers, temporary

# of a run that is being prepared
_PARTS = {LOCK, "about.json", "config.toml", "data", "env.json", "start.json", "tokenizer.json"}
_PREPARED = re.compile(r"\.tmp-.+-(\d+)", re.DOTALL)


@contextlib.contextmanager
def prepared(folder: Path) -> Iterator[Path]:
    """A hidden folder beside `folder` to prepare it in; removed unless it was renamed into place."""
    made = [parent for parent in (folder.parent, *folder.parent.parents) if not parent.exists()]
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DataError(f"{folder.parent} cannot be made: {error.strerror}") from None
    sweep(folder.parent)
    scratch = temporary(folder)
    scratch.mkdir()
    try:
        with Lock(scratch):
            yield scratch
    except OSError as error:  # a full disk: the name that the user knows, not the hidden one
        inner = str(error.filename or scratch)
        error.filename = inner.replace(str(scratch), str(folder), 1)
        raise
    finally:
        if scratch.exists():
            remove(scratch)
            for parent in made:  # nothing is left behind: not even the folder of runs
                with contextlib.suppress(OSError):
                    parent.rmdir()


def replaced(folder: Path, scratch: Path) -> None:
    """Put a prepared run in the place of an old one, which no process works in and which is then removed."""
    aside = temporary(folder.with_name(f"{folder.name}.replaced"))
    with Lock(folder):
        os.rename(folder, aside)
        try:
            os.rename(scratch, folder)
        except OSError:
            os.rename(aside, folder)
            raise
    remove(aside)


def sweep(folder: Path) -> None:
    """Remove what killed processes were still preparing in a folder of runs, and inside its runs.

    A process that is alive holds a lock on what it prepares; where there is none yet, its number decides. In a folder
    that is not called `runs` something else may have such a name: there only what looks like a run is removed.
    """
    for path in _listed(folder):
        found = _PREPARED.fullmatch(path.name)
        with contextlib.suppress(OSError):  # what cannot be removed is no reason to fail
            if found and path.is_dir() and not path.is_symlink():
                ours = folder.absolute().name == "runs" or {file.name for file in _listed(path)} <= _PARTS
                if ours and not (is_held(path) if (path / LOCK).is_file() else _alive(int(found[1]))):
                    remove(path)
            elif not found and (path / "config.toml").is_file():
                _sweep_run(path)


def _sweep_run(run: Path) -> None:
    """Remove what was being written into a run when its process was killed."""
    places = [place for place in (run, run / "checkpoints") if any(map(is_leftover, _listed(place)))]
    with contextlib.suppress(BusyError):  # then it is still being written
        if places:
            with Lock(run):
                for place in places:
                    remove_leftovers(place)


def _listed(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except OSError:
        return []


def _alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return process != os.getpid()
