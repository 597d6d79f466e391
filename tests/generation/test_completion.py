"""Text in, text out: stop strings, whole characters, samples; streamed text is the completed text."""

from __future__ import annotations

import codecs
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import cast

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trivium.errors import RequestError
from trivium.generation.engine import Token
from trivium.generation.sampling import Sampling
from trivium.generation.text import Completion, Transcript, complete, stream_text
from trivium.models.config import ModelConfig, Stack
from trivium.models.options import Block
from trivium.models.transformer import Transformer, build
from trivium.parts.options.embeddings import TokenEmbeddingOptions
from trivium.parts.options.positions import RotaryOptions
from trivium.text.kinds import Bpe, Bytes, Chars, EndOfWordBpe, Unigram, WordPiece
from trivium.text.pieces import Joint
from trivium.text.tokenizer import Tokenizer

GREEDY = Sampling(temperature=0)
LIVELY = Sampling(top_p=0.95)
CORPUS = "the cat sat on the mat, the hat that the cat sat on; où été, ça va — " * 20


TOKENIZERS: dict[str, Tokenizer] = {
    "chars": Chars().build([CORPUS]),
    "bytes": Bytes().build([]),
    "bpe": Bpe(size=300).build([CORPUS]),
}


def small(vocab: int) -> Transformer:
    config = ModelConfig(
        width=32,
        context=48,
        vocab=vocab,
        embedding=TokenEmbeddingOptions(tie="none"),
        decoder=Stack(layers=2, block=Block(position=RotaryOptions())),
    )
    model = build(config, seed=1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4)
    return model.eval()


MODELS = {name: small(tokenizer.size) for name, tokenizer in TOKENIZERS.items()}


def one(name: str, prompt: str, *, seed: int = 0, tokens: int = 30, stop: Sequence[str] = ()) -> Completion:
    ((result,),) = complete(
        MODELS[name], TOKENIZERS[name], [prompt], tokens=tokens, sampling=LIVELY, seed=seed, stop=stop
    )
    return result


class Chunks:
    """A tokenizer whose ids stand for any bytes: characters and stop strings lie across its borders."""

    def __init__(self, chunks: Sequence[bytes]) -> None:
        self.chunks = chunks
        self.specials: Mapping[str, int] = {}
        self.joint = Joint()

    def piece_bytes(self, id: int) -> bytes:
        return self.chunks[id]


@st.composite
def cut_texts(draw: st.DrawFn) -> tuple[str, list[bytes], list[str]]:
    """A text, its bytes cut anywhere, and stop strings that have a chance to be in it."""
    text = draw(st.text("abcé☃", min_size=1, max_size=25))
    raw = text.encode()
    borders = sorted(draw(st.sets(st.integers(1, len(raw)), max_size=15)) | {0, len(raw)})
    chunks = [raw[first:last] for first, last in pairwise(borders)]
    return text, chunks, draw(st.lists(st.text("abcé☃", min_size=1, max_size=4), max_size=3))


def plain_cut(text: str, stop: Sequence[str]) -> int | None:
    """Character by character: the first place where a stop string is complete, before the longest that is."""
    for last in range(1, len(text) + 1):
        sizes = [len(word) for word in stop if text[:last].endswith(word)]
        if sizes:
            return last - max(sizes)
    return None


@settings(max_examples=200, deadline=None)
@given(cut_texts())
def test_text_ends_before_the_stop_string_wherever_the_tokens_are_cut(case: tuple[str, list[bytes], list[str]]) -> None:
    text, chunks, stop = case
    transcript = Transcript(cast(Tokenizer, Chunks(chunks)), stop)
    cut = plain_cut(text, stop)
    sent, whole = "", codecs.getincrementaldecoder("utf-8")()
    so_far, before = "", []
    for id in range(len(chunks)):
        before.append(len(so_far))
        so_far += whole.decode(chunks[id])
        sent += transcript.push(Token(0, id, -1.0, (), "length" if id == len(chunks) - 1 else ""))
        if transcript.reason:
            break
        held = max(
            (k for k in range(len(so_far) + 1) if any(w.startswith(so_far[len(so_far) - k :]) for w in stop)), default=0
        )
        assert sent == so_far[: len(so_far) - held]  # all that is certain, and nothing else
    result = transcript.completion("", logprobs=False)
    assert result == sent == text[:cut]
    assert result.reason == ("length" if cut is None else "stop")
    assert result.ids == [id for id, start in enumerate(before) if cut is None or start < cut]
    assert result.tokens == len(before)


