"""An encoder-decoder writes from its source: the decoding loop and the text around it, against a slow plain loop."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.generation import tiny
from trivium.errors import RequestError
from trivium.generation.beam import Beam
from trivium.generation.engine import Request, Token, stream
from trivium.generation.sampling import Sampling, Uniforms, distribution, draw
from trivium.generation.scorer import Scorer
from trivium.generation.text import complete, stream_text
from trivium.generation.translation import search_texts
from trivium.models.transformer import Transformer

GREEDY = Sampling(temperature=0)
LIVELY = Sampling(temperature=1.3, top_k=60, repetition_penalty=1.2)
TOKENIZER = tiny.DENOISING
PAD = TOKENIZER.specials["<pad>"]
MODEL = tiny.model("t5-mini", TOKENIZER, spread=0.5)
SECOND = tiny.model("t5-mini", TOKENIZER, spread=0.5, seed=2)
VASWANI = tiny.model("transformer-base", TOKENIZER, spread=0.3)


def request(source: Sequence[int], tokens: int = 10, sampling: Sampling = GREEDY, seed: int = 0) -> Request:
    return Request(ids=(PAD,), source=tuple(source), tokens=tokens, sampling=sampling, seed=seed)


def decode(model: Transformer | Scorer, requests: Sequence[Request], **options: Any) -> list[list[int]]:
    rows: list[list[int]] = [[] for _ in requests]
    for token in stream(model, requests, banned=(PAD,), **{"end": None, **options}):
        rows[token.row].append(token.id)
    return rows


@torch.no_grad()
def plainly(models: Sequence[Transformer], wish: Request) -> list[int]:
    """The same tokens the slow way: no cache, no batch, no padding; the mean of all models' probabilities."""
    ids, uniforms = list(wish.ids), Uniforms(wish.seed, wish.sample)
    for _ in range(wish.tokens):
        source = torch.tensor([wish.source])
        each = [model.head.logits(model(torch.tensor([ids]), source=source).hidden[:, -1]) for model in models]
        logits = each[0] if len(each) == 1 else torch.stack([one.softmax(-1) for one in each]).mean(0).log()
        logits[:, PAD] = -torch.inf
        seen = torch.zeros(1, logits.shape[1], dtype=torch.bool)
        seen[0, ids] = True
        probabilities = distribution(logits, seen, wish.sampling)
        if wish.sampling.greedy:
            ids.append(int(probabilities.argmax()))
        else:
            ids.append(int(draw(probabilities, torch.tensor([uniforms.next()], dtype=torch.float64))))
    return ids[1:]


@pytest.mark.parametrize("model", [MODEL, VASWANI], ids=["buckets", "sinusoids"])
@settings(max_examples=12, deadline=None, derandomize=True)
@given(
    shapes=st.lists(
        st.tuples(st.integers(1, 40), st.integers(1, 12), st.sampled_from([GREEDY, LIVELY])), min_size=1, max_size=5
    ),
    seed=st.integers(0, 1000),
)
def test_a_batch_of_unequal_sources_gives_what_each_gives_alone_and_uncached(
    model: Transformer, shapes: list[tuple[int, int, Sampling]], seed: int
) -> None:
    wishes = [
        request(tiny.draw(seed + row, length, 256), tokens, sampling, seed)
        for row, (length, tokens, sampling) in enumerate(shapes)
    ]
    assert decode(model, wishes) == [plainly([model], wish) for wish in wishes]


def test_the_plain_loop_says_something_and_the_source_matters() -> None:
    texts = [plainly([MODEL], request(tiny.draw(seed, 9, 256), 8)) for seed in range(4)]
    assert len({tuple(text) for text in texts}) == 4
    assert len({id for text in texts for id in text}) > 6


def test_models_that_vote_draw_from_the_mean_of_their_probabilities() -> None:
    wishes = [request(tiny.draw(seed, 3 + 2 * seed, 256), 8, LIVELY, seed) for seed in range(4)]
    assert decode(Scorer(MODEL, SECOND), wishes) == [plainly([MODEL, SECOND], wish) for wish in wishes]
    assert decode(Scorer(MODEL, SECOND), wishes) != decode(MODEL, wishes)


