"""A model without a tokenizer says so whenever it is asked for text."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from trivium.errors import RequestError
from trivium.text.missing import MissingTokenizer
from trivium.text.tokenizer import Tokenizer

ASKED: dict[str, Callable[[Tokenizer], object]] = {
    "encode": lambda tokenizer: tokenizer.encode("a"),
    "encode_many": lambda tokenizer: tokenizer.encode_many(["a"]),
    "spans": lambda tokenizer: tokenizer.spans("a"),
    "decode": lambda tokenizer: tokenizer.decode([1]),
    "piece": lambda tokenizer: tokenizer.piece(1),
    "piece_bytes": lambda tokenizer: tokenizer.piece_bytes(1),
    "starts_word": lambda tokenizer: tokenizer.starts_word(1),
    "ends_word": lambda tokenizer: tokenizer.ends_word(1),
    "extended": lambda tokenizer: tokenizer.extended(["[MASK]"]),
    "serialise": lambda tokenizer: tokenizer.serialise(),
    "save": lambda tokenizer: tokenizer.save(Path("nowhere")),
    "end": lambda tokenizer: tokenizer.end,
    "begin": lambda tokenizer: tokenizer.begin,
    "frame": lambda tokenizer: tokenizer.frame,
    "specials": lambda tokenizer: tokenizer.specials,
    "digest": lambda tokenizer: tokenizer.digest,
    "exact_cut": lambda tokenizer: tokenizer.exact_cut,
    "joint": lambda tokenizer: tokenizer.joint,
}


@pytest.mark.parametrize("name", ASKED)
def test_whatever_needs_text_names_the_folder_and_the_file_to_put_there(name: str) -> None:
    tokenizer: Tokenizer = MissingTokenizer(100, Path("some/folder"))
    with pytest.raises(RequestError, match=r"some/folder has no tokenizer.*put its tokenizer.json there"):
        ASKED[name](tokenizer)


def test_the_size_is_known_and_nothing_of_the_protocol_is_forgotten() -> None:
    tokenizer = MissingTokenizer(100, "model.gguf")
    assert (tokenizer.size, tokenizer.kind) == (100, "missing")
    asked = {name for name in vars(Tokenizer) if not name.startswith("_")} - {"size", "kind"}
    assert asked == set(ASKED)
