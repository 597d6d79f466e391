"""Filling gaps: the model's own softmax at the masks, texts framed as in training, masks found by code alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.generation import tiny
from trivium.errors import RequestError
from trivium.generation.fill import fill, masked_ids
from trivium.models.transformer import Transformer
from trivium.text.kinds import Bpe, Bytes, Chars, EndOfWordBpe, WordPiece
from trivium.text.library import library_unigram
from trivium.text.tokenizer import LibraryTokenizer, Tokenizer

CORPUS = "a cat sat on a mat. a dog sat on a log, a tall dog! " * 30
SPECIALS = ["[PAD]", "[CLS]", "[SEP]", "[MASK]"]
KINDS: dict[str, Any] = {
    "bytes": Bytes(),
    "chars": Chars(),
    "bpe": Bpe(size=300),
    "word-bpe": EndOfWordBpe(size=60),
    "wordpiece": WordPiece(size=80),
}
TOKENIZERS: dict[str, Tokenizer] = {name: kind.build([CORPUS]).extended(SPECIALS) for name, kind in KINDS.items()}
# with whole words, which so small a text would not teach it
PIECES = [(f"▁{word}", -2.0) for word in CORPUS.replace(".", "").replace(",", "").replace("!", "").split()[:12]]
UNIGRAM = library_unigram([*dict.fromkeys(PIECES), *((c, -6.0) for c in "▁acdglmnost.,!")], "nfkc", "none")
TOKENIZERS["unigram"] = LibraryTokenizer(UNIGRAM).extended(SPECIALS)
FRAMED = tiny.model("bert-mini", tiny.MASKED, spread=0.5)
BARE = tiny.model("bert-mini", tiny.BARE, spread=0.5)


@torch.no_grad()
def plainly(model: Transformer, ids: list[int], at: int, specials: set[int]) -> list[tuple[int, float]]:
    """All ids but the specials with their probability at one place, best first."""
    probabilities = model.head.logits(model(torch.tensor([ids])).hidden[0, at]).softmax(-1).tolist()
    return sorted(((id, p) for id, p in enumerate(probabilities) if id not in specials), key=lambda item: -item[1])


@pytest.mark.parametrize("frame", [True, False])
def test_candidates_are_the_best_of_the_models_own_softmax(frame: bool) -> None:
    model, tokenizer = (FRAMED, tiny.MASKED) if frame else (BARE, tiny.BARE)
    mask = tokenizer.specials["[MASK]"]
    text = [*b"the ", mask, *b" sat on the ", mask, *b"."]
    ids = [tokenizer.specials["[CLS]"], *text, tokenizer.specials["[SEP]"]] if frame else text
    ((first, second),) = fill(model, tokenizer, ["the [MASK] sat on the [MASK]."], top=7)
    places = [at for at, id in enumerate(ids) if id == mask]
    for found, at in zip((first, second), places, strict=True):
        expected = plainly(model, ids, at, set(tokenizer.specials.values()))[:7]
        assert [item.id for item in found] == [id for id, _ in expected]
        assert [item.probability for item in found] == pytest.approx([p for _, p in expected], abs=1e-6)
        assert [len(tokenizer.decode([item.id])) for item in found] == [len(item) for item in found]
    assert [item.id for item in first] != [item.id for item in second]


def test_a_special_token_is_never_a_candidate() -> None:
    (((*found,),),) = fill(FRAMED, tiny.MASKED, ["the [MASK] sat"], top=1000)
    assert sorted(item.id for item in found) == list(range(256))
    assert sum(item.probability for item in found) < 1 - 1e-4  # what the specials would get is not handed out


@pytest.mark.parametrize("name", TOKENIZERS)
def test_the_unknown_token_is_no_filling(name: str) -> None:
    tokenizer = TOKENIZERS[name]
    model = tiny.model("bert-mini", tokenizer, spread=0.5)
    unknown = {id for id in range(tokenizer.size) if tokenizer.piece(id) in ("<|unk|>", "[UNK]")}
    assert len(unknown) == (name not in ("bytes", "bpe"))
    (((*found,),),) = fill(model, tokenizer, ["a [MASK] sat"], top=1000)
    others = set(range(tokenizer.size)) - unknown - set(tokenizer.specials.values())
    assert {item.id for item in found} == others


def test_a_model_with_more_ids_than_its_tokenizer_shares_its_probability_among_all() -> None:
    """A published encoder's matrix is often filled up to a round number."""
    model = tiny.model("bert-mini", tiny.MASKED.size + 40, spread=0.5)
    specials = set(tiny.MASKED.specials.values())
    ids = [tiny.MASKED.specials[name] for name in ("[CLS]", "[MASK]", "[SEP]")]
    expected = [item for item in plainly(model, ids, 1, specials) if item[0] < tiny.MASKED.size]
    (((*found,),),) = fill(model, tiny.MASKED, ["[MASK]"], top=1000)
    assert [item.id for item in found] == [id for id, _ in expected]
    assert [item.probability for item in found] == pytest.approx([p for _, p in expected], abs=1e-6)


