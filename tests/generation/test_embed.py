"""Vectors of texts and words against plain forward passes, and neighbours against all cosines written out."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.generation import tiny
from trivium.errors import RequestError
from trivium.generation.embed import embed, embed_word, neighbours, static_word, static_words
from trivium.models.transformer import Transformer
from trivium.text.kinds import Bpe

CLS, SEP = (tiny.MASKED.specials[name] for name in ("[CLS]", "[SEP]"))
ENCODER = tiny.model("bert-mini", tiny.MASKED, spread=0.5)
BARE = tiny.model("bert-mini", tiny.BARE, spread=0.5)
DECODER = tiny.model("gpt-mini", tiny.BYTES, spread=0.5)
BOTH = tiny.model("t5-mini", tiny.DENOISING, spread=0.5)


@torch.no_grad()
def states(model: Transformer, ids: list[int]) -> Tensor:
    tokens = torch.tensor([ids])
    found: Tensor = model.encode(tokens)[0] if model is BOTH else model(tokens).hidden[0]
    return found


TEXTS = st.lists(st.text("abc é", min_size=1, max_size=20), min_size=1, max_size=7)


@settings(max_examples=15, deadline=None, derandomize=True)
@given(texts=TEXTS)
def test_the_mean_is_over_the_real_tokens_and_the_order_is_that_of_the_texts(texts: list[str]) -> None:
    for model, tokenizer in ((ENCODER, tiny.MASKED), (BARE, tiny.BARE), (DECODER, tiny.BYTES), (BOTH, tiny.DENOISING)):
        found = embed(model, tokenizer, texts, batch=3)
        for text, vector in zip(texts, found, strict=True):
            ids = list(text.encode())
            ids = [CLS, *ids, SEP] if model is ENCODER else [*ids, tokenizer.end] if model is BOTH else ids
            torch.testing.assert_close(vector, states(model, ids).mean(0), atol=1e-4, rtol=1e-4)


def test_cls_is_the_first_state() -> None:
    texts = ["one", "twenty", "three hundred"]
    for text, vector in zip(texts, embed(ENCODER, tiny.MASKED, texts, pooling="cls"), strict=True):
        expected = states(ENCODER, [CLS, *text.encode(), SEP])[0]
        torch.testing.assert_close(vector, expected, atol=1e-4, rtol=1e-4)


def test_a_word_is_the_mean_of_its_pieces_where_it_stands() -> None:
    text = "by the bank of the river, a bank with money"
    ids = [CLS, *text.encode(), SEP]
    for occurrence, at in enumerate((text.index("bank"), text.rindex("bank"))):
        expected = states(ENCODER, ids)[1 + at : 1 + at + 4].mean(0)
        vector = embed_word(ENCODER, tiny.MASKED, text, "bank", occurrence=occurrence)
        torch.testing.assert_close(vector, expected, atol=1e-4, rtol=1e-4)


def test_the_pieces_of_a_word_are_found_by_its_characters() -> None:
    tokenizer = Bpe(size=280).build(["the river bank, the banker " * 20]).extended(["[CLS]", "[SEP]", "[MASK]"])
    model = tiny.model("bert-mini", tokenizer, spread=0.5)
    text = "the banker, the bank"
    pieces = [tokenizer.decode([id]) for id in tokenizer.encode(text)]
    last = max(at for at in range(len(pieces)) if "".join(pieces[:at]).rstrip() == "the banker, the")
    ids = [tokenizer.specials["[CLS]"], *tokenizer.encode(text), tokenizer.specials["[SEP]"]]
    expected = states(model, ids)[1 + last : -1].mean(0)
    torch.testing.assert_close(embed_word(model, tokenizer, text, "bank"), expected, atol=1e-4, rtol=1e-4)


def test_a_word_is_one_vector_before_the_first_layer_and_many_behind_the_last() -> None:
    first, second = "he sat by the bank of the river", "she has money in the bank"
    apart = embed_word(ENCODER, tiny.MASKED, first, "bank") - embed_word(ENCODER, tiny.MASKED, second, "bank")
    assert float(apart.norm()) > 0.1
    expected = ENCODER.embedding.weight[torch.tensor(list(b"bank"))].mean(0)
    torch.testing.assert_close(static_word(ENCODER, tiny.MASKED, "bank"), expected.detach())


def test_a_word_with_its_space_in_front_is_found_as_one_piece() -> None:
    tokenizer = Bpe(size=300).build(["a river bank " * 50])
    model = tiny.model("gpt-mini", tokenizer)
    (piece,) = tokenizer.encode(" river")
    torch.testing.assert_close(static_word(model, tokenizer, "river"), model.embedding.weight[piece].detach())


def test_static_words_are_every_piece_but_the_specials() -> None:
    names, vectors = static_words(ENCODER, tiny.MASKED)
    assert len(names) == len(vectors) == 256
    assert not set(names) & set(tiny.MASKED.specials)
    torch.testing.assert_close(vectors, ENCODER.embedding.weight[:256].detach())


@settings(max_examples=25, deadline=None, derandomize=True)
@given(queries=st.integers(1, 4), candidates=st.integers(1, 9), top=st.integers(1, 12), seed=st.integers(0, 999))
def test_neighbours_are_ranked_by_their_cosine(queries: int, candidates: int, top: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    asked, among = torch.randn(queries, 5, generator=generator), torch.randn(candidates, 5, generator=generator)
    names = [f"n{number}" for number in range(candidates)]
    for vector, found in zip(asked.tolist(), neighbours(asked, among, names, top=top), strict=True):
        cosines = [
            sum(a * b for a, b in zip(vector, other, strict=True)) / math.hypot(*vector) / math.hypot(*other)
            for other in among.tolist()
        ]
        order = sorted(range(candidates), key=lambda number: -cosines[number])[:top]
        assert [item.number for item in found] == order
        assert list(found) == [names[number] for number in order]
        assert [item.similarity for item in found] == pytest.approx([cosines[n] for n in order], abs=1e-5)


def test_bad_requests_are_refused_in_a_sentence() -> None:
    with pytest.raises(RequestError, match=r"does not read a \[CLS\]"):
        embed(BARE, tiny.BARE, ["x"], pooling="cls")
    with pytest.raises(RequestError, match="neither mean nor cls"):
        embed(BARE, tiny.BARE, ["x"], pooling="max")  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="text 2 is empty"):
        embed(BARE, tiny.BARE, ["x", ""])
    with pytest.raises(RequestError, match="the text has 82 tokens, the model reads at most 64"):
        embed(ENCODER, tiny.MASKED, ["x" * 80])
    with pytest.raises(RequestError, match="'bank' occurs once in"):
        embed_word(ENCODER, tiny.MASKED, "a bank, two banks", "bank", occurrence=1)
    with pytest.raises(RequestError, match="'ban' does not occur"):
        embed_word(ENCODER, tiny.MASKED, "a bank", "ban")
    with pytest.raises(RequestError, match="is no word"):
        static_word(ENCODER, tiny.MASKED, " ")
    with pytest.raises(RequestError, match="cannot be compared"):
        neighbours(torch.ones(1, 3), torch.ones(2, 4), ["a", "b"])
    with pytest.raises(RequestError, match="top: 0"):
        neighbours(torch.ones(1, 3), torch.ones(1, 3), ["a"], top=0)
    strange: list[Any] = [None, 5, "a", [[1.0]], torch.ones(3), torch.ones(1, 1, 3), torch.ones(1, 3).to_sparse()]
    for wrong in (*strange, torch.ones(1, 3).to(torch.complex64)):
        with pytest.raises(RequestError, match="vectors: give a tensor of numbers with a row for each"):
            neighbours(wrong, torch.ones(1, 3), ["a"])
        with pytest.raises(RequestError, match="candidates: give a tensor of numbers with a row for each"):
            neighbours(torch.ones(1, 3), wrong, ["a"])
    for names in (None, 5, [1]):
        with pytest.raises(RequestError, match=r"^names: "):
            neighbours(torch.ones(1, 3), torch.ones(1, 3), names)  # type: ignore[arg-type]
