"""Unigram: the most probable cut, SentencePiece's spaces, and texts that come back."""

from __future__ import annotations

import itertools
import math
import random
import re
import unicodedata

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.text.trained import CORPUS, TRAINED
from trivium.errors import ConfigError
from trivium.text.kinds import Unigram
from trivium.text.library import END, UNKNOWN, library_unigram
from trivium.text.tokenizer import LibraryTokenizer, Tokenizer

PROBABLE = {"hu": 0.15, "gs": 0.1, "h": 0.1, "ugs": 0.1, "hug": 0.05, "s": 0.1, "ug": 0.2}
EXACT, NFKC = TRAINED["unigram, exact"], TRAINED["unigram"]
texts = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\u2581"), max_size=40) | st.lists(
    st.sampled_from(
        ["to be ", "  ", "\n", "\r\n", " \t", "<0x41>", "<0xE2>", UNKNOWN, END, "ﬁ", "e\u0301", "😀", "\u00a0"]
    ),
    max_size=8,
).map("".join)


def model(probable: dict[str, float], *, fallback: bool = False) -> Tokenizer:
    scores = [(piece, math.log(chance)) for piece, chance in probable.items()]
    return LibraryTokenizer(library_unigram(scores, "identity", "bytes" if fallback else "none"))


def shown(tokenizer: Tokenizer, text: str) -> str:
    return " ".join(map(tokenizer.piece, tokenizer.encode(text)))


def test_the_most_probable_cut_is_that_of_the_example() -> None:
    tokenizer = model({**PROBABLE, "\u2581": 0.1})
    assert shown(tokenizer, "hugs") == "\u2581 hu gs"  # .015 over h ugs .010, hug s .005, h ug s .002
    for gone, next_best in (("gs",), "h ugs"), (("gs", "ugs"), "hug s"), (("gs", "ugs", "hug", "hu"), "h ug s"):
        left = {piece: chance for piece, chance in PROBABLE.items() if piece not in gone}
        assert shown(model({**left, "\u2581": 0.1}), "hugs") == f"\u2581 {next_best}"


@given(text=st.text("hugs", min_size=1, max_size=8), data=st.data())
@settings(max_examples=100, deadline=None)
def test_no_other_cut_is_more_probable(text: str, data: st.DataObject) -> None:
    pieces = data.draw(st.sets(st.text("hugs", min_size=2, max_size=4), max_size=8)) | set("hugs")
    chances = {piece: data.draw(st.floats(0.01, 0.5)) for piece in sorted(pieces)}
    tokenizer = model({**chances, "\u2581": 0.1})
    got = [tokenizer.piece(id) for id in tokenizer.encode(text)[1:]]
    assert "".join(got) == text
    cuts = itertools.product([False, True], repeat=len(text) - 1)
    best = max(_chance(_pieces(text, cut), chances) for cut in cuts)
    assert _chance(got, chances) == pytest.approx(best, rel=1e-4)  # scores have six decimals


def _pieces(text: str, cut: tuple[bool, ...]) -> list[str]:
    borders = [0, *(at + 1 for at, here in enumerate(cut) if here), len(text)]
    return [text[first:last] for first, last in itertools.pairwise(borders)]


def _chance(pieces: list[str], chances: dict[str, float]) -> float:
    return math.prod(chances.get(piece, 0.0) for piece in pieces)


def test_of_equally_probable_cuts_the_longer_last_piece_wins() -> None:
    tokenizer = model({"a": 0.1, "b": 0.1, "c": 0.1, "ab": 0.1, "bc": 0.1, "\u2581": 0.1})
    assert shown(tokenizer, "abc") == "\u2581 a bc"


@given(text=texts)
@settings(max_examples=150, deadline=None)
def test_any_text_comes_back_from_identity_with_bytes(text: str) -> None:
    assert EXACT.decode(EXACT.encode(text)) == text


