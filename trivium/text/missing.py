"""A stand-in where a model came without a tokenizer: its size is known, its texts are not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn, final

from trivium.errors import RequestError
from trivium.text.adopt import Frame
from trivium.text.pieces import Joint
from trivium.text.tokenizer import Tokenizer


@final
class MissingTokenizer:
    """A Tokenizer that says which file is missing whenever it is asked for text; ids alone need none."""

    def __init__(self, size: int, where: Path | str) -> None:
        self._size = size
        self._where = where

    def __repr__(self) -> str:
        return "<no tokenizer>"

    @property
    def kind(self) -> str:
        return "missing"

    @property
    def size(self) -> int:
        return self._size

    @property
    def end(self) -> int:
        self._refuse()

    @property
    def begin(self) -> int:
        self._refuse()

    @property
    def frame(self) -> Frame:
        self._refuse()

    @property
    def specials(self) -> Mapping[str, int]:
        self._refuse()

    @property
    def digest(self) -> str:
        self._refuse()

    @property
    def exact_cut(self) -> bool:
        self._refuse()

    @property
    def joint(self) -> Joint:
        self._refuse()

    def encode(self, text: str) -> list[int]:
        self._refuse()

    def encode_many(self, texts: Sequence[str]) -> list[list[int]]:
        self._refuse()

    def spans(self, text: str) -> list[tuple[int, int]]:
        self._refuse()

    def decode(self, ids: Sequence[int], *, skip_specials: bool = False) -> str:
        self._refuse()

    def piece(self, id: int) -> str:
        self._refuse()

    def piece_bytes(self, id: int) -> bytes:
        self._refuse()

    def starts_word(self, id: int) -> bool:
        self._refuse()

    def ends_word(self, id: int) -> bool:
        self._refuse()

    def extended(self, spellings: Sequence[str]) -> Tokenizer:
        self._refuse()

    def serialise(self) -> str:
        self._refuse()

    def save(self, path: Path) -> None:
        self._refuse()

    def _refuse(self) -> NoReturn:
        raise RequestError(
            f"{self._where} has no tokenizer, so the model reads and writes ids only; put its tokenizer.json there, or "
            "vocab.json with merges.txt, vocab.txt or tokenizer.model"
        )
