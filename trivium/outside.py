"""Parts from outside the package: which ones a configuration holds, and whether an object can stand in a place."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import types
import typing
from collections.abc import Mapping
from typing import Any

_ABSENT = object()


def outside(*values: object) -> list[type[Any]]:
    """The classes of other packages that stand as parts somewhere in options or in tables of them."""
    found: dict[type[Any], None] = {}
    seen: dict[int, object] = {}  # a loop over what is left: tables may be nested deep, or hold themselves
    left = list(reversed(values))
    while left:
        value = left.pop()
        if id(value) in seen:
            continue
        seen[id(value)] = value
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            if not type(value).__module__.startswith("trivium."):
                found[type(value)] = None
            left += [getattr(value, field.name) for field in reversed(dataclasses.fields(value))]
        elif isinstance(value, Mapping):
            left += reversed(list(value.values()))
    return list(found)


def lacks(value: object, hint: Any) -> list[str]:
    """The members that an object would need to stand where `hint` is written, sorted; none if it fits.

    A protocol asks for its members, another class for an instance of it.
    """
    union = typing.get_origin(hint) in (types.UnionType, typing.Union)
    return min((_lacks(value, one) for one in (typing.get_args(hint) if union else (hint,))), key=len)


def members(hint: Any) -> list[str]:
    """The public members of a protocol, sorted; none of another class."""
    bases = [base for base in getattr(hint, "__mro__", ()) if base.__dict__.get("_is_protocol")]
    return sorted({name for base in bases for name in vars(base) if not name.startswith("_")})


def _lacks(value: object, cls: Any) -> list[str]:
    if names := members(cls):
        return [name for name in names if isinstance(value, type) or not _has(value, name)]
    return [] if isinstance(value, cls) else [cls.__name__]


def _has(value: object, name: str) -> bool:
    with contextlib.suppress(Exception):  # of a property that cannot be computed, or of a stranger's __getattr__
        return inspect.getattr_static(value, name, _ABSENT) is not _ABSENT or hasattr(value, name)
    return False