def test_a_banned_id_is_never_written_and_logprobs_stay_those_of_the_model() -> None:
    wish = replace(request(tiny.draw(1, 9, 256), 12), logprobs=1)
    free = list(stream(MODEL, [wish], end=None))
    banned = {free[0].id, free[3].id}
    held = list(stream(MODEL, [wish], end=None, banned=banned))
    assert banned.isdisjoint(token.id for token in held)
    ((id, logprob),) = held[0].alternatives
    assert id == free[0].id
    assert logprob == pytest.approx(free[0].logprob, abs=1e-5)


def test_a_row_ends_at_the_end_id_or_the_context() -> None:
    wish = request(tiny.draw(2, 9, 256), 200)
    (free,) = decode(MODEL, [wish])
    assert len(free) == 63  # 64 hold the first <pad> and the answer
    tokens: list[Token] = list(stream(MODEL, [wish], end=free[5], banned=(PAD,)))
    assert [token.id for token in tokens] == free[: free.index(free[5]) + 1]
    assert tokens[-1].reason == "end"


def test_a_source_is_refused_where_it_does_not_belong() -> None:
    with pytest.raises(RequestError, match="the source has 65 tokens, the model reads at most 64"):
        decode(MODEL, [request(tiny.draw(0, 65, 256))])
    with pytest.raises(RequestError, match="writes from a source text"):
        decode(MODEL, [request(())])
    decoder = tiny.model("gpt-mini", TOKENIZER)
    with pytest.raises(RequestError, match="a decoder continues a prompt, it has no source"):
        decode(decoder, [request((1, 2))])
    with pytest.raises(RequestError, match="ids outside the model's vocabulary of 260"):
        decode(MODEL, [request((1, 260))])


def test_text_is_written_from_a_text_that_ends_in_the_end_id() -> None:
    text = "ein Hund läuft"
    source = (*text.encode(), TOKENIZER.end)
    wish = request(source, 9, LIVELY, seed=4)
    (expected,) = decode(MODEL, [wish], end=TOKENIZER.end)
    ((found,),) = complete(MODEL, TOKENIZER, [text], tokens=9, sampling=LIVELY, seed=4)
    assert found.ids == [id for id in expected if id != TOKENIZER.end]
    assert found == TOKENIZER.decode(found.ids)
    pieces = stream_text(MODEL, TOKENIZER, text, tokens=9, sampling=LIVELY, seed=4)
    assert "".join(pieces) == found


def test_padding_is_never_written_but_sentinels_may_be() -> None:
    free = Sampling(temperature=50.0)  # all ids are about equally likely
    (samples,) = complete(MODEL, TOKENIZER, ["x"], tokens=40, sampling=free, seed=0, n=40)
    drawn = {id for sample in samples for id in sample.ids}
    assert PAD not in drawn
    assert TOKENIZER.specials["<extra_id_0>"] in drawn


def test_a_tokenizer_without_padding_cannot_begin() -> None:
    with pytest.raises(RequestError, match="no special token <pad>"):
        complete(MODEL, tiny.BYTES, ["x"], tokens=4, sampling=GREEDY, seed=0)


def test_translations_come_in_the_order_of_the_texts_whatever_the_batches() -> None:
    texts = ["a long text to begin with, the longest", "b", "", "some more", "été", "the sixth"]
    told: list[tuple[int, int]] = []
    beam = Beam(beams=3, n=2)
    small = search_texts(
        MODEL, TOKENIZER, texts, beam=beam, tokens=9, rows=6, tick=lambda done, of: told.append((done, of))
    )
    assert told == [(2, 6), (4, 6), (6, 6)]
    for text, found in zip(texts, small, strict=True):
        (alone,) = search_texts(MODEL, TOKENIZER, [text], beam=beam, tokens=9)
        assert found == alone
        assert [item.ids for item in found] == [item.ids for item in alone]
        assert found[0].score >= found[1].score
        assert found[0] == TOKENIZER.decode(found[0].ids)
        assert isinstance(found[0], str)


def test_a_translation_has_at_most_fifty_tokens_more_than_its_source() -> None:
    big = tiny.model("t5-mini", TOKENIZER, spread=0.5, context=128)
    ((found,),) = search_texts(big, TOKENIZER, ["abc"], beam=Beam(beams=2))
    assert (len(found.ids), found.reason) == (54, "length")  # the source has 3 and an END


def test_of_many_texts_the_one_that_is_too_long_is_named() -> None:
    with pytest.raises(RequestError, match="text 2: the source has 81 tokens, the model reads at most 64"):
        search_texts(MODEL, TOKENIZER, ["a", "b" * 80], beam=Beam())
