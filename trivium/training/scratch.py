"""A folder that appears whole or not at all, however its making ends."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from pathlib import Path

from trivium.errors import DataError
from trivium.files import remove, temporary


@contextlib.contextmanager
def prepared(folder: Path) -> Iterator[Path]:
    """A hidden folder beside `folder` to prepare it in; removed unless it was renamed into place."""
    made = [parent for parent in (folder.parent, *folder.parent.parents) if not parent.exists()]
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DataError(f"{folder.parent} cannot be made: {error.strerror}") from None
    _sweep(folder)
    scratch = temporary(folder)
    scratch.mkdir()
    try:
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


def _sweep(folder: Path) -> None:
    """Remove what killed processes were still preparing under this name."""
    pattern = re.compile(rf"\.tmp-{re.escape(folder.name)}-(\d+)")
    for path in folder.parent.iterdir():
        found = pattern.fullmatch(path.name)
        if found and not _alive(int(found[1])):
            remove(path)


def _alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return process != os.getpid()
