"""What a caller may give: numbers within bounds and texts, refused in a sentence otherwise."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping
from numbers import Integral, Real
from typing import cast

from trivium.errors import RequestError, shown

TOKENS = 1_000_000  # new tokens of one request at most
SAMPLES = 10_000  # of one prompt


def require_whole(name: str, value: object, least: int | None, most: int | None, hint: str) -> None:
    """Refuse what is no whole number, or not within these bounds."""
    if not isinstance(value, Integral) or isinstance(value, bool):
        raise RequestError(f"{name}: {_shown(value)} is not a whole number; {hint}")
    number = int(value)
    if least is not None and number < least:
        raise RequestError(f"{name}: {_shown(number)} is less than {least}; {hint}")
    if most is not None and number > most:
        raise RequestError(f"{name}: {_shown(number)} is more than {most:,}; {hint}")


def require_bool(name: str, value: object) -> None:
    """Refuse what is neither true nor false."""
    if not isinstance(value, bool):
        raise RequestError(f"{name}: {_shown(value)} is neither true nor false")


def require_number(name: str, value: object, least: float, most: float, hint: str, *, above: bool = False) -> None:
    """Refuse what is no number, or not within these bounds; with `above` the least itself is refused too."""
    if not isinstance(value, Real) or value != value:
        raise RequestError(f"{name}: {_shown(value)} is not a number; {hint}")
    number = cast(float, value)
    if number < least or number > most or (above and number == least):
        first = f"above {least} up" if above else f"from {least}"
        raise RequestError(f"{name}: {_shown(value)} is not {first} to {most:,}; {hint}")


def text_of(name: str, given: object) -> str:
    """The one text that a caller gave."""
    if not isinstance(given, str):
        raise RequestError(f"{name}: {_shown(given)} is not a text; give a string")
    return given


def texts_of(name: str, given: object) -> list[str]:
    """The texts that a caller gave: one string, or several."""
    if isinstance(given, str):
        return [given]
    items = items_of(name, given, "a string or a list of strings")
    for number, item in enumerate(items, start=1):
        if not isinstance(item, str):
            raise RequestError(f"{name}: {_shown(item)}, number {number} of the list, is not a text; give strings")
    return cast("list[str]", items)


def items_of(name: str, given: object, wanted: str) -> list[object]:
    """What a caller gave as a list of something."""
    if isinstance(given, Iterable) and not isinstance(given, str | bytes | bytearray | Mapping):
        with contextlib.suppress(TypeError):  # a tensor of no dimension says that it has items
            return list(given)
    raise RequestError(f"{name}: {_shown(given)} is not a text; give {wanted}")


def _shown(value: object) -> str:
    """A value as a sentence may show it."""
    text = shown(value, 60) if isinstance(value, Real | str | bytes | None) else ""
    return text if text and not text.endswith("...") else f"a {type(value).__name__}"
