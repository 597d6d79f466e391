"""Tables of settings laid over each other: where a later one replaces more than the key that it names."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

_DEEP, _LONG = 20, 80  # tables inside tables that a message names, and characters of each
_OFF = ("0", "0.0", "[]", "''", '""')  # as they are typed on the command line


def only_path(value: Any) -> str:
    """The dotted path down to the one leaf of nested tables; "" for a leaf and where the ways part."""
    path: list[str] = []
    while isinstance(value, Mapping) and len(value) == 1 and len(path) < _DEEP:
        [(name, value)] = value.items()
        path.append(str(name)[:_LONG])
    return ".".join(path)


def latest(base: Any, layers: list[dict[str, Any]]) -> tuple[Any, list[dict[str, Any]]]:
    """`base` and `layers` without the alternatives that a later layer replaces by another one.

    A class lists them as ALTERNATIVES: the first field of each says whether it is chosen, the others belong to it. Of
    two that one layer chooses both stay, for the class itself to refuse.
    """
    options: Sequence[tuple[str, ...]] = getattr(type(base), "ALTERNATIVES", ())
    kept: list[dict[str, Any]] = []
    chosen: list[tuple[str, ...]] = []
    gone: set[str] = set()
    for layer in reversed(layers):
        kept.insert(0, {name: value for name, value in layer.items() if name not in gone})
        chosen = [option for option in options if not chosen and _is_given(layer.get(option[0]))] or chosen
        gone = {name for option in options if chosen and option not in chosen for name in option}
    defaults = {field.name: field.default for field in dataclasses.fields(base) if field.name in gone}
    return (dataclasses.replace(base, **defaults) if defaults else base), kept


def _is_given(value: Any) -> bool:
    if isinstance(value, str):
        return bool(value) and value not in _OFF
    try:
        return bool(value)
    except (RuntimeError, ValueError):  # a tensor or an array, which the class refuses
        return True
