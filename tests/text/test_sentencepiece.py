"""SentencePiece models give the ids of the sentencepiece package; damaged ones are refused in a sentence."""

from __future__ import annotations

import io
import json
import random
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.text.corpus import EDGES, passages, scrambled
from trivium.errors import DataError
from trivium.text.charsmap import Charsmap
from trivium.text.library import byte_pieces
from trivium.text.sentencepiece import (
    BYTE,
    CONTROL,
    UNKNOWN,
    UNUSED,
    USER,
    Scored,
    Spelling,
    bpe,
    read_model,
    tokenizer_of,
    unigram,
)
from trivium.text.tokenizer import LibraryTokenizer, open_tokenizer

spm = pytest.importorskip("sentencepiece")
MODELS = {"bpe": "llama-spm/tokenizer.model", "unigram": "t5-spm/cc_all.32000.100extra.model"}


@pytest.fixture(scope="module", params=MODELS)
def pair(request: pytest.FixtureRequest, shared: Path) -> tuple[LibraryTokenizer, Any]:
    """Ours and the oracle."""
    file = shared / "data" / MODELS[request.param]
    if not file.is_file():
        pytest.skip(f"needs {file.name} beside the project")
    model = read_model(file)
    assert model.kind == request.param
    return tokenizer_of(model), spm.SentencePieceProcessor(model_file=str(file))


def test_edges_of_unicode_have_the_ids_of_sentencepiece(pair: tuple[LibraryTokenizer, Any]) -> None:
    ours, oracle = pair
    for text in EDGES:
        assert ours.encode(text) == oracle.encode(text), ascii(text)


def test_mixed_text_has_the_ids_of_sentencepiece(
    pair: tuple[LibraryTokenizer, Any], shared: Path, count: Callable[[int, int], int]
) -> None:
    ours, oracle = pair
    texts = passages(shared, count(200_000, 10_000_000))
    assert ours.encode_many(texts) == oracle.encode(texts)


def test_scrambled_text_has_the_ids_of_sentencepiece_but_where_float32_breaks_a_tie(
    pair: tuple[LibraryTokenizer, Any], count: Callable[[int, int], int]
) -> None:
    ours, oracle = pair
    texts = scrambled(random.Random(1), count(1000, 20_000))
    differ = [text for text, ids in zip(texts, ours.encode_many(texts), strict=True) if ids != oracle.encode(text)]
    # SentencePiece adds float32: of two cuts with equal sums it takes one or the other by what came before
    assert len(differ) <= len(texts) // 300, list(map(ascii, differ[:5]))
    for text in differ:
        assert ours.kind == "unigram"
        scores = [sum(map(oracle.get_score, ids)) for ids in (ours.encode(text), oracle.encode(text))]
        assert scores[0] == pytest.approx(scores[1], abs=1e-5)


def test_decoding_gives_the_text_of_sentencepiece(pair: tuple[LibraryTokenizer, Any], shared: Path) -> None:
    ours, oracle = pair
    for text in passages(shared, 20_000):
        ids = oracle.encode(text)
        if oracle.unk_id() not in ids:
            assert ours.decode(ids) == oracle.decode(ids)


def test_special_spellings_stay_text(pair: tuple[LibraryTokenizer, Any]) -> None:
    ours, _ = pair
    assert ours.end == ours.specials["</s>"]
    for spelling in [*ours.specials, "<unk>", "<0x0A>"]:
        for text in (spelling, f"x{spelling}y", f"a {spelling} b", spelling * 2):
            ids = ours.encode(text)
            assert not {*ids} & {*ours.specials.values()}, text
            assert ours.specials.get("<unk>", 0) not in ids or ours.kind == "unigram"
            if ours.kind == "bpe":
                assert ours.decode(ids) == text


