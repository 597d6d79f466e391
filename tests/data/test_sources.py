from __future__ import annotations

import codecs
import gzip
import hashlib
import json
import lzma
import random
import re
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from trivium.data.config import DataConfig
from trivium.data.shards import built_shards
from trivium.data.sources import (
    Piece,
    Source,
    _cut,
    _split,
    cut_for,
    encoded,
    files,
    held_out,
    pieces,
    texts,
    total_bytes,
)
from trivium.errors import ConfigError, DataError
from trivium.text.kinds import Bpe, Bytes, Chars, EndOfWordBpe, Unigram, WordPiece, Words
from trivium.text.tokenizer import Tokenizer

Compress = Callable[[bytes], bytes]
PACKERS: dict[str, Compress] = {"": bytes, ".gz": gzip.compress, ".xz": lzma.compress}


def quiet(_: int) -> None:
    pass


def read(*paths: Path, separator: str = "", field: str = "text", **options: Any) -> list[Piece]:
    return list(pieces(paths, separator=separator, field=field, read=quiet, **options))


def documents(found: Iterable[Piece]) -> list[str]:
    whole: list[str] = []
    for piece in found:
        if piece.first:
            whole.append("")
        whole[-1] += piece.text
    return whole


KINDS: dict[str, Any] = {
    "chars": Chars(),
    "bytes": Bytes(),
    "bpe": Bpe(size=400),
    "words": Words(),
    "word-bpe": EndOfWordBpe(size=120),
    "word-bpe fused": EndOfWordBpe(size=120, symbol="fused"),
    "wordpiece": WordPiece(size=120),
    "wordpiece cased": WordPiece(size=120, case="keep"),
    "unigram": Unigram(size=80),
    "unigram identity": Unigram(size=80, normal="identity"),
    "unigram bytes": Unigram(size=400, normal="identity", fallback="bytes"),
}


@cache
def trained(kind: str) -> Tokenizer:
    rng = random.Random(0)
    words = ["the", "don't", "we'll", "1234", "naïve", "Zürich", "—", "  ", "\n\n", "\t", "!!", "'s"]
    made: Tokenizer = KINDS[kind].build([" ".join(rng.choices(words, k=2000))])
    return made


def bpe() -> Tokenizer:
    return trained("bpe")


# What the pre-split treats differently: letters, digits, marks, the contractions, every sort of whitespace,
# U+001C (whitespace to Python, not to Unicode), U+0085, U+00A0, U+3000 (whitespace, but no place to cut), U+2581 (a
# space to SentencePiece), U+00A8 (a space and a mark to NFKC) and a mark that joins the letter before it.
SORTS = "ab1'stre,.!  \n\r\t\f\x0b\x1c\x85\xa0\u2028\u3000\u2581\xa8\u0308é世\U0001f600"
TRICKY = st.text(st.sampled_from(SORTS), max_size=60)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=150, deadline=None)
@given(text=TRICKY, size=st.integers(4, 12))
@example(text="the the  the \n the ", size=4)
def test_the_ids_of_the_pieces_join_to_the_ids_of_the_whole_document(kind: str, text: str, size: int) -> None:
    tokenizer = trained(kind)
    cut = cut_for(tokenizer)
    found = [Piece(*piece, Path("x")) for piece in _cut([text, None], size, cut)]
    assert "".join(piece.text for piece in found) == text
    assert [id for ids in encoded(tokenizer, found, cut) for id in ids] == tokenizer.encode(text)


@pytest.mark.parametrize("kind", KINDS)
def test_a_long_text_is_cut_whatever_the_kind(kind: str) -> None:
    text = "the naïve 1234\ndon't " * 40
    assert len([*_cut([text, None], 50, cut_for(trained(kind)))]) > 10


def test_cutting_anywhere_would_change_the_ids() -> None:
    text = "the naïve 1234 don't " * 20
    cut = [piece for piece, _, _ in _cut([text, None], 7, "anywhere")]
    assert "".join(cut) == text
    assert [id for piece in cut for id in bpe().encode(piece)] != bpe().encode(text)


def test_a_long_text_is_cut_into_pieces_of_about_the_asked_size(tmp_path: Path) -> None:
    text = " ".join(random.Random(1).choices(["the", "don't", "1234", "\n"], k=30_000))
    path = tmp_path / "a.txt"
    path.write_text(text)
    found = read(path, size=1000)
    assert "".join(piece.text for piece in found) == text
    assert all(1000 <= len(piece.text) < 1050 for piece in found[:-1])
    assert [piece.first for piece in found] == [True] + [False] * (len(found) - 1)
    assert [piece.last for piece in found] == [False] * (len(found) - 1) + [True]
    assert [id for piece in found for id in bpe().encode(piece.text)] == bpe().encode(text)


