"""One small tokenizer of every kind and variant, for the promises that all of them keep."""

from __future__ import annotations

from trivium.text.kinds import Bpe, Bytes, Chars, EndOfWordBpe, Unigram, WordPiece
from trivium.text.library import END

CORPUS = [
    "To be, or not to be: that is the question.\n" * 20,
    "naïve café, 東京 😀 <|endoftext|> 1234" * 20,
    "aaaa " * 200,
]
TRAINED = {
    "chars": Chars().build(CORPUS),
    "bytes": Bytes().build([]),
    "bpe": Bpe(size=400).build(CORPUS),
    "word-bpe": EndOfWordBpe(size=150).build(CORPUS),
    "word-bpe, fused": EndOfWordBpe(size=150, symbol="fused").build(CORPUS),
    "wordpiece": WordPiece(size=150).build(CORPUS),
    "wordpiece, likelihood": WordPiece(size=150, case="keep", score="likelihood").build(CORPUS),
    "unigram": Unigram(size=100).build(CORPUS),
    "unigram, exact": Unigram(size=400, normal="identity", fallback="bytes").build(CORPUS),
}
ADDED = ("[PAD]", "[MASK]", "<extra_id_1>", "<extra_id_0>")
# The same with special tokens of an objective: they keep every promise too.
KINDS = {
    **TRAINED,
    **{f"{name}, extended": tokenizer.extended([*ADDED, END]) for name, tokenizer in TRAINED.items()},
}
