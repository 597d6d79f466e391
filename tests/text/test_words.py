"""Words of a closed vocabulary: the counts of the corpora that use them, and the promises of every kind."""

from __future__ import annotations

import lzma
import time
from collections import Counter
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from trivium.errors import ConfigError, DataError
from trivium.text.kinds import Words
from trivium.text.library import END, RARE_WORD, UNKNOWN, library_words
from trivium.text.stream import TextStream
from trivium.text.tokenizer import LibraryTokenizer, Tokenizer, open_tokenizer

CORPUS = ["the cat sat on the mat\nthe dog <unk> on\n", "naïve café\u00a0<eos>\n"]
WORDS = Words().build(CORPUS)
PLAIN = Words().build(["a b a\n"])

texts = st.lists(
    st.sampled_from([*"".join(CORPUS).split(), "cow", END, UNKNOWN, " ", "  ", "\n", "\r\n", "\t", "\x1c", "\u2028"])
    | st.text(st.characters(exclude_categories=["Cs"]), max_size=8),
    max_size=12,
).map("".join)


def plainly(text: str) -> list[str]:
    """The words of each line by Python's own split, and a newline after each line but the last."""
    lines = [line.split() for line in text.split("\n")]
    return [word for line in lines[:-1] for word in [*line, "\n"]] + lines[-1]


def known(text: str) -> list[str]:
    """The same with what the corpus does not have replaced."""
    return [word if word == "\n" or word in "".join(CORPUS).split() else RARE_WORD for word in plainly(text)]


def test_every_line_end_is_a_token_and_white_space_is_none() -> None:
    tokenizer = Words().build(["a b\n c\n"])
    assert list(map(tokenizer.piece, tokenizer.encode("a b\n c\n"))) == ["a", "b", "<eos>", "c", "<eos>"]
    assert list(map(tokenizer.piece, tokenizer.encode("\n\n a"))) == ["<eos>", "<eos>", "a"]
    assert tokenizer.encode("  \t ") == tokenizer.encode("") == []


@given(text=texts)
@settings(max_examples=300, deadline=None)
def test_any_text_is_split_as_python_splits_its_lines(text: str) -> None:
    ids = WORDS.encode(text)
    assert ["\n" if WORDS.piece_bytes(id) == b"\n" else WORDS.piece(id) for id in ids] == known(text)
    assert [text[first:last] for first, last in WORDS.spans(text)] == plainly(text)


@given(text=texts)
@settings(max_examples=200, deadline=None)
def test_decoding_keeps_words_and_lines_and_encodes_to_the_same_ids(text: str) -> None:
    ids = WORDS.encode(text)
    assert plainly(WORDS.decode(ids)) == known(text)
    assert WORDS.encode(WORDS.decode(ids)) == ids


def test_the_spelling_of_a_line_end_is_a_word_like_others() -> None:
    assert WORDS.encode("<eos>") != WORDS.encode("\n")
    assert WORDS.decode(WORDS.encode("the <eos>\ncat")) == "the <eos> \ncat"


@given(text=texts)
@settings(max_examples=100, deadline=None)
def test_the_library_reads_the_same_ids_and_text_from_our_file(text: str) -> None:
    library = tokenizers.Tokenizer.from_str(WORDS.serialise())
    library.encode_special_tokens = True
    ids = library.encode(text, add_special_tokens=False).ids
    assert WORDS.encode(text) == ids
    assert WORDS.decode(ids) == library.decode(ids)


@given(ids=st.lists(st.integers(0, WORDS.size - 1), max_size=30), skip=st.booleans())
@settings(max_examples=200, deadline=None)
def test_the_stream_joined_is_the_text_decoded_at_once(ids: list[int], skip: bool) -> None:
    stream = TextStream(WORDS, skip_specials=skip)
    assert "".join([*map(stream.push, ids), stream.finish()]) == WORDS.decode(ids, skip_specials=skip)


def test_a_prompt_and_what_follows_it_join_with_a_space() -> None:
    stream = TextStream(WORDS, after=WORDS.encode("the cat"))
    assert "".join([*map(stream.push, WORDS.encode("sat on\nthe")), stream.finish()]) == " sat on \nthe"


def test_an_unknown_word_is_the_unknown_of_the_corpus_or_one_of_ours() -> None:
    assert WORDS.decode(WORDS.encode("the cow")) == "the <unk>"
    assert WORDS.encode("cow") == WORDS.encode("<unk>")
    assert UNKNOWN not in [WORDS.piece(id) for id in range(WORDS.size)]
    assert PLAIN.decode(PLAIN.encode("a cow")) == f"a {UNKNOWN}"


