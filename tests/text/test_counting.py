"""Counting words by distinct runs gives what the normaliser and the pre-split give on whole texts."""

from __future__ import annotations

from collections import Counter

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from trivium.text.counting import count_presplit
from trivium.text.kinds import WHITE_SPACE
from trivium.text.library import library_unigram, library_wordpiece

# every sort of white space, characters that normalisers drop, split, join to their neighbours or turn into spaces
SORTS = (
    "ab1',.  \n\r\t\f\x0b\x00\x1c\x85\xa0\u2028\u3000\u200b\u2581\xa8\u0308\u0301éÅİΣß世\u1112\u1161\u11ab\U0001f600"
)
texts_of = st.lists(st.text(st.sampled_from(SORTS), max_size=30) | st.text(max_size=20), max_size=4)


@pytest.mark.parametrize(
    ("inner", "white"),
    [
        (library_wordpiece([], "lower", 100), WHITE_SPACE),
        (library_wordpiece([], "keep", 100), WHITE_SPACE),
        (library_unigram([], "nfkc", "none"), WHITE_SPACE),
        (library_unigram([], "identity", "none"), " "),
    ],
    ids=["wordpiece lower", "wordpiece keep", "unigram nfkc", "unigram identity"],
)
@given(texts=texts_of)
@settings(max_examples=250, deadline=None)
def test_words_are_counted_as_on_whole_texts(inner: tokenizers.Tokenizer, white: str, texts: list[str]) -> None:
    expected = Counter[str]()
    for text in texts:
        split = inner.pre_tokenizer.pre_tokenize_str(inner.normalizer.normalize_str(text))
        expected.update(word for word, _ in split)
    assert count_presplit(texts, inner, white) == expected
