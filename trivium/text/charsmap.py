"""SentencePiece's table of replacements: at every place of a text the longest key is replaced, exactly as it does.

The library has the same table, but looks only at the shortest key of a whole grapheme: of "e" with two accents it
loses the second.
"""

from __future__ import annotations

import base64
import re
from typing import NamedTuple, final

import numpy as np

from trivium.errors import DataError

_ASCII = 128
_LONGEST = 64  # bytes of a key; those of NFKC have 12
_NEAR = re.compile(r"(?<=[^\x00-\x7f])[\s\S]|[^\x00-\x7f]")  # a pair that is not ASCII alone, by its second character


class _Part(NamedTuple):
    """A stretch of a text and what it becomes; as one, or every character by itself."""

    first: int
    last: int
    new: str
    one: bool


@final
class Charsmap:
    """The replacements of a model; `spell` makes them, `origins` says where each character of the result comes from."""

    def __init__(self, data: bytes) -> None:
        size = int.from_bytes(data[:4], "little")
        if len(data) < 8 or not size or size % 4 or size > len(data) - 4:
            raise DataError("its table of replacements is damaged")
        self._units: list[int] = np.frombuffer(data, "<u4", size // 4, offset=4).tolist()
        self._texts = data[4 + size :]
        self._single = _Singles(self)
        self._joins = _Joins(self)
        # the usual tables join accents to letters and no two ASCII characters: then most of a text can be skipped
        plain = map(chr, range(_ASCII))
        apart = not any(self._joins[left + chr(right)] for left in plain for right in range(_ASCII))
        self._pairs = _NEAR if apart else re.compile(r"(?<=[\s\S])[\s\S]")

    @staticmethod
    def read(text: str) -> Charsmap:
        """The table in base64, as a tokenizer.json has it."""
        try:
            return Charsmap(base64.b64decode(text, validate=True))
        except ValueError:
            raise DataError("its table of replacements is damaged") from None

    def spell(self, text: str) -> str:
        """The text after all replacements."""
        return "".join([part.new for part in self._parts(text)])

    def origins(self, text: str) -> list[tuple[int, int]]:
        """For every character of `spell` the characters of the text that it stands for, first to last exclusive."""
        result: list[tuple[int, int]] = []
        for part in self._parts(text):
            if part.one:
                result += [(part.first, part.last)] * len(part.new)
                continue
            for at in range(part.first, part.last):
                result += [(at, at + 1)] * len(text[at].translate(self._single))
        return result

    def _parts(self, text: str) -> list[_Part]:
        """The text in stretches: keys of several characters, and what lies between them."""
        parts: list[_Part] = []
        done = 0
        for found in self._pairs.finditer(text, 1):
            first = found.start() - 1
            if first < done or not self._joins[text[first : first + 2]]:
                continue  # it went into the key before, or no key begins like this
            key, new = self.longest(text[first : first + _LONGEST])
            if len(key) > 1:
                parts.append(_Part(done, first, text[done:first].translate(self._single), False))
                done = first + len(key)
                parts.append(_Part(first, done, new, True))
        parts.append(_Part(done, len(text), text[done:].translate(self._single), False))
        return parts

    def longest(self, text: str) -> tuple[str, str]:
        """The longest key that a text begins with, and what replaces it; two empty texts if there is none."""
        raw = text.encode()[:_LONGEST]
        size, value = 0, 0
        units, at = self._units, _offset(self._units[0])
        for place, byte in enumerate(raw):
            at ^= byte
            if not byte or at >= len(units) or units[at] & 0x800000FF != byte:
                break
            unit = units[at]
            at ^= _offset(unit)
            if unit >> 8 & 1 and at < len(units):
                size, value = place + 1, units[at] & 0x7FFFFFFF
        end = self._texts.find(b"\0", value)
        try:
            return raw[:size].decode(), self._texts[value:end].decode() if size and end >= 0 else ""
        except UnicodeDecodeError:
            raise DataError("its table of replacements is damaged") from None

    def begins(self, text: str) -> bool:
        """Whether some key begins with this text."""
        units, at = self._units, _offset(self._units[0])
        for byte in text.encode():
            at ^= byte
            if not byte or at >= len(units) or units[at] & 0x800000FF != byte:
                return False
            at ^= _offset(units[at])
        return True


class _Singles(dict[int, str]):
    """A table for `str.translate`: what becomes of a character that stands alone, found when it is first seen."""

    def __init__(self, charsmap: Charsmap) -> None:
        super().__init__()
        self._charsmap = charsmap

    def __missing__(self, code: int) -> str:
        key, new = self._charsmap.longest(chr(code))
        self[code] = new if key else chr(code)
        return self[code]


class _Joins(dict[str, bool]):
    """Whether a key begins with these two characters."""

    def __init__(self, charsmap: Charsmap) -> None:
        super().__init__()
        self._charsmap = charsmap

    def __missing__(self, pair: str) -> bool:
        found = self._charsmap.begins(pair)
        if len(self) < 1 << 20:  # bounded whatever the texts are
            self[pair] = found
        return found


def _offset(unit: int) -> int:
    # darts-clone's double array: the children of a unit lie at its offset, each under its byte as a label
    return (unit >> 10) << ((unit & 1 << 9) >> 6)