def test_ids_go_by_count_and_rare_words_are_left_out() -> None:
    text = "c b a b\nc b d\n" * 3 + "rare d\n"
    counts = Counter(text.split()) + Counter({"<eos>": text.count("\n")})
    tokenizer = Words(min_count=2).build([text])
    names = [tokenizer.piece(id) for id in range(tokenizer.size)]
    assert names == ["b", "<eos>", "c", "d", "a", UNKNOWN, END]
    assert [counts[name] for name in names[:-2]] == sorted((n for n in counts.values() if n > 1), reverse=True)
    assert Words(min_count=1).build([text]).size == tokenizer.size + 1


def test_the_order_of_the_texts_does_not_change_the_file() -> None:
    assert Words().build(reversed(CORPUS)).digest == WORDS.digest
    assert Words().build(["a b"]).digest != Words().build(["a c"]).digest


def test_a_text_never_becomes_a_special_token() -> None:
    trained = Words().build([f"a {END} b {END}\n"])
    larger = WORDS.extended(["[MASK]", "[PAD]"])
    assert larger.size == WORDS.size + 2
    assert larger.encode("the [MASK] cat") == WORDS.encode("the cow cat")
    assert (larger.kind, larger.encode("".join(CORPUS))) == ("words", WORDS.encode("".join(CORPUS)))
    assert [trained.piece(id) for id in trained.encode(f"a {END}")] == ["a", UNKNOWN]
    with pytest.raises(DataError, match="'cat' cannot be a special token"):
        WORDS.extended(["cat"])


@pytest.mark.parametrize("made", [WORDS, PLAIN, WORDS.extended(["[MASK]"])])
def test_a_file_is_recognised_and_reads_the_same(made: Tokenizer, tmp_path: Path) -> None:
    made.save(tmp_path / "tokenizer.json")
    again = open_tokenizer(tmp_path)
    assert (again.kind, again.digest, again.end) == ("words", made.digest, made.end)
    assert again.encode("".join(CORPUS)) == made.encode("".join(CORPUS))


def test_what_no_text_could_give_is_refused() -> None:
    for words in (["a"], ["a b", "\n"], ["", "\n"], ["a\n", "\n"]):
        with pytest.raises(DataError, match="white space"):
            LibraryTokenizer(library_words([*words, UNKNOWN], UNKNOWN))
    with pytest.raises(DataError, match=r"no piece <\|unk\|>"):
        LibraryTokenizer(library_words(["a", "\n"], UNKNOWN))
    with pytest.raises(ConfigError, match="min_count"):
        Words(min_count=0)
    with pytest.raises(DataError, match="lone surrogate"):
        Words().build(["bad\ud800"])


def test_words_are_whole() -> None:
    assert all(WORDS.starts_word(id) and WORDS.ends_word(id) for id in range(WORDS.size))


def test_ten_megabytes_of_repetitive_text_take_seconds() -> None:
    text = "the cat sat on the mat\n" * (10_000_000 // 23)
    started = time.perf_counter()
    assert len(WORDS.encode(text)) == 7 * (10_000_000 // 23)
    assert time.perf_counter() - started < 60


CORPORA = {
    # types with the line end, then the tokens of train, valid and test: the numbers that papers print
    ("ptb", "ptb.{}.txt.xz"): (10_000, 929_589, 73_760, 82_430),
    ("wikitext-2", "wiki.{}.tokens.xz"): (33_278, 2_088_628, 217_646, 245_569),
}


@pytest.mark.parametrize("corpus", CORPORA, ids=lambda corpus: corpus[0])
def test_the_word_corpora_have_the_counts_that_papers_print(corpus: tuple[str, str], shared: Path) -> None:
    folder, pattern = shared / "data" / corpus[0], corpus[1]
    if not folder.is_dir():
        pytest.skip(f"needs {corpus[0]} in the shared data")
    texts = [lzma.decompress((folder / pattern.format(split)).read_bytes()) for split in ("train", "valid", "test")]
    train, valid, test = (text.decode() for text in texts)
    tokenizer = Words().build([train])
    ids = tokenizer.encode_many([train, valid, test])
    assert (tokenizer.size - 1, *map(len, ids)) == CORPORA[corpus]  # less <|endoftext|>
    pieces = {tokenizer.piece(id) for id in ids[0]}
    assert {"<unk>", "<eos>"} <= pieces
    assert len(pieces) == tokenizer.size - 1
