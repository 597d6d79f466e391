"""Files of tokenizers: what is missing, broken, foreign or mutated is refused in a sentence."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.text.trained import TRAINED
from trivium.errors import DataError
from trivium.text.library import END, UNKNOWN, byte_alphabet, with_end
from trivium.text.tokenizer import LibraryTokenizer, open_tokenizer

trained_kind = pytest.mark.parametrize("kind", TRAINED)


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
    return with_end(inner)  # without BERT's pre-split


def _without_unknown(kind: str) -> tokenizers.Tokenizer:
    file = json.loads(TRAINED[kind].serialise())
    file["model"]["vocab"]["something"] = file["model"]["vocab"].pop("[UNK]" if kind == "wordpiece" else UNKNOWN)
    return tokenizers.Tokenizer.from_str(json.dumps(file))


def _without_end() -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer(tokenizers.models.BPE({"a": 0}, []))


def _without_bytes() -> tokenizers.Tokenizer:
    inner = tokenizers.Tokenizer(tokenizers.models.BPE({"a": 0}, []))
    inner.decoder = tokenizers.decoders.ByteLevel()
    return with_end(inner)


def _with_holes() -> tokenizers.Tokenizer:
    return with_end(tokenizers.Tokenizer(tokenizers.models.BPE({"a": 0, "b": 7}, [])))


def _with_forged_end() -> tokenizers.Tokenizer:
    # `ignore_merges` looks a whole word up before merging: without a pre-split the spelling is such a word.
    pieces = [*byte_alphabet(), END]
    model = tokenizers.models.BPE({piece: id for id, piece in enumerate(pieces)}, [], ignore_merges=True)
    inner = tokenizers.Tokenizer(model)
    inner.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = tokenizers.decoders.ByteLevel()
    return with_end(inner)


def _changed(kind: str, **settings: Any) -> tokenizers.Tokenizer:
    file = json.loads(TRAINED[kind].serialise())
    file["model"] |= settings
    return tokenizers.Tokenizer.from_str(json.dumps(file))


FOREIGN: dict[str, Callable[[], tokenizers.Tokenizer]] = {
    "WordPiece model": _wordpiece,
    "Unigram model": lambda: _changed("unigram", unk_id=None),
    "BPE model": lambda: _changed("word-bpe", end_of_word_suffix="</w>"),
    "no special token": _without_end,
    "255 of the 256 bytes": _without_bytes,
    "without holes": _with_holes,
    "for the token itself": _with_forged_end,
    r"no piece \[UNK\] for": lambda: _without_unknown("wordpiece"),
    r"no piece <\|unk\|> for": lambda: _without_unknown("word-bpe"),
}


@pytest.mark.parametrize("reason", FOREIGN)
def test_a_foreign_file_is_refused_with_the_reason(reason: str, tmp_path: Path) -> None:
    FOREIGN[reason]().save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(DataError, match=f"tokenizer.json cannot be used: .*{reason}.*; name a"):
        open_tokenizer(tmp_path)


def test_a_file_that_the_library_stumbles_over_is_refused_in_a_sentence(tmp_path: Path) -> None:
    file = json.loads(TRAINED["word-bpe"].serialise())
    file["model"]["continuing_subword_prefix"] = "longer than any piece"
    (tmp_path / "tokenizer.json").write_text(json.dumps(file))
    with pytest.raises(DataError, match=r"is not a tokenizer.json"):
        open_tokenizer(tmp_path)


@trained_kind
@given(data=st.data())
@settings(max_examples=40, deadline=None)
def test_a_mutated_file_opens_or_is_refused_in_a_sentence(
    kind: str, data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    content = bytearray(TRAINED[kind].serialise().encode())
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
    inner = tokenizers.Tokenizer.from_str(TRAINED["bpe"].serialise())
    inner.enable_truncation(2)
    inner.enable_padding(length=50)
    tokenizer = LibraryTokenizer(inner)
    assert tokenizer.encode("To be, or not to be") == TRAINED["bpe"].encode("To be, or not to be")
    assert tokenizer.digest == TRAINED["bpe"].digest
