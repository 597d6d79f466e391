"""A stretch of a text and its pieces: which ids stand for it, and the text with them masked."""

from __future__ import annotations

from typing import NamedTuple

from trivium.errors import RequestError
from trivium.models.transformer import Transformer
from trivium.objectives.masked import MASK
from trivium.text.tokenizer import Tokenizer


class Gap(NamedTuple):
    """The ids of a text, and the places of those that stand for one stretch of it."""

    ids: list[int]
    places: list[int]

    @property
    def pieces(self) -> list[int]:
        """The ids of the stretch."""
        return [self.ids[at] for at in self.places]

    def masked(self, mask: int, known: int = 0) -> list[int]:
        """The ids with a mask for each piece of the stretch but the first `known`."""
        hidden = set(self.places[known:])
        return [mask if at in hidden else id for at, id in enumerate(self.ids)]


def gap(tokenizer: Tokenizer, text: str, first: int, last: int) -> Gap:
    """The ids of a text, and which of them share a character with its characters first..last exclusive."""
    spans = tokenizer.spans(text)
    return Gap(tokenizer.encode(text), [at for at, (start, stop) in enumerate(spans) if start < last and stop > first])


def mask_of(model: Transformer, tokenizer: Tokenizer) -> int:
    """The id of the mask, or a sentence that says why this model cannot fill a gap."""
    if model.config.family != "encoder":
        raise RequestError(f"a gap is filled by an encoder, and this model is of the {model.config.family} family")
    if MASK not in tokenizer.specials:
        raise RequestError(f"the tokenizer has no special token {MASK}: this encoder was not trained to fill gaps")
    return tokenizer.specials[MASK]
