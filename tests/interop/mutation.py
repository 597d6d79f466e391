"""Damaged files, for tests."""

from __future__ import annotations

import random
import struct
from collections.abc import Callable
from pathlib import Path

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