def test_a_stop_string_across_token_borders_is_found() -> None:
    transcript = Transcript(cast(Tokenizer, Chunks([b"one E", b"N", b"D two"])), ["END"])
    pieces = [transcript.push(Token(0, id, 0.0, (), "")) for id in range(3)]
    assert pieces == ["one ", "", ""]
    result = transcript.completion("p", logprobs=True)
    assert (result, result.ids, result.reason, result.logprobs) == ("one ", [0], "stop", [0.0])


def test_the_end_token_is_not_text_and_releases_what_was_held() -> None:
    transcript = Transcript(cast(Tokenizer, Chunks([b"a E", b"\xc3", b"never"])), ["END"])
    assert transcript.push(Token(0, 0, 0.0, (), "")) == "a "
    assert transcript.push(Token(0, 1, 0.0, (), "")) == ""
    assert transcript.push(Token(0, 2, 0.0, (), "end")) == "E�"
    result = transcript.completion("", logprobs=False)
    assert (result, result.ids, result.reason, result.tokens) == ("a E�", [0, 1], "end", 3)


@pytest.mark.parametrize("name", TOKENIZERS)
def test_a_stop_string_cuts_the_text_that_would_have_come(name: str) -> None:
    whole = (one(name, "the cat", seed=seed) for seed in range(14))
    longer = [(seed, text) for seed, text in enumerate(whole) if len(text) > 12]  # some are ended by chance
    assert len(longer) > 3
    for seed, free in longer:
        stop = free[9:12]
        cut = one(name, "the cat", seed=seed, stop=["never there", stop])
        assert cut == free[: free.index(stop)]
        assert cut.reason == "stop"
        assert cut.ids == free.ids[: len(cut.ids)]
        assert cut.tokens < free.tokens
        assert TOKENIZERS[name].decode(cut.ids).startswith(cut)


@pytest.mark.parametrize("name", TOKENIZERS)
def test_the_text_is_what_the_tokenizer_makes_of_the_ids(name: str) -> None:
    result = one(name, "the", tokens=40)
    assert result == TOKENIZERS[name].decode(result.ids)
    assert result.prompt == "the"
    assert result.logprobs is None
    assert result.alternatives is None
    assert isinstance(result, str)


@pytest.mark.parametrize("name", TOKENIZERS)
@pytest.mark.parametrize("stop", [(), ("t", "qz"), ("th", "e")], ids=str)
def test_streamed_text_is_the_completed_text(name: str, stop: tuple[str, ...]) -> None:
    for seed in range(5):
        whole = one(name, "on the", seed=seed, stop=stop)
        pieces = []
        stream = stream_text(MODELS[name], TOKENIZERS[name], "on the", tokens=30, sampling=LIVELY, seed=seed, stop=stop)
        while True:
            try:
                pieces.append(next(stream))
            except StopIteration as done:
                result: Completion = done.value
                break
        assert "".join(pieces) == whole == result
        assert all(pieces)
        assert (result.ids, result.reason, result.tokens) == (whole.ids, whole.reason, whole.tokens)


def test_samples_of_many_prompts_are_those_of_each_prompt_alone() -> None:
    model, tokenizer = MODELS["bpe"], TOKENIZERS["bpe"]
    prompts = ["the cat", "", "a", "the hat that sat on", "été"]
    together = complete(model, tokenizer, prompts, tokens=12, sampling=LIVELY, seed=3, n=3, logprobs=2, rows=4)
    assert [[sample.prompt for sample in samples] for samples in together] == [[prompt] * 3 for prompt in prompts]
    for prompt, samples in zip(prompts, together, strict=True):
        (alone,) = complete(model, tokenizer, [prompt], tokens=12, sampling=LIVELY, seed=3, n=3, logprobs=2)
        assert [sample.ids for sample in samples] == [sample.ids for sample in alone]
        assert samples == alone
        assert len({tuple(sample.ids) for sample in samples}) == 3
        for sample in samples:
            assert sample.logprobs is not None
            assert sample.alternatives is not None
            assert len(sample.logprobs) == len(sample.ids) == len(sample.alternatives)
            assert all(len(others) == 2 for others in sample.alternatives)


