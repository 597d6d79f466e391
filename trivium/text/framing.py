"""What stands around a text for a model of one family: what a published tokenizer puts there, or what ours have."""

from __future__ import annotations

from trivium.text.adopt import Frame
from trivium.text.tokenizer import Tokenizer

CLASS, SEPARATOR, PAD = "[CLS]", "[SEP]", "<pad>"


def frame_of(family: str, tokenizer: Tokenizer) -> Frame:
    """The ids before and after a text, and those that a decoder behind a source begins with.

    An encoder's text stands between [CLS] and [SEP] if its tokenizer has both: whether it was trained in frames is
    seen by that, for training extends the tokenizer by what it needs. A source ends in the END id, and the decoder
    behind it begins with <pad>; without that token it has no start.
    """
    given, specials = tokenizer.frame, tokenizer.specials
    if family == "encoder-decoder":
        start = given.start or ((specials[PAD],) if PAD in specials else ())
        return Frame(given.before, given.after or (tokenizer.end,), start)
    if given.before or given.after:
        return given
    if family == "encoder" and CLASS in specials and SEPARATOR in specials:
        return Frame((specials[CLASS],), (specials[SEPARATOR],))
    return Frame()