@pytest.mark.parametrize("run", ["a", " "])
def test_a_run_without_a_place_to_cut_stays_bounded(run: str) -> None:
    chunks = [run * 37] * 300
    cut = [piece for piece, _, _ in _cut([*chunks, None], 10, "white")]
    assert "".join(cut) == "".join(chunks)
    assert max(map(len, cut)) == 160


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.text(st.sampled_from("ab-\f\n"), max_size=6), max_size=12),
    st.sampled_from(["", "--", "-a-", "\f\n", "\f\f", "a", "\n\n"]),
)
def test_documents_are_what_a_split_of_the_whole_text_gives(chunks: list[str], separator: str) -> None:
    text = "".join(chunks)
    marks = sorted({separator, "\f"} - {""}, key=len, reverse=True)
    expected = [document for document in re.split("|".join(map(re.escape, marks)), text) if document]
    cut = _cut(_split(chunks, separator), 5, "anywhere")
    assert documents(Piece(*piece, Path("x")) for piece in cut) == expected


@pytest.mark.parametrize("suffix", PACKERS)
def test_text_arrives_byte_for_byte(tmp_path: Path, suffix: str) -> None:
    text = "one\r\ntwo\rthree\n\x00\u2028 ä世\U0001f600 \ufeff end " * 40_000  # more than a chunk, characters across it
    path = tmp_path / f"a.txt{suffix}"
    path.write_bytes(PACKERS[suffix](codecs.BOM_UTF8 + text.encode()))
    assert documents(read(path)) == [text]


@pytest.mark.parametrize("suffix", PACKERS)
def test_every_byte_is_counted_and_hashed(tmp_path: Path, suffix: str) -> None:
    text = " ".join(str(random.Random(2).random()) for _ in range(100_000)).encode()
    data = PACKERS[suffix](text) + (b"trailing" if suffix == ".xz" else b"")
    path = tmp_path / f"a.txt{suffix}"
    path.write_bytes(data)
    counted: list[int] = []
    seen: list[Source] = []
    for _ in pieces([path], separator="", field="text", read=counted.append, done=seen.append):
        pass
    assert sum(counted) == total_bytes([path]) == len(data)
    assert seen == [Source(path, len(data), hashlib.sha256(data).hexdigest())]


def test_each_json_line_is_a_document(tmp_path: Path) -> None:
    wanted = ["one\ntwo", "with a \f inside", "a line separator \u2028 is no new line", "\U0001f600"]
    lines = [json.dumps({"id": 1, "body": text}, ensure_ascii=number % 2 == 0) for number, text in enumerate(wanted)]
    lines[2:2] = ["", json.dumps({"body": ""})]
    for suffix, pack in PACKERS.items():
        path = tmp_path / f"a.jsonl{suffix}"
        path.write_bytes(pack(codecs.BOM_UTF8 + "\r\n".join(lines).encode()))
        assert documents(read(path, field="body")) == wanted


def test_a_folder_means_all_text_files_below_it_in_order(tmp_path: Path) -> None:
    for name in [
        "b.txt",
        "a/z.md",
        "a/b/c.jsonl.gz",
        "a.txt",
        "news.gz",
        "c.tar.gz",
        "d.bin",
        ".hidden.txt",
        ".g/x.txt",
    ]:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(b"x")
    names = [path.relative_to(tmp_path).as_posix() for path in files([tmp_path])]
    assert names == ["a/b/c.jsonl.gz", "a/z.md", "a.txt", "b.txt", "news.gz"]


def broken(tmp_path: Path) -> Iterator[tuple[str, bytes | None, str]]:
    big = b"words and words " * 80_000  # the fault lies in the second chunk
    packed = gzip.compress(big)
    yield "missing.txt", None, "data.paths: {} does not exist; "
    yield "empty.txt", b"", "data.paths: {} is empty; "
    yield "empty.gz", gzip.compress(b""), "{} is empty: it holds no text; "
    yield "blank.txt", b" \n\n\f\r\n", "{} is empty: it holds no text; "
    yield "latin.txt", b"caf\xe9 au lait", r"{} is not UTF-8 text (byte 3); "
    yield "far.txt", big + b"\xff", f"{{}} is not UTF-8 text (byte {len(big)}); "
    yield "far.gz", gzip.compress(big + b"\xff"), f"{{}} is not UTF-8 text (byte {len(big)}); "
    yield "far.xz", lzma.compress(b"x" + b"\xe4\xb8\x96" * (1 << 19) + b"\xe4"), "(byte 1572865); "
    yield "surrogate.txt", b"ab\xed\xa0\x80", "{} is not UTF-8 text (byte 2); "
    yield "plain.gz", b"not compressed at all", "{} is a damaged .gz file ("
    yield "torn.gz", packed[:-9], "{} is a damaged .gz file ("
    yield "flipped.gz", packed[:-6] + bytes([packed[-6] ^ 1]) + packed[-5:], "{} is a damaged .gz file ("
    yield "plain.xz", b"not compressed at all", "{} is a damaged .xz file ("
    yield "torn.xz", lzma.compress(big)[:-9], "{} is a damaged .xz file ("
    yield "not.jsonl", b'{"text": "a"}\nhello\n', "{}, line 2 is not JSON ("
    yield "deep.jsonl", b"[" * 100_000, "{}, line 1 is not JSON ("
    yield "key.jsonl", b'\n{"body": "a", "id": 3}\n', "{}, line 2 has no key 'text'; set data.field to"
    yield "list.jsonl", b'["text"]\n', "{}, line 1 has no key 'text'; "
    yield "number.jsonl", b'{"text": 3}\n', "{}, line 1: 'text' is not text; "
    yield "half.jsonl", b'{"text": "\\ud800"}\n', "{}, line 1: 'text' holds half a surrogate pair"
    yield "latin.jsonl", b'{"text": "a"}\n{"text": "\xe9"}\n', "{} is not UTF-8 text (byte 24); "
    yield "blank.jsonl", b"\n\n", "{} is empty: it holds no text; "


