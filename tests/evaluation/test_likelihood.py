"""Likelihood against the spec's numbers and a plain loop with one window per token."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trivium.errors import RequestError
from trivium.evaluation.likelihood import Score, score_ids, score_many, score_text, score_texts, windows
from trivium.models.config import ModelConfig, NoStack, Stack
from trivium.models.options import Block
from trivium.models.transformer import Transformer, build
from trivium.parts.options.positions import LearnedOptions, Position, RotaryOptions
from trivium.text.kinds import Bytes

END = 256


def small(position: Position) -> Transformer:
    block = Block(position=position, dropout=0.2)
    config = ModelConfig(width=16, context=8, vocab=257, decoder=Stack(layers=2, block=block))
    model = build(config, seed=2)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4)
    return model


MODELS = {"learned": small(LearnedOptions()), "rotary": small(RotaryOptions())}


def random_ids(length: int) -> list[int]:
    return torch.randint(256, (length,), generator=torch.Generator().manual_seed(length)).tolist()


@torch.no_grad()
def plainly(model: Transformer, ids: list[int], stride: int) -> torch.Tensor:
    """Each token in a window of its own, which begins where the strided window that counts it begins."""
    context = model.config.context
    inputs = [END, *ids[:-1]]
    model.eval()
    result = []
    for at, label in enumerate(ids):
        # the earliest multiple of the stride from where the token is still inside the window
        first = max(0, -(-(at - context + 1) // stride) * stride)
        hidden = model(torch.tensor([inputs[first : at + 1]])).hidden[:, -1]
        result.append(-model.head.logits(hidden).log_softmax(-1)[0, label])
    model.train()
    return torch.stack(result)


def test_the_worked_numbers_of_the_spec() -> None:
    score = Score(nll=3000.0, tokens=1000, bytes=4500, words=800)
    assert score.bits_per_byte == pytest.approx(0.961797, abs=5e-7)
    assert score.word_perplexity == pytest.approx(42.521082, abs=5e-7)
    assert score.bits_per_byte == pytest.approx(math.log2(score.perplexity) * 1000 / 4500)
    slide = Score(nll=-sum(map(math.log, (1 / 4, 1 / 3, 1 / 4, 1 / 3))), tokens=4, bytes=4, words=4)
    assert slide.nll / 4 == pytest.approx(1.242453, abs=5e-7)
    assert slide.perplexity == pytest.approx(3.464102, abs=5e-7) == pytest.approx(math.sqrt(12))


def test_bits_per_character_count_characters_and_not_bytes() -> None:
    score = Score(nll=8 * math.log(2), tokens=3, bytes=8, words=1, characters=4)
    assert score.bits_per_byte == pytest.approx(1.0)
    assert score.bits_per_character == pytest.approx(2.0)
    assert score.mean == pytest.approx(math.log(score.perplexity))


def test_a_score_without_units_is_not_a_number_and_a_hopeless_one_is_infinite() -> None:
    nothing = Score(nll=1.0, tokens=0, bytes=0, words=0)
    assert all(map(math.isnan, (nothing.perplexity, nothing.bits_per_byte, nothing.word_perplexity)))
    assert all(map(math.isnan, (nothing.bits_per_character, nothing.mean)))
    assert Score(nll=1e6, tokens=1, bytes=1, words=1).perplexity == math.inf


@settings(max_examples=300, deadline=None)
@given(st.data(), st.integers(0, 300), st.integers(1, 40))
def test_every_token_is_counted_exactly_once_for_every_stride(data: st.DataObject, length: int, context: int) -> None:
    stride = data.draw(st.integers(1, context))
    plan = list(windows(length, context, stride))
    assert [at for window in plan for at in range(window.counted, window.last)] == list(range(length))
    for number, (first, counted, last) in enumerate(plan):
        assert first <= counted < last <= first + context
        if number and last < length:
            assert last - counted == stride  # the last s positions; the first window counts all, the last what is left
    assert sum(last - counted for _, counted, last in plan) == length


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("stride", range(1, 9))
@pytest.mark.parametrize("length", [1, 7, 8, 9, 30])
def test_windows_give_what_a_plain_loop_over_tokens_gives(name: str, stride: int, length: int) -> None:
    ids = random_ids(length)
    nll = score_ids(MODELS[name], ids, end=END, stride=stride, batch=3)
    torch.testing.assert_close(nll, plainly(MODELS[name], ids, stride), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("length", [1, 5, 8])
def test_for_a_text_within_the_context_every_stride_is_the_single_pass(length: int) -> None:
    model, ids = MODELS["rotary"], random_ids(length)
    model.eval()
    with torch.no_grad():
        logits = model.head.logits(model(torch.tensor([[END, *ids[:-1]]])).hidden)[0]
    model.train()
    single = torch.nn.functional.cross_entropy(logits, torch.tensor(ids), reduction="none")
    for stride in range(9):
        torch.testing.assert_close(score_ids(model, ids, end=END, stride=stride), single, rtol=1e-5, atol=1e-5)


def test_no_stride_means_disjoint_windows_and_a_tensor_will_do() -> None:
    ids = random_ids(21)
    nll = score_ids(MODELS["learned"], ids, end=END)
    assert nll.equal(score_ids(MODELS["learned"], torch.tensor(ids), end=END, stride=8))
    assert nll.shape == (21,)
    torch.testing.assert_close(nll, score_ids(MODELS["learned"], ids, end=END, batch=1))
    assert score_ids(MODELS["learned"], [], end=END).shape == (0,)


@given(st.lists(st.integers(0, 25), max_size=5), st.integers(1, 8), st.integers(1, 4))
@settings(max_examples=30, deadline=None)
def test_several_texts_share_passes_and_score_as_each_by_itself(lengths: list[int], stride: int, batch: int) -> None:
    texts = [random_ids(length) for length in lengths]
    found = score_many(MODELS["rotary"], texts, end=END, stride=stride, batch=batch)
    assert [len(nll) for nll in found] == lengths
    for ids, nll in zip(texts, found, strict=True):
        torch.testing.assert_close(nll, score_ids(MODELS["rotary"], ids, end=END, stride=stride), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", ["<u2", "<u4", "<i8"])
def test_a_memory_mapped_text_scores_as_a_list(dtype: str, tmp_path: Path) -> None:
    ids = random_ids(50)
    np.array(ids, dtype).tofile(tmp_path / "ids.bin")
    mapped = np.memmap(tmp_path / "ids.bin", dtype, mode="r")
    assert score_ids(MODELS["rotary"], mapped, end=END, stride=5).equal(
        score_ids(MODELS["rotary"], ids, end=END, stride=5)
    )


def test_bfloat16_is_near_and_not_the_default() -> None:
    model, ids = MODELS["rotary"], random_ids(40)
    exact, rough = score_ids(model, ids, end=END), score_ids(model, ids, end=END, precision="bf16")
    assert exact.equal(score_ids(model, ids, end=END, precision="fp32"))
    assert not rough.equal(exact)
    assert float((rough - exact).abs().mean()) < 0.05 * float(exact.mean())
    assert rough.dtype == torch.float32


def test_progress_counts_windows_to_the_end() -> None:
    heard: list[tuple[int, int]] = []
    score_ids(MODELS["rotary"], random_ids(40), end=END, batch=2, tick=lambda *at: heard.append(at))
    assert heard == [(2, 5), (4, 5), (5, 5)]


def test_documents_are_scored_together_and_begin_each_anew() -> None:
    tokenizer, model, texts = Bytes().build([]), MODELS["rotary"], ["où est", "le café", ""]
    both = score_texts(model, tokenizer, texts)
    alone = [score_text(model, tokenizer, text) for text in texts[:2]]
    assert both.nll == pytest.approx(sum(score.nll for score in alone), rel=1e-6)
    units = ("tokens", "bytes", "words", "characters")
    assert [getattr(both, unit) for unit in units] == [sum(getattr(one, unit) for one in alone) for unit in units]
    assert both.characters == 13


def test_the_units_of_a_text_are_its_tokens_bytes_and_words() -> None:
    text = "où est  le café?\n"
    tokenizer, model = Bytes().build([]), MODELS["rotary"].train()
    score = score_text(model, tokenizer, text, stride=3)
    assert (score.tokens, score.bytes, score.words, score.stride) == (19, 19, 4, 3)
    assert score.nll == pytest.approx(float(plainly(model, list(text.encode()), 3).sum()), rel=1e-5)
    assert score_text(model, tokenizer, "short").stride == 0
    assert model.training


def test_what_cannot_be_scored_is_refused() -> None:
    model = MODELS["learned"]
    for stride in (-1, 9):
        with pytest.raises(RequestError, match=f"stride: {stride} is not between 1 and the context of 8"):
            score_ids(model, [1], end=END, stride=stride)
    with pytest.raises(RequestError, match="vocabulary of 257"):
        score_ids(model, [257], end=END)
    with pytest.raises(RequestError, match="no text"):
        score_text(model, Bytes().build([]), "")
    encoder = ModelConfig(width=8, context=8, vocab=5, encoder=Stack(layers=1), decoder=NoStack())
    with pytest.raises(RequestError, match="needs a decoder"):
        score_ids(build(encoder), [1], end=0)
