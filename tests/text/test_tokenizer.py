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
from trivium.errors import DataError, RequestError
from trivium.text.kinds import Bpe, Bytes, Chars
from trivium.text.tokenizer import END, UNKNOWN, LibraryTokenizer, Tokenizer, open_tokenizer

CORPUS = [
    "To be, or not to be: that is the question.\n" * 20,
    "naïve café, 東京 😀 <|endoftext|> 1234" * 20,
    "aaaa " * 200,
]
KINDS = {
    "chars": Chars().build(CORPUS),
    "bytes": Bytes().build([]),
    "bpe": Bpe(size=400).build(CORPUS),
}
EXACT = ["bytes", "bpe"]
TRICKY = [END, f"a{END}b", END * 3, f" {END}\n", "<|endof" + "text|>", UNKNOWN, f"{UNKNOWN}{END}", "<|", "|>"]

every_kind = pytest.mark.parametrize("kind", KINDS)
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
@settings(max_examples=100, deadline=None)
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
@settings(max_examples=100, deadline=None)
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
        assert again.end not in again.encode(text)
        assert again.decode(again.encode(text)) == text or UNKNOWN in again.decode(again.encode(text))


@every_kind
def test_a_saved_tokenizer_opens_as_the_same_one(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "some-name.json"
    KINDS[kind].save(path)
    again = open_tokenizer(path)
    assert (again.kind, again.size, again.specials) == (kind, KINDS[kind].size, KINDS[kind].specials)
    assert again.digest == KINDS[kind].digest == hashlib.sha256(path.read_bytes()).hexdigest()
    assert [file.name for file in tmp_path.iterdir()] == ["some-name.json"]


@every_kind
def test_the_end_is_the_last_id_and_is_spelled_or_skipped(kind: str) -> None:
    tokenizer = KINDS[kind]
    to, be = tokenizer.encode("To"), tokenizer.encode(" be")
    assert tokenizer.end == tokenizer.size - 1 == tokenizer.specials[END]
    assert tokenizer.decode([*to, tokenizer.end, *be]) == f"To{END} be"
    assert tokenizer.decode([*to, tokenizer.end, *be], skip_specials=True) == "To be"
    assert tokenizer.decode([]) == ""


@every_kind
def test_the_bytes_of_the_pieces_join_to_the_text(kind: str) -> None:
    tokenizer = KINDS[kind]
    ids = tokenizer.encode("".join(CORPUS))
    assert b"".join(map(tokenizer.piece_bytes, ids)) == "".join(CORPUS).encode()
    assert tokenizer.piece_bytes(tokenizer.end) == b""
    assert tokenizer.piece(tokenizer.end) == END
    assert all(tokenizer.piece(id).isprintable() for id in range(tokenizer.size))


@every_kind
@given(text=texts, place=st.integers(0, 60))
@settings(max_examples=60, deadline=None)
def test_a_kind_that_allows_cuts_gives_the_same_ids_around_any_cut(kind: str, text: str, place: int) -> None:
    tokenizer = KINDS[kind]
    assert tokenizer.exact_cut == (kind != "bpe")
    if tokenizer.exact_cut:
        assert tokenizer.encode(text[:place]) + tokenizer.encode(text[place:]) == tokenizer.encode(text)


@every_kind
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


@pytest.mark.parametrize("unit", REPETITIVE.values(), ids=REPETITIVE)
def test_repetitive_text_takes_linear_time(unit: str) -> None:
    # 4 times the text: 4 times the work if linear, 16 if quadratic.
    assert _cost(KINDS["bpe"], unit, 256_000, 3) < 8 * _cost(KINDS["bpe"], unit, 64_000, 3)


@pytest.mark.full
@every_kind
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


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"nowhere.json does not exist; name a tokenizer.json"):
        open_tokenizer(tmp_path / "nowhere.json")
    with pytest.raises(DataError, match=r"tokenizer.json does not exist"):
        open_tokenizer(tmp_path)


@pytest.mark.parametrize("content", [b"", b"{}", b"[]", b"not JSON", b"\xff\xfe", b'{"model": 3}'])
def test_a_broken_file_is_refused_in_a_sentence(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes(content)
    with pytest.raises(DataError, match=r"tokenizer.json is not (a tokenizer.json|UTF-8 text)") as caught:
        open_tokenizer(tmp_path)
    assert "\n" not in str(caught.value)


def _wordpiece() -> tokenizers.Tokenizer:
    inner = tokenizers.Tokenizer(tokenizers.models.WordPiece({"[UNK]": 0, "a": 1}, unk_token="[UNK]"))
    return trivium.text.tokenizer.with_end(inner)


def _without_end() -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer(tokenizers.models.BPE({"a": 0}, []))


def _without_bytes() -> tokenizers.Tokenizer:
    inner = tokenizers.Tokenizer(tokenizers.models.BPE({"a": 0}, []))
    inner.decoder = tokenizers.decoders.ByteLevel()
    return trivium.text.tokenizer.with_end(inner)


def _with_holes() -> tokenizers.Tokenizer:
    return trivium.text.tokenizer.with_end(tokenizers.Tokenizer(tokenizers.models.BPE({"a": 0, "b": 7}, [])))


def _with_forged_end() -> tokenizers.Tokenizer:
    # `ignore_merges` looks a whole word up before merging: without a pre-split the spelling is such a word.
    pieces = [*trivium.text.tokenizer.byte_alphabet(), END]
    model = tokenizers.models.BPE({piece: id for id, piece in enumerate(pieces)}, [], ignore_merges=True)
    inner = tokenizers.Tokenizer(model)
    inner.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = tokenizers.decoders.ByteLevel()
    return trivium.text.tokenizer.with_end(inner)


FOREIGN = {
    "WordPiece model": _wordpiece,
    "no special token": _without_end,
    "255 of the 256 bytes": _without_bytes,
    "without holes": _with_holes,
    "for the token itself": _with_forged_end,
}


@pytest.mark.parametrize("reason", FOREIGN)
def test_a_foreign_file_is_refused_with_the_reason(reason: str, tmp_path: Path) -> None:
    FOREIGN[reason]().save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(DataError, match=f"tokenizer.json cannot be used: .*{reason}.*; name a"):
        open_tokenizer(tmp_path)


@every_kind
@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_a_mutated_file_opens_or_is_refused_in_a_sentence(
    kind: str, data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    content = bytearray(KINDS[kind].serialise().encode())
    for _ in range(data.draw(st.integers(1, 3))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.sampled_from(b'019{}[]",:\\ntruef\xff'))
    path = tmp_path_factory.mktemp("mutated") / "tokenizer.json"
    path.write_bytes(content)
    try:
        tokenizer = open_tokenizer(path)
    except DataError:
        return
    tokenizer.decode(tokenizer.encode(f"To be{END}"))


def test_truncation_and_padding_in_a_file_are_switched_off() -> None:
    inner = plain(KINDS["bpe"])
    inner.enable_truncation(2)
    inner.enable_padding(length=50)
    tokenizer = LibraryTokenizer(inner)
    assert tokenizer.encode("To be, or not to be") == KINDS["bpe"].encode("To be, or not to be")
    assert tokenizer.digest == KINDS["bpe"].digest
