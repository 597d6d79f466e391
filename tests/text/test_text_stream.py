"""Streaming decode: whole characters only, and nothing lost."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.text.trained import CORPUS, KINDS, TRAINED
from trivium.text.library import END
from trivium.text.stream import TextStream

every_kind = pytest.mark.parametrize("kind", KINDS)
# Leads, continuations and forbidden bytes (overlong, surrogate, past U+10FFFF) meet far more often than by chance.
TROUBLE = b"\x80\xbf\xc0\xc2\xe0\xa0\xe2\x82\xac\xed\x9f\xef\xf0\x90\x9f\x98\xf4\x8f\xf5\xff a"


@every_kind
@pytest.mark.parametrize("skip", [False, True])
@given(data=st.data())
@settings(max_examples=40, deadline=None)
def test_the_stream_joined_is_the_text_decoded_at_once(kind: str, skip: bool, data: st.DataObject) -> None:
    tokenizer = KINDS[kind]
    ids = data.draw(st.lists(st.integers(0, tokenizer.size - 1), max_size=40))
    assert _streamed(kind, ids, skip) == tokenizer.decode(ids, skip_specials=skip)


@given(raw=st.lists(st.sampled_from(TROUBLE), max_size=12), ends=st.sets(st.integers(0, 12)), skip=st.booleans())
@settings(max_examples=400, deadline=None)
def test_broken_bytes_are_replaced_as_when_decoded_at_once(raw: list[int], ends: set[int], skip: bool) -> None:
    ids = [id for place, byte in enumerate(raw) for id in ([256, byte] if place in ends else [byte])]
    spelled = b"".join((b"" if skip else END.encode()) if id == 256 else bytes([id]) for id in ids)
    assert _streamed("bytes", ids, skip) == spelled.decode("utf-8", "replace")
    assert KINDS["bytes"].decode(ids, skip_specials=skip) == spelled.decode("utf-8", "replace")


@pytest.mark.parametrize("kind", ["bytes", "bpe", "unigram, exact"])
@given(text=st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\u2581"), max_size=30))
@settings(max_examples=100, deadline=None)
def test_half_a_character_is_never_shown(kind: str, text: str) -> None:
    stream, shown = TextStream(KINDS[kind]), ""
    for id in KINDS[kind].encode(text):
        shown += stream.push(id)
        assert text.startswith(shown)
    assert shown == text
    assert stream.finish() == ""


def test_a_character_appears_with_its_last_byte() -> None:
    stream = TextStream(KINDS["bytes"])
    assert [stream.push(id) for id in "é😀".encode()] == ["", "é", "", "", "", "😀"]


def test_an_unfinished_character_is_one_replacement_at_the_end() -> None:
    stream = TextStream(KINDS["bytes"])
    assert [stream.push(id) for id in "a😀".encode()[:-1]] == ["a", "", "", ""]
    assert stream.finish() == "\ufffd"
    assert stream.finish() == ""


@pytest.mark.parametrize("kind", TRAINED)
@given(data=st.data())
@settings(max_examples=40, deadline=None)
def test_a_prompt_and_what_follows_it_join_to_the_text_of_both(kind: str, data: st.DataObject) -> None:
    tokenizer = TRAINED[kind]
    words = data.draw(st.lists(st.sampled_from(["to", "be", "not", "question", "aaaa"]), min_size=2, max_size=6))
    text = " ".join(words)
    ids = tokenizer.encode(text)
    cut = data.draw(st.integers(0, len(ids)))
    stream = TextStream(tokenizer, after=ids[:cut])
    new = "".join([*map(stream.push, ids[cut:]), stream.finish()])
    assert tokenizer.decode(ids[:cut]) + new == text


@pytest.mark.parametrize("kind", ["word-bpe", "wordpiece", "unigram"])
def test_the_space_after_a_prompt_belongs_to_what_follows(kind: str) -> None:
    tokenizer = TRAINED[kind]
    prompt, ids = tokenizer.encode("to be"), tokenizer.encode("not to")
    stream = TextStream(tokenizer, after=prompt)
    assert "".join([*map(stream.push, ids), stream.finish()]) == " not to"
    assert _streamed(kind, ids, skip=False) == "not to"


def test_words_with_an_end_appear_before_their_space() -> None:
    tokenizer = TRAINED["word-bpe"]
    stream, shown = TextStream(tokenizer), ""
    for id in tokenizer.encode(CORPUS[0]):
        shown += stream.push(id)
        assert not shown.endswith(" ")
        assert " ".join(CORPUS[0].split()).startswith(shown)
    assert shown + stream.finish() == " ".join(CORPUS[0].split())


def _streamed(kind: str, ids: list[int], skip: bool) -> str:
    stream = TextStream(KINDS[kind], skip_specials=skip)
    return "".join([*map(stream.push, ids), stream.finish()])
