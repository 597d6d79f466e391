"""Decoding one id at a time: what is printed is always whole characters."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import final

from trivium.text.tokenizer import Tokenizer


@final
class TextStream:
    """The text of ids as they arrive; all that it returns, joined, is `decode` of all the ids.

    With `after` it is what they add to the text of those ids: the space between a prompt's last word and the first
    new one belongs to it, which `decode` of the new ids alone cannot know.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_specials: bool = False, after: Sequence[int] = ()) -> None:
        self._tokenizer = tokenizer
        joint = tokenizer.joint
        specials = {} if skip_specials else tokenizer.specials
        self._spelled = {id: joint.special + spelling.encode() for spelling, id in specials.items()}
        # Python's decoder holds back the tail of a character and replaces broken ones just as the library's does.
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._drop_first = joint.drop == "first"
        self._drop_last = joint.drop == "last"
        self._held = b""  # the space that is dropped if nothing follows
        for id in after:
            self.push(id)

    def push(self, id: int) -> str:
        """The characters that this id completes; empty while one is only half there."""
        raw = self._spelled.get(id) or self._tokenizer.piece_bytes(id)
        if self._drop_first and raw:
            raw, self._drop_first = raw.removeprefix(b" "), False
        if self._drop_last and raw:
            raw = self._held + raw
            self._held = b" " if raw.endswith(b" ") else b""
            raw = raw.removesuffix(b" ")
        return self._decoder.decode(raw)

    def finish(self) -> str:
        """What is left at the end: U+FFFD if the last character never became whole."""
        return self._decoder.decode(b"", final=True)
