"""The files of a saved model, replaced as one: a reader finds the old model or the new one, always whole.

A save writes all files into a hidden folder inside the target and renames that folder to `.new-model`: this rename is
the commit. Then the files move into place and the empty folder goes. A reader takes each file from `.new-model` if it
is there, so a process may be killed anywhere in between.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable
from pathlib import Path

from trivium.errors import CheckpointError, RequestError
from trivium.files import Lock, exists_already, free_name, remove, sync_folder, temporary
from trivium.records import ABOUT, CONFIG, MANIFEST, METRICS

WEIGHTS, CARD, TOKENIZER = "model.safetensors", "model.json", "tokenizer.json"
COMMITTED = ".new-model"

_ORDER = (WEIGHTS, TOKENIZER, CARD)  # the card last: without one in `.new-model` nothing is left to move
_LOCK = ".model-lock"
_WAIT = 60.0  # seconds for another save into the same folder
_LEFTOVER = re.compile(rf"\.tmp-({'|'.join(map(re.escape, (COMMITTED, *_ORDER)))})-\d+")
_SAFETENSORS = re.compile(r"\.tmp[A-Za-z0-9]{6}")  # the library's own, beside the file that it writes


def home_of(folder: Path, name: str) -> Path:
    """The folder that holds the file `name` of the model in `folder`: itself, or the committed one inside."""
    committed = folder / COMMITTED
    return committed if (committed / name).is_file() and not committed.is_symlink() else folder


def has_model(folder: Path) -> bool:
    """Whether a folder holds a saved model."""
    return (home_of(folder, CARD) / CARD).is_file()


def require_there(path: Path) -> None:
    """Refuse a model that does not exist, before torch is imported to open it."""
    if path.exists():
        return
    hint = "`trivium runs` lists what is here"
    if len(path.parts) == 2 and path.parts[0] != "runs" and not path.parent.exists():  # the name of a repository
        hint = f"trivium downloads nothing: `hf download {path} --local-dir {path.name}`, then name that folder"
    raise CheckpointError(f"{path} does not exist; {hint}")


def is_vacant(folder: Path) -> bool:
    """Whether a folder is absent, empty, or holds only what a killed save left before its commit."""
    return not folder.exists() or (folder.is_dir() and all(map(_is_leftover, folder.iterdir())))


def require_place(folder: Path) -> None:
    """Refuse to save a model over anything but a saved model: a file, another program's model, a run or its parts."""
    if folder.exists() and not folder.is_dir():
        raise RequestError(f"{folder} is a file; name a folder to save the model in")
    if (folder / CONFIG).exists():
        raise RequestError(exists_already(folder))
    for home in folder.resolve().parents:
        # others have a config.toml too: a project in which models are saved is no run
        if (home / CONFIG).is_file() and any((home / name).exists() for name in (ABOUT, METRICS)):
            free = free_name(Path("exported") / home.name)
            raise RequestError(f"{folder} is a part of the run {home.name}; name a place outside of it, such as {free}")
    theirs = (MANIFEST,) if has_model(folder) else (MANIFEST, "config.json", *_ORDER)
    if any((folder / name).exists() for name in theirs):
        raise RequestError(exists_already(folder))


def identity(folder: Path) -> list[tuple[Path, int, int, int]]:
    """Equal before and after a reading exactly when no save has replaced or moved a file in between."""
    result = []
    for name in _ORDER:
        path = home_of(folder, name) / name
        with contextlib.suppress(OSError):
            found = path.stat()
            result.append((path, found.st_ino, found.st_size, found.st_mtime_ns))
    return result


def replace_model(folder: Path, write: Callable[[Path], None]) -> None:
    """Let `write` make the three files in an empty folder, then put them into `folder` as one.

    Any error, such as the OSError of a full disk, leaves the model that was there as it was. A second save into the
    same folder waits for the first.
    """
    made = [parent for parent in (folder, *folder.parents) if not parent.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with Lock(folder, _LOCK, wait=_WAIT, remove=True):
            _finish(folder)
            _commit(folder, write)
        for parent in made:
            sync_folder(parent.parent)
    except BaseException:
        for parent in made:
            with contextlib.suppress(OSError):
                parent.rmdir()
        raise


def _commit(folder: Path, write: Callable[[Path], None]) -> None:
    committed = folder / COMMITTED
    staged = temporary(committed)
    staged.mkdir()
    try:
        write(staged)
        sync_folder(staged)
        os.rename(staged, committed)
        sync_folder(folder)
        os.replace(committed / WEIGHTS, folder / WEIGHTS)
    except BaseException:
        if (committed / WEIGHTS).exists():  # no file has moved yet: back to the old model
            os.rename(committed, staged)
        remove(staged)
        raise
    with contextlib.suppress(OSError):  # it is saved: readers find the files in both places, the next save moves them
        _move(folder)


def _move(folder: Path) -> None:
    """Move the committed files into place."""
    committed = folder / COMMITTED
    for name in _ORDER:
        if (committed / name).exists():
            os.replace(committed / name, folder / name)
    sync_folder(folder)
    remove(committed)


def _finish(folder: Path) -> None:
    """Complete a committed save whose process was killed, and remove what others left before their commit."""
    committed = folder / COMMITTED
    if (committed / CARD).is_file() and not committed.is_symlink():
        _move(folder)
    remove(committed)
    for path in folder.iterdir():
        if _is_leftover(path) and path.name != _LOCK:
            remove(path)


def withdraw(folder: Path) -> None:
    """Remove the card: the folder holds no model until the next save."""
    (folder / CARD).unlink(missing_ok=True)
    if home_of(folder, CARD) != folder:
        (folder / COMMITTED / CARD).unlink()


def _is_leftover(path: Path) -> bool:
    if path.name == _LOCK or _LEFTOVER.fullmatch(path.name):
        return True
    return bool(_SAFETENSORS.fullmatch(path.name)) and _begins_like_safetensors(path)


def _begins_like_safetensors(path: Path) -> bool:
    """Whether a file has the library's header: other programs use the same hidden names."""
    if path.is_symlink() or not path.is_file():
        return False
    with contextlib.suppress(OSError), path.open("rb") as file:
        head = file.read(10)
        return head[8:] == b'{"' and int.from_bytes(head[:8], "little") < 100 << 20
    return False
