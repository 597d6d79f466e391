"""Decoding one id at a time: what is printed is always whole characters."""

from __future__ import annotations

import codecs
from typing import final

from trivium.text.tokenizer import Tokenizer


@final
class TextStream:
    """The text of ids as they arrive; all that it returns, joined, is `decode` of all the ids."""

    def __init__(self, tokenizer: Tokenizer, *, skip_specials: bool = False) -> None:
        self._tokenizer = tokenizer
        specials = {} if skip_specials else tokenizer.specials
        self._spelled = {id: spelling.encode() for spelling, id in specials.items()}
        # Python's decoder holds back the tail of a character and replaces broken ones just as the library's does.
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, id: int) -> str:
        """The characters that this id completes; empty while one is only half there."""
        return self._decoder.decode(self._spelled.get(id) or self._tokenizer.piece_bytes(id))

    def finish(self) -> str:
        """What is left at the end: U+FFFD if the last character never became whole."""
        return self._decoder.decode(b"", final=True)
