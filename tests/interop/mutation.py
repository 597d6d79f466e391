"""Damaged files, for tests."""

from __future__ import annotations

import copy
import json
import random
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from trivium.errors import CheckpointError, DataError


def mutated(raw: bytes, draw: random.Random, front: int) -> bytes:
    """Some bytes flipped, cut out or put in; mostly among the first `front`, where lengths are."""
    for _ in range(draw.randint(1, 4)):
        if len(raw) < 2:
            return raw
        at = draw.randrange(min(len(raw), front) if draw.random() < 0.8 else len(raw))
        match draw.randrange(5):
            case 0:
                raw = raw[:at] + bytes([raw[at] ^ 1 << draw.randrange(8)]) + raw[at + 1 :]
            case 1:
                some = draw.randbytes(draw.choice((1, 4, 8)))
                raw = raw[:at] + some + raw[at + len(some) :]
            case 2:
                raw = raw[:at] + raw[at + draw.randint(1, 40) :]
            case 3:
                raw = raw[:at] + draw.randbytes(draw.randint(1, 40)) + raw[at:]
            case _:
                number = draw.choice((0, 1, 2**31 - 1, 2**32 - 1, 2**63, 2**64 - 1))
                raw = raw[:at] + struct.pack("<Q", number) + raw[at + 8 :]
    return raw


def refusal(opened: Callable[[Path], object], path: Path) -> str:
    """The sentence with which a file is refused, if it is."""
    try:
        opened(path)
    except (CheckpointError, DataError) as error:
        return str(error)
    return ""


def _deep() -> Any:
    result: Any = []
    for _ in range(150):  # three of them inside each other are still less than the walk below can take
        result = [result]
    return result


# fmt: off
VALUES: list[Any] = [
    None, True, False, 0, -1, 1, 2, 3, 7, 10_000, 9_999_991, 10_000_000, 2**31, 2**63, 10**40, 10**400, 0.5, -1.0,
    1e-320, 1e308, float("nan"), float("inf"), "", "x", "../../etc/passwd", "/dev/zero", "\x00", "\ud800",
    "\x1b[2J" * 9, "x" * 20_000, "gelu", "a\nb", [], {}, [[]], [1, "a"], {"a": {}}, ["full_attention"], _deep(),
]
# fmt: on


def spoilt(raw: bytes, draw: random.Random) -> bytes:
    """A JSON file with some values replaced, moved or gone; or any bytes of it."""
    if draw.random() < 0.3:
        return mutated(raw, draw, front=1500)
    table = json.loads(raw)
    for _ in range(draw.randint(1, 3)):
        places = list(_places(table, draw))
        if not places:
            break
        inside, key = draw.choice(places)
        match draw.randrange(8):
            case 0:
                del inside[key]
            case 1 if isinstance(inside, dict):
                inside[draw.choice(["x", "", f"{key} ", "model_type"])] = inside.pop(key)
            case 2:
                other, at = draw.choice(places)
                inside[key] = json.loads(json.dumps(other[at]))
            case _:
                inside[key] = copy.deepcopy(draw.choice(VALUES))  # else one could come to lie inside itself
    return json.dumps(table).encode()


def _places(table: Any, draw: random.Random) -> Iterator[tuple[Any, Any]]:
    """Every value of a small table with what it is in, and a few of a large one."""
    keys = list(table) if isinstance(table, dict) else list(range(len(table))) if isinstance(table, list) else []
    for key in keys if len(keys) < 40 else draw.sample(keys, 6):
        yield table, key
        yield from _places(table[key], draw)
