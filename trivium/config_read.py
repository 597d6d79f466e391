"""The tables in TOML files, read within bounds; every error is a sentence that says what to name instead."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from trivium.errors import ConfigError
from trivium.files import read_inside, read_regular
from trivium.records import ABOUT, CONFIG, METRICS, TOML_BYTES, parse_toml
from trivium.renamed import update


def read(path: Path) -> dict[str, Any]:
    """The table in a TOML file of at most 4 MiB that a user named; a run's own may hold old keys."""
    table = _read(path, lambda: read_regular(path, TOML_BYTES))
    in_run = path.name == CONFIG and any((path.parent / name).exists() for name in (ABOUT, METRICS))
    return update(table) if in_run else table


def read_of(folder: Path) -> dict[str, Any]:
    """The settings of a run, old keys by their new names; the file must not be a link that leads out of its folder."""
    return update(_read(folder / CONFIG, lambda: read_inside(folder, CONFIG, TOML_BYTES)))


def _read(path: Path, content: Callable[[], bytes]) -> dict[str, Any]:
    try:
        return parse_toml(content().decode())
    except FileNotFoundError:
        raise ConfigError(f"{path} does not exist; {_named(path)}") from None
    except IsADirectoryError:
        raise ConfigError(f"{path} is a folder; name a TOML file") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8 text (byte {error.start})") from None
    except ValueError as error:
        raise ConfigError(f"{path} is not TOML: {error}{_meant(path)}") from None
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}; name a TOML file{_meant(path)}") from None


def _named(path: Path) -> str:
    """What to name in place of a file that is not there."""
    if re.match(r"[a-z][\w.]*=", str(path)):
        return "settings come behind a recipe: a TOML file, or a run's folder"
    return "name a TOML file, a recipe or a run's folder"


def _meant(path: Path) -> str:
    """What to do with another kind of file that is named in place of a recipe."""
    if path.suffix in (".txt", ".gz", ".xz", ".jsonl"):
        return f"; to train on this text, write a recipe with data.paths = [{path.name!r}]"
    if path.suffix in (".gguf", ".bin", ".safetensors"):
        return f"; to train this model, write a recipe with start = {path.name!r}"
    return ""