def test_greedy_text_does_not_depend_on_the_seed() -> None:
    model, tokenizer = MODELS["chars"], TOKENIZERS["chars"]
    texts = [complete(model, tokenizer, ["the"], tokens=9, sampling=GREEDY, seed=seed)[0][0] for seed in range(3)]
    assert texts[0] == texts[1] == texts[2]
    assert len(texts[0].ids) == 9


def test_text_stops_at_the_context_unless_it_may_slide() -> None:
    model, tokenizer = MODELS["bytes"], TOKENIZERS["bytes"]
    free = Sampling(temperature=0)
    ((short,),) = complete(model, tokenizer, ["x" * 40], tokens=100, sampling=free, seed=0)
    assert (short.reason, len(short.ids)) == ("context", 8)
    ((long,),) = complete(model, tokenizer, ["x" * 400], tokens=100, sampling=free, seed=0, slide=True)
    assert (long.reason, len(long.ids)) == ("length", 100)


def test_a_model_with_more_ids_than_its_tokenizer_writes_only_text() -> None:
    tokenizer = TOKENIZERS["chars"]
    (samples,) = complete(small(500), tokenizer, ["the"], tokens=40, sampling=Sampling(temperature=3.0), seed=0, n=8)
    assert sum(len(sample.ids) for sample in samples) > 30
    assert max(id for sample in samples for id in sample.ids) < tokenizer.size


def test_a_stream_that_is_closed_early_leaves_no_state() -> None:
    model = MODELS["chars"].train()
    stream = stream_text(model, TOKENIZERS["chars"], "the", tokens=30, sampling=LIVELY, seed=0)
    next(stream)
    assert not model.training
    stream.close()
    assert all(module.training for module in model.modules())
    model.eval()


def test_a_bad_request_is_refused_when_it_is_made() -> None:
    model, tokenizer = MODELS["chars"], TOKENIZERS["chars"]
    with pytest.raises(RequestError, match="the prompt has 48 tokens, the model's context holds 48"):
        stream_text(model, tokenizer, "t" * 48, tokens=1, sampling=GREEDY, seed=0)
    with pytest.raises(RequestError, match='stop: ""'):
        stream_text(model, tokenizer, "t", tokens=1, sampling=GREEDY, seed=0, stop=["a", ""])
    with pytest.raises(RequestError, match="stop: 'the' is one string"):
        complete(model, tokenizer, ["t"], tokens=1, sampling=GREEDY, seed=0, stop="the")
    with pytest.raises(RequestError, match="n: 0"):
        complete(model, tokenizer, ["t"], tokens=1, sampling=GREEDY, seed=0, n=0)
    with pytest.raises(RequestError, match="tokens: 0"):
        complete(model, tokenizer, ["t"], tokens=0, sampling=GREEDY, seed=0)


WORDS = {
    "word-bpe": EndOfWordBpe(size=60).build([CORPUS]),
    "wordpiece": WordPiece(size=60).build([CORPUS]),
    "unigram": Unigram(size=60).build([CORPUS]),
}


@pytest.mark.parametrize("name", WORDS)
def test_a_prompt_and_its_continuation_join_to_the_text_of_all_ids(name: str) -> None:
    """The space between two words belongs to either one: `decode` of the new ids alone would lose it."""
    tokenizer = WORDS[name]
    any_id = Sampling(temperature=50.0)
    told, begun = complete(small(tokenizer.size), tokenizer, ["the cat", ""], tokens=6, sampling=any_id, seed=0, n=40)
    for found in told:
        whole = tokenizer.decode([*tokenizer.encode("the cat"), *found.ids])
        assert ("the cat" + found).rstrip(" ") == whole.rstrip(" ")
    assert any(found.startswith(" ") for found in told)
    for found in begun:
        assert found.rstrip(" ") == tokenizer.decode(found.ids).rstrip(" ")
