"""How a sentence encoder makes one vector of a text: the files that sentence-transformers keeps beside a model."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from trivium.errors import CheckpointError, shown
from trivium.files import read_inside

MODULES, SENTENCES = "modules.json", "sentence_bert_config.json"
_NAME = re.compile(r"[\w.-]{1,80}")
_LONGEST = 1 << 20  # bytes: a list of a few modules
_MODES = {"pooling_mode_mean_tokens": "mean", "pooling_mode_cls_token": "cls"}


def pooling(folder: Path) -> dict[str, Any]:
    """`pooling` (mean or cls), `normalize` and `longest` (tokens of a text) as a folder gives them, else nothing.

    `unread` names what it asks for and we do not have; then there is no `pooling`, or more comes after it.
    """
    if not (folder / MODULES).exists():
        return {}
    result: dict[str, Any] = {}
    modes, unread = set[str](), list[str]()
    for kind, path in _modules(folder):
        if kind == "Pooling":
            table = _table(folder, f"{_beside(folder, path)}/config.json")
            modes |= {name for name, value in table.items() if name.startswith("pooling_mode_") and value is True}
        elif kind == "Normalize":
            result["normalize"] = True
        elif kind != "Transformer":
            unread.append(kind)
    if len(modes) == 1 and modes <= _MODES.keys():
        result["pooling"] = _MODES[modes.pop()]
    unread += sorted(modes)
    if unread:
        result["unread"] = unread
    if (folder / SENTENCES).exists():
        longest = _table(folder, SENTENCES).get("max_seq_length")
        if type(longest) is int and longest > 0:
            result["longest"] = longest
    return result


def _modules(folder: Path) -> list[tuple[str, str]]:
    """The last word of each module's type, and its folder; the type is compared, never imported."""
    path, steps = folder / MODULES, _read(folder, MODULES)
    if not isinstance(steps, list):
        raise CheckpointError(f"{path} does not hold a list of modules; fetch it again")
    result = []
    for step in steps:
        kind, place = (step.get("type"), step.get("path")) if isinstance(step, dict) else (None, None)
        if not isinstance(kind, str) or not isinstance(place, str):
            raise CheckpointError(f"{path} has a module without type and path; fetch it again")
        result.append((kind.rsplit(".", 1)[-1], place))
    return result


def _beside(folder: Path, place: str) -> str:
    """The folder of a module, which must be one beside modules.json."""
    if not _NAME.fullmatch(place) or place in (".", ".."):
        raise CheckpointError(f"{folder / MODULES} names the folder {shown(place)}, which is not one beside it")
    return place


def _table(folder: Path, name: str) -> dict[str, Any]:
    table = _read(folder, name)
    if not isinstance(table, dict):
        raise CheckpointError(f"{folder / name} does not hold a JSON object; fetch it again")
    return table


def _read(folder: Path, name: str) -> Any:
    """What a JSON file of the folder holds."""
    try:
        return json.loads(read_inside(folder, name, _LONGEST))
    except OSError as error:
        raise CheckpointError(f"{folder / name} cannot be read: {error.strerror}; fetch it again") from None
    except (ValueError, RecursionError):
        raise CheckpointError(f"{folder / name} is not JSON; fetch it again") from None
