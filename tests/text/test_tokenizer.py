"""Every kind of tokenizer keeps the same promises: exact text, no forged specials, linear time, files that hold."""

from __future__ import annotations

import hashlib
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

import trivium.text.tokenizer
from tests.text.trained import ADDED, CORPUS, KINDS, TRAINED
from trivium.errors import DataError, RequestError
from trivium.text.kinds import Chars
from trivium.text.library import END, UNKNOWN
from trivium.text.tokenizer import Tokenizer, open_tokenizer

EXACT = ["bytes", "bpe"]
TRICKY = [END, f"a{END}b", END * 3, f" {END}\n", "<|endof" + "text|>", UNKNOWN, f"{UNKNOWN}{END}", "<|", "|>"]
TRICKY += [*ADDED, f"x{ADDED[0]}y", f" {ADDED[2]} ", "[UNK]", "<0x41>", "##a", "</w>", "[pad]"]

every_kind = pytest.mark.parametrize("kind", KINDS)
trained_kind = pytest.mark.parametrize("kind", TRAINED)
exact_kind = pytest.mark.parametrize("kind", EXACT)
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=60) | st.lists(
    st.sampled_from([*TRICKY, "be ", "  ", "\r\n", "é", "e\u0301", "😀", "\x00", "'ll", "\ufeff", "\u2581"]), max_size=8
).map("".join)


def plain(tokenizer: Tokenizer) -> tokenizers.Tokenizer:
    """The library's own reading of the same file, told to take specials in a text as text."""
    library = tokenizers.Tokenizer.from_str(tokenizer.serialise())
    library.encode_special_tokens = True
    return library


LIBRARY = {kind: plain(tokenizer) for kind, tokenizer in KINDS.items()}


@exact_kind
@given(text=texts)
@settings(max_examples=150, deadline=None)
def test_any_text_comes_back_exactly(kind: str, text: str) -> None:
    assert KINDS[kind].decode(KINDS[kind].encode(text)) == text


@exact_kind
def test_every_character_of_unicode_comes_back(kind: str, count: Callable[[int, int], int]) -> None:
    step = count(97, 1)
    singles = [chr(code) for code in range(0, 0x110000, step) if not 0xD800 <= code <= 0xDFFF]
    for start in range(0, len(singles), 4096):
        some = singles[start : start + 4096]
        assert list(map(KINDS[kind].decode, KINDS[kind].encode_many(some))) == some
        assert KINDS[kind].decode(KINDS[kind].encode("".join(some))) == "".join(some)


@exact_kind
def test_random_strings_over_all_of_unicode_come_back(kind: str, count: Callable[[int, int], int]) -> None:
    rng = random.Random(0)
    for _ in range(count(1, 100)):
        some = ["".join(map(_random_character, [rng] * rng.randrange(30))) for _ in range(1000)]
        assert list(map(KINDS[kind].decode, KINDS[kind].encode_many(some))) == some


def _random_character(rng: random.Random) -> str:
    code = rng.randrange(0x110000 - 0x800)
    return chr(code if code < 0xD800 else code + 0x800)


@given(text=st.text(st.sampled_from(sorted(set("".join(CORPUS))))))
@settings(max_examples=100, deadline=None)
def test_a_text_of_known_characters_comes_back_with_one_id_each(text: str) -> None:
    ids = KINDS["chars"].encode(text)
    assert len(ids) == len(text)
    assert KINDS["chars"].decode(ids) == text


def test_an_unknown_character_is_one_unknown_id() -> None:
    chars = Chars().build(["cab"])
    assert chars.encode("abcx😀") == [0, 1, 2, 3, 3]
    assert chars.decode([0, 3]) == f"a{UNKNOWN}"


@every_kind
@given(text=texts)
@settings(max_examples=40, deadline=None)
def test_the_library_reads_the_same_ids_and_text_from_our_file(kind: str, text: str) -> None:
    ids = LIBRARY[kind].encode(text, add_special_tokens=False).ids
    assert KINDS[kind].encode(text) == ids
    assert KINDS[kind].encode_many([text, "", text]) == [ids, [], ids]
    assert KINDS[kind].decode(ids) == LIBRARY[kind].decode(ids, skip_special_tokens=False)


@given(text=texts)
def test_the_id_of_a_byte_is_the_byte(text: str) -> None:
    assert KINDS["bytes"].encode(text) == list(text.encode())


@every_kind
@given(text=texts | st.sampled_from(TRICKY))
@settings(max_examples=50, deadline=None)
def test_a_text_never_becomes_a_special_token(kind: str, text: str) -> None:
    assert not set(KINDS[kind].specials.values()) & set(KINDS[kind].encode(text))


@every_kind
def test_a_special_spelling_stays_text_after_save_and_open(kind: str, tmp_path: Path) -> None:
    KINDS[kind].save(tmp_path / "tokenizer.json")
    again = open_tokenizer(tmp_path)
    # The trap is real: the library as it opens the file by itself ends the document here.
    careless = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert again.end in careless.encode(f"a{END}b").ids
    for text in TRICKY:
        assert again.encode(text) == KINDS[kind].encode(text)
        assert not set(again.encode(text)) & set(again.specials.values())
        if again.kind in EXACT:
            assert again.decode(again.encode(text)) == text


