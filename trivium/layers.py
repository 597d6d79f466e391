"""Tables of settings laid over each other."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_DEEP = 20  # tables inside tables that a message names


def only_path(value: Any) -> str:
    """The dotted path down to the one leaf of nested tables; "" for a leaf and where the ways part."""
    path: list[str] = []
    while isinstance(value, Mapping) and len(value) == 1 and len(path) < _DEEP:
        [(name, value)] = value.items()
        path.append(str(name))
    return ".".join(path)