@pytest.mark.parametrize("number", range(22))
def test_a_text_that_cannot_be_read_is_named_in_one_sentence(tmp_path: Path, number: int) -> None:
    name, data, message = list(broken(tmp_path))[number]
    good = tmp_path / "good.txt"
    good.write_text("good")
    if data is not None:
        (tmp_path / name).write_bytes(data)
    with pytest.raises(DataError) as caught:
        read(good, tmp_path / name)
    assert message.format(tmp_path / name) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_folder_without_text_and_no_path_at_all_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.bin").write_bytes(b"x")
    with pytest.raises(DataError, match=r"data\.paths: .* holds no text files \(\.txt, "):
        read(tmp_path)
    with pytest.raises(DataError, match=r"data\.paths: no file is named"):
        read()


@pytest.mark.parametrize("valid", [-0.1, 1.0, float("nan"), ""])
def test_a_validation_part_that_is_no_part_is_refused(valid: float | str) -> None:
    with pytest.raises(ConfigError, match="valid: "):
        DataConfig(valid=valid)


def test_the_hash_holds_out_the_asked_fraction_and_equal_documents_together() -> None:
    texts = [f"document {number}" for number in range(20_000)]
    for fraction in (0.0, 0.01, 0.3):
        kept = sum(held_out(text, fraction) for text in texts)
        spread = (fraction * (1 - fraction) * len(texts)) ** 0.5
        assert abs(kept - fraction * len(texts)) <= 4 * spread
    # The fractions nest, and only the first 4,096 characters count.
    chosen = [{text for text in texts if held_out(text, fraction)} for fraction in (0.01, 0.1, 0.3)]
    assert all(small < large for small, large in pairwise(chosen))
    assert all(held_out("é" * 4096 + end, 0.5) == held_out("é" * 4096, 0.5) for end in texts[:50])


def test_the_tokenizer_never_sees_a_validation_document(tmp_path: Path) -> None:
    whole = [f"document {number} " + "word " * 3 for number in range(300)]
    path = tmp_path / "a.txt"
    path.write_text("\f".join(whole))
    seen = list(texts(DataConfig(paths=(str(path),), valid=0.2), read=quiet))
    assert seen == [text for text in whole if not held_out(text, 0.2)]
    assert 0 < len(seen) < len(whole)


def test_a_lone_document_trains_the_tokenizer_even_if_its_hash_says_validation(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text(next(text for text in map(str, range(1000)) if held_out(text, 0.2)))
    assert list(texts(DataConfig(paths=(str(path),), valid=0.2), read=quiet)) == [path.read_text()]


@pytest.mark.parametrize("weights", [(), (1.0, 1.0, 1.0)])
def test_a_path_that_will_be_cut_in_two_trains_the_tokenizer_too(tmp_path: Path, weights: tuple[float, ...]) -> None:
    """The only documents of two paths are held out by their hash; the small one is no loss unless it is mixed."""
    held = [text for text in map(str, range(1000)) if held_out(text, 0.05) and held_out(text * 99, 0.05)]
    words = ["word " * 200, held[0] * 99, held[1]]
    for name, text in zip("abc", words, strict=True):
        (tmp_path / name).write_text(text)
    paths = tuple(str(tmp_path / name) for name in "abc")
    seen = list(texts(DataConfig(paths=paths, valid=0.05, weights=weights), read=quiet))
    assert seen == (words if weights else words[:2])


@pytest.mark.parametrize("name", ["x" * 300, "folder/" * 2000])
def test_a_name_that_no_file_can_have_is_refused_in_a_sentence(name: str) -> None:
    with pytest.raises(DataError, match=r"^data\.paths: .*File name too long; name another file$") as refused:
        files([name])
    assert len(str(refused.value)) < 400
    assert built_shards(DataConfig(paths=(name,))) is None