def test_spans_point_into_the_text_as_it_was_given(pair: tuple[LibraryTokenizer, Any]) -> None:
    ours, _ = pair
    text = "ﬁne  e\u0302\u0301 words"
    spans = ours.spans(text)
    assert len(spans) == len(ours.encode(text))
    assert all(0 <= first <= last <= len(text) for first, last in spans)
    first, last = spans[-1]
    assert "words".endswith(text[first:last].strip())


def test_a_saved_tokenizer_opens_as_the_same(pair: tuple[LibraryTokenizer, Any], tmp_path: Path) -> None:
    ours, _ = pair
    ours.save(tmp_path / "tokenizer.json")
    again = open_tokenizer(tmp_path)
    assert (again.digest, again.end, again.begin, again.size) == (ours.digest, ours.end, ours.begin, ours.size)
    assert again.encode_many(EDGES) == ours.encode_many(EDGES)
    wider = again.extended(["<new>"])
    assert (wider.size, wider.specials["<new>"]) == (ours.size + 1, ours.size)
    assert wider.encode_many(EDGES) == ours.encode_many(EDGES)


def test_replacements_are_those_of_sentencepiece(shared: Path, count: Callable[[int, int], int]) -> None:
    file = shared / "data" / MODELS["unigram"]
    charsmap = Charsmap(read_model(file).spelling.charsmap)
    oracle = spm.SentencePieceNormalizer(
        model_file=str(file), add_dummy_prefix=False, remove_extra_whitespaces=False, escape_whitespaces=False
    )
    for text in [*EDGES, *scrambled(random.Random(2), count(2000, 100_000)), *map(chr, range(0x300))]:
        spelled = charsmap.spell(text)
        assert spelled == oracle.normalize(text), ascii(text)
        assert len(charsmap.origins(text)) == len(spelled)


@pytest.fixture(scope="module")
def trained() -> bytes:
    """A small model with everything in it: bytes, controls, pieces of a user's own."""
    target = io.BytesIO()
    lines = ["to be or not to be that is the question", "whether it is nobler in the mind", "ab ba abba ☃"] * 20
    spm.SentencePieceTrainer.train(
        sentence_iterator=iter(lines),
        model_writer=target,
        vocab_size=340,
        model_type="unigram",
        byte_fallback=True,
        pad_id=3,
        user_defined_symbols=["<sep>", "§§"],
        minloglevel=2,
        hard_vocab_limit=False,
    )
    return target.getvalue()


def test_the_fields_of_a_model_are_those_that_its_maker_wrote(trained: bytes, tmp_path: Path) -> None:
    (tmp_path / "a.model").write_bytes(trained)
    model = read_model(tmp_path / "a.model")
    oracle = spm.SentencePieceProcessor(model_proto=trained)
    assert len(model.pieces) == len(oracle)
    for id, piece in enumerate(model.pieces):
        assert piece.text == oracle.id_to_piece(id)
        assert piece.score == pytest.approx(oracle.get_score(id), abs=1e-6)
        assert (piece.type == CONTROL) == oracle.is_control(id)
        assert (piece.type == UNKNOWN) == oracle.is_unknown(id)
        assert (piece.type == BYTE) == oracle.is_byte(id)
    assert (model.roles.begin, model.roles.end, model.roles.pad) == ("<s>", "</s>", "<pad>")
    assert (model.spelling.dummy, model.spelling.collapse, model.spelling.fallback) == (True, True, True)
    ours = tokenizer_of(model)
    for text in ("to be ☃ or 東 not", "the §§ mind", "abba é", *EDGES):
        assert ours.encode(text) == oracle.encode(text), ascii(text)
    assert ours.specials["<sep>"] not in ours.encode("a <sep> b")