def test_specials_beyond_the_models_ids_do_no_harm() -> None:
    wider = tiny.MASKED.extended(["<extra>"])
    (((*found,),),) = fill(tiny.model("bert-mini", tiny.MASKED), wider, ["[MASK]"], top=1000)
    assert sorted(item.id for item in found) == list(range(256))


@settings(max_examples=20, deadline=None, derandomize=True)
@given(texts=st.lists(st.lists(st.text("ab ", max_size=6), min_size=2, max_size=4), min_size=1, max_size=6))
def test_many_texts_give_what_each_gives_alone(texts: list[list[str]]) -> None:
    given = ["[MASK]".join(parts) for parts in texts]
    together = fill(FRAMED, tiny.MASKED, given, top=3, batch=3)
    assert [len(masks) for masks in together] == [len(parts) - 1 for parts in texts]
    for text, masks in zip(given, together, strict=True):
        (alone,) = fill(FRAMED, tiny.MASKED, [text], top=3)
        assert [[item.id for item in each] for each in masks] == [[item.id for item in each] for each in alone]
        for mine, other in zip(masks, alone, strict=True):
            assert [item.probability for item in mine] == pytest.approx([item.probability for item in other], abs=1e-5)


def test_special_spellings_in_the_text_stay_text() -> None:
    ids = masked_ids(tiny.MASKED, "[CLS] [MASK] [SEP][PAD]<|endoftext|>")
    specials = {id: spelling for spelling, id in tiny.MASKED.specials.items()}
    assert [specials[id] for id in ids if id in specials] == ["[MASK]"]
    assert tiny.MASKED.decode(ids) == "[CLS] [MASK] [SEP][PAD]<|endoftext|>"


@pytest.mark.parametrize("name", TOKENIZERS)
def test_a_masked_word_is_the_word_of_the_whole_text_masked(name: str) -> None:
    """The oracle is training: encode a whole text, put the mask where the word was."""
    tokenizer = TOKENIZERS[name]
    mask = tokenizer.specials["[MASK]"]
    word = "a"  # one piece of every kind, with its space where the kind has one
    for before, after in (("", " cat sat."), ("on ", " mat."), ("sat on ", ", a log!"), ("cat ", "")):
        text = before + word + after
        ids, spans = tokenizer.encode(text), tokenizer.spans(text)
        expected = [mask if first <= len(before) < last else id for id, (first, last) in zip(ids, spans, strict=True)]
        assert expected.count(mask) == 1
        assert masked_ids(tokenizer, f"{before}[MASK]{after}") == expected


@pytest.mark.parametrize("name", TOKENIZERS)
@settings(max_examples=30, deadline=None, derandomize=True)
@given(parts=st.lists(st.text("acdgt .,", max_size=8), min_size=2, max_size=4))
def test_every_mask_becomes_one_masked_piece_wherever_it_stands(name: str, parts: list[str]) -> None:
    tokenizer = TOKENIZERS[name]
    ids = masked_ids(tokenizer, "[MASK]".join(parts))
    assert ids.count(tokenizer.specials["[MASK]"]) == len(parts) - 1
    if name in ("bytes", "chars"):
        assert tokenizer.decode(ids) == "[MASK]".join(parts)


def test_a_candidate_fits_where_the_mask_stood() -> None:
    tokenizer = TOKENIZERS["bpe"]
    model = tiny.model("bert-mini", tokenizer, spread=0.5)
    (pieces,), (inner,) = fill(model, tokenizer, ["a [MASK] sat", "x[MASK]"], top=1000)
    assert {tokenizer.decode([item.id]) for item in pieces} >= {" cat", " dog"}
    assert {"cat", "dog"} <= set(pieces)  # the space is in the text already
    assert {" cat", " dog"} <= set(inner)


def test_bad_requests_are_refused_in_a_sentence() -> None:
    with pytest.raises(RequestError, match=r"the text has no \[MASK\] to fill"):
        fill(FRAMED, tiny.MASKED, ["nothing here"])
    with pytest.raises(RequestError, match=r"text 2 has no \[MASK\]"):
        fill(FRAMED, tiny.MASKED, ["[MASK]", "nothing here"])
    with pytest.raises(RequestError, match=r"the decoder family .* cannot fill a gap; load an encoder"):
        fill(tiny.model("gpt-mini", tiny.MASKED), tiny.MASKED, ["[MASK]"])
    with pytest.raises(RequestError, match=r"the encoder-decoder family .* cannot fill"):
        fill(tiny.model("t5-mini", tiny.MASKED), tiny.MASKED, ["[MASK]"])
    with pytest.raises(RequestError, match=r"the tokenizer has no special token \[MASK\]"):
        fill(tiny.model("bert-mini", tiny.BYTES), tiny.BYTES, ["[MASK]"])
    with pytest.raises(RequestError, match="the text has 73 tokens, the model reads at most 64"):
        fill(FRAMED, tiny.MASKED, ["[MASK]" + "x" * 70])  # and a frame of two
    with pytest.raises(RequestError, match="top: 0"):
        fill(FRAMED, tiny.MASKED, ["[MASK]"], top=0)
