"""A folder that appears whole or not at all, however its making ends."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from trivium.errors import BusyError, DataError, Interrupted
from trivium.files import (
    LOCK,
    Lock,
    is_alive,
    is_held,
    is_leftover,
    naming,
    prepared_by,
    remove,
    remove_leftovers,
    temporary,
)

# of a run that is being prepared
_PARTS = {LOCK, "about.json", "config.toml", "data", "env.json", "start.json", "tokenizer.json"}
_TRACES = ("about.json", "metrics.jsonl", "checkpoints")  # of a run: a config.toml others have too
_REPLACED = ".replaced"


@contextlib.contextmanager
def prepared(folder: Path) -> Iterator[Path]:
    """A hidden folder beside `folder` to prepare it in; removed unless it was renamed into place.

    Ctrl-C before that is an Interrupted.
    """
    made = [parent for parent in (folder.parent, *folder.parent.parents) if not parent.exists()]
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DataError(f"{folder.parent} cannot be made: {error.strerror}") from None
    sweep(folder.parent)
    scratch = temporary(folder)
    scratch.mkdir()
    try:
        with naming(folder), Lock(scratch):
            yield scratch
    except KeyboardInterrupt:
        if not scratch.exists():  # it has its place already
            raise
        raise Interrupted(f"stopped before {folder} was made; nothing was kept", 130) from None
    finally:
        if scratch.exists():
            remove(scratch)
            for parent in made:  # nothing is left behind: not even the folder of runs
                with contextlib.suppress(OSError):
                    parent.rmdir()


def replaced(folder: Path, scratch: Path) -> None:
    """Put a prepared run in the place of an old one, which no process works in and which is then removed."""
    aside = temporary(folder.with_name(f"{folder.name}{_REPLACED}"))
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
    that is not called `runs` something else may have such a name: there only what looks like a run is removed. A run
    that was to be replaced, by a process that was killed before the new one had its place, comes back.
    """
    for path in _listed(folder):
        prepared = prepared_by(path)
        with contextlib.suppress(OSError):  # what cannot be removed is no reason to fail
            if prepared is not None and path.is_dir() and not path.is_symlink():
                _sweep_prepared(path, *prepared)
            elif prepared is None and any((path / name).exists() for name in _TRACES):
                _sweep_run(path)


def _sweep_prepared(path: Path, name: str, process: int) -> None:
    """Remove a folder that a killed process prepared or retired, or put it back."""
    if is_held(path) if (path / LOCK).is_file() else is_alive(process):
        return
    retired = path.parent / name.removesuffix(_REPLACED)
    if name.endswith(_REPLACED) and (path / "config.toml").is_file() and not os.path.lexists(retired):
        os.rename(path, retired)
    elif path.absolute().parent.name == "runs" or {file.name for file in _listed(path)} <= _PARTS:
        remove(path)


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