def test_a_literal_space_mark_comes_back_as_a_space() -> None:
    assert EXACT.decode(EXACT.encode("a\u2581b")) == "a b"


@given(text=st.text(st.sampled_from(sorted({*"".join(CORPUS), *"ﬁ²Ａ\u00a0\t\n\u3000\u2581e\u0301"}))))
@settings(max_examples=150, deadline=None)
def test_a_text_of_known_characters_comes_back_normalised(text: str) -> None:
    tokenizer = Unigram(size=120).build([*CORPUS, "fi 2 A é"])
    expected = re.sub(r"[\s\u2581]+", " ", unicodedata.normalize("NFKC", text)).strip(" ")
    assert tokenizer.decode(tokenizer.encode(text)).replace(UNKNOWN, "") == _known(expected, tokenizer)


def _known(text: str, tokenizer: Tokenizer) -> str:
    letters = {tokenizer.piece(id) for id in range(tokenizer.size)} | {" "}
    return "".join(letter for letter in text if letter in letters)


def test_an_unknown_character_is_its_bytes_or_unknown() -> None:
    assert shown(EXACT, "ß").split() == ["\u2581", "<0xC3>", "<0x9F>"]
    assert shown(NFKC, "ß").split() == ["\u2581", UNKNOWN]


@pytest.mark.parametrize("text", ["<0x41>", "a<0xFF>b", UNKNOWN, f"{UNKNOWN}<0x00>"])
def test_the_name_of_a_byte_or_of_the_unknown_in_a_text_stays_text(text: str) -> None:
    named = {id for id in range(EXACT.size) if EXACT.piece(id).startswith("<0x") or EXACT.piece(id) == UNKNOWN}
    assert not named & set(EXACT.encode(text))
    # even if the training texts were full of them
    trained = Unigram(size=400, fallback="bytes").build([f"{text} x{text}y " * 30])
    named = {id for id in range(trained.size) if trained.piece(id).startswith("<0x") or trained.piece(id) == UNKNOWN}
    assert not named & set(trained.encode(text))
    assert trained.decode(trained.encode(text)) == text


def test_the_end_in_the_training_texts_is_learned_only_in_parts() -> None:
    tokenizer = Unigram(size=120).build([f"x{END}y {END}z " * 50])
    assert tokenizer.end == tokenizer.size - 1
    assert tokenizer.decode(tokenizer.encode(f"x{END}")) == f"x{END}"
    assert tokenizer.end not in tokenizer.encode(END)


def test_a_word_begins_with_its_space() -> None:
    ids = NFKC.encode("to be")
    starts = [at for at, id in enumerate(ids) if NFKC.starts_word(id)]
    assert [NFKC.piece(ids[at])[0] for at in starts] == ["\u2581", "\u2581"]


def test_the_size_counts_everything() -> None:
    rng = random.Random(0)
    text = [" ".join("".join(rng.choices("abcdefgh", k=5)) for _ in range(2000))]
    assert Unigram(size=60).build(text).size == 60
    assert Unigram(size=400, fallback="bytes").build(text).size == 400
    with pytest.raises(ConfigError, match=r"tokenizer.size: 20 is too small for the characters of the texts"):
        Unigram(size=20).build(CORPUS)
    with pytest.raises(ConfigError, match=r"size: 200 is too small for the pieces that are always there; at least 259"):
        Unigram(size=200, fallback="bytes")


@pytest.mark.parametrize("some", [[], [""], ["a"], ["  "], ["a b"]])
def test_next_to_no_text_is_enough(some: list[str]) -> None:
    for kind in (Unigram(size=300), Unigram(size=300, normal="identity", fallback="bytes")):
        tokenizer = kind.build(some)
        assert tokenizer.end == tokenizer.size - 1
        tokenizer.decode(tokenizer.encode("a b c"))
        if kind.fallback == "bytes":
            assert tokenizer.decode(tokenizer.encode(" any é text")) == " any é text"