@given(data=st.data())
@settings(max_examples=150, deadline=None)
def test_a_mutated_model_opens_or_is_refused_in_a_sentence(
    trained: bytes, data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    content = bytearray(trained)
    for _ in range(data.draw(st.integers(1, 4))):
        # the replacements are most of the file: half of the changes go to the rest of it
        end = data.draw(st.sampled_from([len(content) - 1, 6000]))
        content[data.draw(st.integers(0, end))] = data.draw(st.integers(0, 255))
    if data.draw(st.booleans()):
        del content[data.draw(st.integers(0, len(content) - 1)) :]
    path = tmp_path_factory.mktemp("mutated") / "a.model"
    path.write_bytes(content)
    try:
        tokenizer = tokenizer_of(read_model(path))
    except DataError:
        return
    tokenizer.decode(tokenizer.encode("to be e\u0301 ☃"))


def test_a_model_of_another_sort_is_refused_with_the_reason(tmp_path: Path) -> None:
    def message(number: int, content: bytes) -> bytes:
        return bytes([number << 3 | 2, len(content)]) + content

    piece = message(1, message(1, b"a") + bytes([2 << 3 | 5]) + struct.pack("<f", -1.0))
    path = tmp_path / "a.model"
    for content, reason in (
        (piece + message(2, bytes([3 << 3, 3])), "whole words or characters, not BPE or Unigram"),
        (piece + message(2, bytes([24 << 3 & 0x7F | 0x80, 1, 1])), "its spaces stand behind the words"),
        (b"", "is not a SentencePiece model"),
        (b"PK\x03\x04 not a model", "is not a SentencePiece model"),
    ):
        path.write_bytes(content)
        with pytest.raises(DataError, match=reason):
            read_model(path)
    with pytest.raises(DataError, match="cannot be read"):
        read_model(tmp_path / "nowhere.model")


PIECES = [
    Scored("<unk>", 0.0, UNKNOWN),
    Scored("<s>", 0.0, CONTROL),
    Scored("</s>", 0.0, CONTROL),
    *(Scored(name, 0.0, BYTE) for name in byte_pieces()),
    *(
        Scored(text, -float(rank))
        for rank, text in enumerate(["▁a", "ab", "▁ab", "▁abb", "▁", "a", "b", "<", "s", ">"])
    ),
    Scored("§", 0.0, USER),
    Scored("abba", -99.0, UNUSED),
]


def test_pieces_are_merged_by_their_scores_and_those_out_of_use_never() -> None:
    tokenizer = bpe(PIECES)
    named = [tokenizer.piece(id) for id in tokenizer.encode("abba§<s>é")]
    # ▁a scores best of all pairs in "▁abba", then ab has no a left, and ▁ab, ▁abb follow
    assert named == ["▁abb", "a", "§", "<", "s", ">", "<0xC3>", "<0xA9>"]
    assert tokenizer.decode(tokenizer.encode("abba§<s>é")) == "abba§<s>é"
    assert tokenizer.piece(tokenizer.size - 1) == "abba"


def test_the_best_sum_of_scores_wins_and_equal_sums_end_in_the_longest_piece() -> None:
    scores = {"▁": -1.0, "l": -3.1, "ll": -4.3, "x": -9.0}
    pieces = [Scored("<unk>", 0.0, UNKNOWN), Scored("</s>", 0.0, CONTROL)]
    tokenizer = unigram([*pieces, *(Scored(text, score) for text, score in scores.items())], spelling=Spelling())
    assert [tokenizer.piece(id) for id in tokenizer.encode("lll")] == ["▁", "l", "ll"]
    assert [tokenizer.piece(id) for id in tokenizer.encode("xyzx")] == ["▁", "x", "<unk>", "x"]
    exported = tokenizer.shown()["model"]["vocab"]
    assert {name: score for name, score in exported if score} == pytest.approx(scores)
    assert json.loads(tokenizer.serialise())["model"]["vocab"] != exported


def test_a_unigram_without_an_unknown_piece_is_refused() -> None:
    with pytest.raises(DataError, match="no piece for what it does not know"):
        unigram([Scored("a", -1.0), Scored("</s>", 0.0, CONTROL)], spelling=Spelling())