@trained_kind
def test_added_special_tokens_come_after_all_others_in_their_order(kind: str, tmp_path: Path) -> None:
    tokenizer, larger = TRAINED[kind], KINDS[f"{kind}, extended"]
    assert larger.specials == {**tokenizer.specials, **{text: tokenizer.size + at for at, text in enumerate(ADDED)}}
    assert (larger.kind, larger.size) == (tokenizer.kind, tokenizer.size + len(ADDED))
    assert [larger.piece(id) for id in range(larger.size)] == [*map(tokenizer.piece, range(tokenizer.size)), *ADDED]
    assert larger.encode("".join(CORPUS)) == tokenizer.encode("".join(CORPUS))
    assert larger.digest != tokenizer.digest
    larger.save(tmp_path / "tokenizer.json")
    assert open_tokenizer(tmp_path).specials == larger.specials


@trained_kind
def test_extending_by_what_is_there_changes_nothing_and_by_what_cannot_be_is_refused(kind: str) -> None:
    larger = KINDS[f"{kind}, extended"]
    assert larger.extended(ADDED).digest == larger.digest
    assert larger.extended([]).digest == larger.digest
    assert larger.extended(["<s>", "[PAD]", "<s>"]).specials == {**larger.specials, "<s>": larger.size}
    ordinary = tokenizers.Tokenizer.from_str(larger.serialise()).get_vocab().keys() - larger.specials.keys()
    for text in ("", min(ordinary), max(ordinary)):
        with pytest.raises(DataError, match="cannot be a special token"):
            larger.extended(["<s>", text])
    with pytest.raises(DataError, match="lone surrogate"):
        larger.extended(["<\ud800>"])


@trained_kind
def test_added_special_tokens_are_spelled_or_skipped(kind: str) -> None:
    larger = KINDS[f"{kind}, extended"]
    ids = [larger.specials["[MASK]"], larger.end, larger.specials["<extra_id_0>"]]
    assert larger.decode(ids).replace(" ", "") == f"[MASK]{END}<extra_id_0>"
    assert larger.decode(ids, skip_specials=True) == ""
    assert all(larger.starts_word(id) and larger.ends_word(id) and larger.piece_bytes(id) == b"" for id in ids)


@every_kind
def test_a_saved_tokenizer_opens_as_the_same_one(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "some-name.json"
    KINDS[kind].save(path)
    again = open_tokenizer(path)
    assert (again.kind, again.size, again.specials) == (kind.split(",")[0], KINDS[kind].size, KINDS[kind].specials)
    assert again.digest == KINDS[kind].digest == hashlib.sha256(path.read_bytes()).hexdigest()
    assert [file.name for file in tmp_path.iterdir()] == ["some-name.json"]


# The space between words belongs to the second (unigram), to the first (word-bpe) or to neither (wordpiece).
SPELLED = {"word-bpe": f"To {END}be", "wordpiece": f"to {END} be", "unigram": f"To{END} be"}


@trained_kind
def test_the_end_is_the_last_id_and_is_spelled_or_skipped(kind: str) -> None:
    tokenizer = KINDS[kind]
    to, be = tokenizer.encode("To"), tokenizer.encode(" be")
    if kind.endswith("exact"):
        be = be[1:]  # its own space, after the dummy one
    assert tokenizer.end == tokenizer.size - 1 == tokenizer.specials[END]
    decoded, skipped = (tokenizer.decode([*to, tokenizer.end, *be], skip_specials=skip) for skip in (False, True))
    lower = "to" if kind == "wordpiece" else "To"
    expected = SPELLED.get(tokenizer.kind, f"To{END} be")
    assert decoded == expected.replace("to", lower)
    assert skipped == f"{lower} be"
    assert tokenizer.decode([]) == ""


@pytest.mark.parametrize("kind", ["chars", "bytes", "bpe"])
def test_the_bytes_of_the_pieces_join_to_the_text(kind: str) -> None:
    tokenizer = KINDS[kind]
    ids = tokenizer.encode("".join(CORPUS))
    assert b"".join(map(tokenizer.piece_bytes, ids)) == "".join(CORPUS).encode()


@every_kind
def test_every_id_has_a_printable_name_and_the_end_no_bytes(kind: str) -> None:
    tokenizer = KINDS[kind]
    assert tokenizer.piece_bytes(tokenizer.end) == b""
    assert tokenizer.piece(tokenizer.end) == END
    assert all(tokenizer.piece(id).isprintable() for id in range(tokenizer.size))


@trained_kind
@given(text=texts, place=st.integers(0, 60))
@settings(max_examples=30, deadline=None)
def test_a_kind_that_allows_cuts_gives_the_same_ids_around_any_cut(kind: str, text: str, place: int) -> None:
    tokenizer = KINDS[kind]
    assert tokenizer.exact_cut == (tokenizer.kind in ("chars", "bytes"))
    if tokenizer.exact_cut:
        assert tokenizer.encode(text[:place]) + tokenizer.encode(text[place:]) == tokenizer.encode(text)


@trained_kind
@given(words=st.lists(st.sampled_from(["to", "be", "question", "aaaa", "not", "that"]), min_size=1, max_size=6))
@settings(max_examples=30, deadline=None)
def test_words_begin_where_the_ids_say(kind: str, words: list[str]) -> None:
    tokenizer, text = TRAINED[kind], " ".join(words)
    ids, spans = tokenizer.encode(text), tokenizer.spans(text)
    borders = [
        spans[at][0] for at in range(1, len(ids)) if tokenizer.starts_word(ids[at]) or tokenizer.ends_word(ids[at - 1])
    ]
    # a border before a space is the border of the word behind it
    starts = {at + 1 for at, letter in enumerate(text) if letter == " "}
    assert {border + (text[border] == " ") for border in borders} == starts


@trained_kind
@given(text=texts)
@settings(max_examples=60, deadline=None)
def test_spans_follow_the_text_and_cover_all_but_white_space(kind: str, text: str) -> None:
    tokenizer = TRAINED[kind]
    spans = tokenizer.spans(text)
    assert len(spans) == len(tokenizer.encode(text))
    assert all(0 <= first <= last <= len(text) for first, last in spans)
    assert spans == sorted(spans)
    covered = {at for first, last in spans for at in range(first, last)}
    if kind not in ("wordpiece", "wordpiece, likelihood", "unigram"):  # their normalisers drop and join characters
        assert all(text[at].isspace() for at in range(len(text)) if at not in covered)


@trained_kind
@pytest.mark.parametrize("text", ["\ud800", "fine \udfff", "a\udc80b"])
def test_a_lone_surrogate_is_refused_in_a_sentence(kind: str, text: str) -> None:
    with pytest.raises(DataError, match=r"lone surrogate, U\+D[8-F]\d\d|lone surrogate, U\+DFFF"):
        KINDS[kind].encode_many(["fine", text])


@every_kind
def test_an_id_outside_the_vocabulary_is_refused(kind: str) -> None:
    tokenizer = KINDS[kind]
    for id in (-1, tokenizer.size):
        with pytest.raises(RequestError, match=f"no id {id}:"):
            tokenizer.decode([0, id, 1])
        with pytest.raises(RequestError, match=f"no id {id}:"):
            tokenizer.piece(id)
        with pytest.raises(RequestError, match=f"no id {id}:"):
            tokenizer.piece_bytes(id)


REPETITIVE = {"a": "a", "ab": "ab", "spaces": " ", "lines": "\n", "words": "a ", "digits": "1", "accents": "é"}


@pytest.mark.parametrize("kind", ["bpe", "word-bpe", "wordpiece", "unigram"])
@pytest.mark.parametrize("unit", REPETITIVE.values(), ids=REPETITIVE)
def test_repetitive_text_takes_linear_time(kind: str, unit: str) -> None:
    # 4 times the text: 4 times the work if linear, 16 if quadratic.
    assert _cost(KINDS[kind], unit, 128_000, 2) < 8 * _cost(KINDS[kind], unit, 32_000, 3) + 0.01


@pytest.mark.full
@trained_kind
@pytest.mark.parametrize("unit", REPETITIVE.values(), ids=REPETITIVE)
def test_ten_megabytes_of_repetitive_text_take_linear_time(kind: str, unit: str) -> None:
    # 10 times the text, 100 times the work if quadratic; memory outside the caches makes each character dearer.
    assert _cost(KINDS[kind], unit, 10_000_000, 1) < 40 * _cost(KINDS[kind], unit, 1_000_000, 3)


def _cost(tokenizer: Tokenizer, unit: str, length: int, tries: int) -> float:
    """Processor seconds to encode `length` characters: the best try, since neighbours on the machine only add."""
    text = (unit * length)[:length]
    best = float("inf")
    for _ in range(tries):
        begin = time.process_time()
        ids = tokenizer.encode(text)
        best = min(best, time.process_time() - begin)
    if tokenizer.kind in EXACT or tokenizer.kind == "chars":
        assert b"".join(map(tokenizer.piece_bytes, ids)) == text.encode()
    return best


FORK = """
import os, sys
from trivium.text.kinds import Bpe
tokenizer = Bpe(size=300).build(["to be or not to be"] * 50)
texts = ["to be or not"] * 64
expected = tokenizer.encode_many(texts)
child = os.fork()
if not child:
    os._exit(0 if tokenizer.encode_many(texts) == expected else 1)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_a_forked_process_encodes_without_a_warning_or_a_hang() -> None:
    root = str(Path(trivium.text.tokenizer.__file__).parents[2])
    environment = {name: value for name, value in os.environ.items() if name != "TOKENIZERS_PARALLELISM"}
    environment["PYTHONPATH"] = root
    result = subprocess.run([sys.executable, "-c", FORK], capture_output=True, text=True, env=environment, timeout=60)
    assert (result.returncode, result.stderr) == (0, "")
