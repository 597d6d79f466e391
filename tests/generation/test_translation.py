"""Beam search over texts: several ids that end one, and the language that a translation is to be in."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path

import pytest
import torch

from tests.generation import tiny
from trivium.errors import RequestError
from trivium.generation.beam import Beam, Search, search
from trivium.generation.sampling import Sampling
from trivium.generation.scorer import Prompt, Scorer
from trivium.generation.text import complete, prompt_of
from trivium.generation.translation import search_texts
from trivium.text.published import read_tokenizer

LETTERS, ENDS, PAD, TOKENS = 3, frozenset({3, 4}), 5, 3
SMALL = {"decoder": tiny.model("gpt-mini", 6, context=24), "encoder-decoder": tiny.model("t5-mini", 6, context=24)}
MANY = tiny.BYTES.extended(["<pad>", ">>fra<<", ">>deu<<", *(f">>x{number}<<" for number in range(9))])
MODEL = tiny.model("t5-mini", MANY, spread=0.5)
BEAM = Beam(beams=3, n=2)


@torch.no_grad()
def every_text(family: str, prompt: Prompt, alpha: float) -> list[tuple[tuple[int, ...], float]]:
    """All texts of up to TOKENS letters, best first; those of fewer are ended by the likelier of the ENDS."""
    model, found = SMALL[family], []
    inputs = {"source": torch.tensor([prompt.source])} if prompt.source else {}
    for length in range(TOKENS + 1):
        for ids in product(range(LETTERS), repeat=length):
            hidden = model(torch.tensor([[*prompt.ids, *ids]]), **inputs).hidden[0, len(prompt.ids) - 1 :]
            steps = model.head.logits(hidden).log_softmax(-1)
            total = sum(float(steps[at, id]) for at, id in enumerate(ids))
            total += max(float(steps[-1, end]) for end in ENDS) if length < TOKENS else 0.0
            found.append((ids, total / ((5 + min(length + 1, TOKENS)) / 6) ** alpha))
    return sorted(found, key=lambda item: -item[1])


@pytest.mark.parametrize("alpha", [0.0, 0.6])
@pytest.mark.parametrize("family", SMALL)
def test_each_of_several_ids_ends_a_text_and_no_text_is_found_twice(family: str, alpha: float) -> None:
    for seed in range(3):
        ids = tiny.draw(seed, 4, LETTERS)
        prompt = Prompt(ids=ids) if family == "decoder" else Prompt(ids=(PAD,), source=ids)
        expected = every_text(family, prompt, alpha)
        beam = Beam(beams=5**TOKENS, alpha=alpha, n=len(expected))
        wish = Search(prompt=prompt, tokens=TOKENS)
        (found,) = search(SMALL[family], [wish], beam, end=3, stop_ids=ENDS, banned=(PAD,))
        assert [tuple(item.ids) for item in found] == [ids for ids, _ in expected]
        assert [item.score for item in found] == pytest.approx([score for _, score in expected], abs=1e-5)
        assert [item.reason for item in found] == ["end" if len(ids) < TOKENS else "length" for ids, _ in expected]


def test_as_many_beams_live_on_though_many_ids_end_a_text() -> None:
    """The likeliest 20 ids all end it at once: the empty text is found, and the rest goes on."""
    first = complete(MODEL, MANY, ["a dog"], tokens=1, sampling=Sampling(temperature=0), seed=0, logprobs=19)[0][0]
    assert first.alternatives
    stops = frozenset({*first.ids, *(id for id, _ in first.alternatives[0])})
    assert len(stops) == 20
    (found,) = search_texts(MODEL, MANY, ["a dog"], beam=Beam(beams=4, n=4), tokens=6, stop_ids=stops)
    assert len(found) == 4
    assert len({tuple(item.ids) for item in found}) == 4
    assert all(stops.isdisjoint(item.ids) for item in found)


def test_one_beam_is_greedy_however_many_ids_end_a_text() -> None:
    """With no length penalty greedy decoding is the oracle."""
    for seed in range(6):
        text = "".join(map(chr, tiny.draw(seed, 6, 90)))
        plain = complete(MODEL, MANY, [text], tokens=12, sampling=Sampling(temperature=0), seed=0)[0][0]
        stops = frozenset({*range(200, 256), *plain.ids[7:8]})
        greedy = complete(MODEL, MANY, [text], tokens=12, sampling=Sampling(temperature=0), seed=0, stop_ids=stops)
        ((found,),) = search_texts(MODEL, MANY, [text], beam=Beam(beams=1, alpha=0), tokens=12, stop_ids=stops)
        assert (found.ids, found.reason) == (greedy[0][0].ids, greedy[0][0].reason)


def test_a_language_is_one_special_id_in_front_of_every_source() -> None:
    texts = ["a dog", "two cats sleep"]
    for language in ("fra", "deu"):
        found = search_texts(MODEL, MANY, texts, beam=BEAM, tokens=8, language=language)
        code, pad = MANY.specials[f">>{language}<<"], MANY.specials["<pad>"]
        for text, best in zip(texts, found, strict=True):
            prompt = Prompt(ids=(pad,), source=(code, *text.encode(), MANY.end))
            (expected,) = search(MODEL, [Search(prompt=prompt, tokens=8)], BEAM, end=MANY.end, banned=(pad,))
            assert [item.ids for item in best] == [item.ids for item in expected]


def test_a_language_that_is_not_there_is_refused_with_some_that_are() -> None:
    with pytest.raises(RequestError, match=r"no special token >>ita<<; it has deu, fra, x0, x1, x2, \.\.\."):
        search_texts(MODEL, MANY, ["a"], beam=BEAM, language="ita")
    with pytest.raises(RequestError, match="no languages at all"):
        search_texts(tiny.model("t5-mini", tiny.DENOISING), tiny.DENOISING, ["a"], beam=BEAM, language="fra")
    with pytest.raises(RequestError, match="decoder family cannot translate"):
        search_texts(tiny.model("gpt-mini", MANY), MANY, ["a"], beam=BEAM, language="fra")


def test_a_language_spelled_out_in_a_text_is_refused_with_the_way_to_say_it() -> None:
    for text in (">>fra<< a dog", " >>fra<<a dog"):
        with pytest.raises(RequestError, match=r'language="fra" .*--language fra'):
            search_texts(MODEL, MANY, ["fine", text], beam=BEAM)
        with pytest.raises(RequestError, match='language="fra"'):
            complete(MODEL, MANY, [text], tokens=2, sampling=Sampling(), seed=0)
    for text in ("a dog >>fra<<", ">>ita<< a dog", ">> fra <<", ">><<"):
        assert search_texts(MODEL, MANY, [text], beam=BEAM, tokens=2)


@pytest.mark.filterwarnings("ignore:Recommended")  # sacremoses, which would only change quotes and dashes
def test_the_source_is_that_of_transformers(tmp_path: Path) -> None:
    """MarianTokenizer takes >>fra<< from the beginning of a text; the ids must be the same."""
    spm, transformers = pytest.importorskip("sentencepiece"), pytest.importorskip("transformers")
    (tmp_path / "text").write_text("The quick brown fox jumps over the lazy dog.\nA dog runs in the park.\n" * 20)
    settings = {"vocab_size": 60, "minloglevel": 2, "hard_vocab_limit": False}
    spm.SentencePieceTrainer.train(input=str(tmp_path / "text"), model_prefix=str(tmp_path / "source"), **settings)
    (tmp_path / "source.model").rename(tmp_path / "source.spm")
    (tmp_path / "target.spm").write_bytes((tmp_path / "source.spm").read_bytes())
    pieces = spm.SentencePieceProcessor(str(tmp_path / "source.spm"))
    names = [pieces.id_to_piece(id) for id in range(3, len(pieces))]
    names = ["</s>", "<unk>", *names, ">>fra<<", "<pad>"]
    (tmp_path / "vocab.json").write_text(json.dumps({name: id for id, name in enumerate(names)}))
    (tmp_path / "config.json").write_text(json.dumps({"decoder_start_token_id": len(names) - 1}))
    languages = {"source_lang": "en", "target_lang": "fr", "tokenizer_class": "MarianTokenizer"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(languages))
    theirs, ours = transformers.MarianTokenizer.from_pretrained(tmp_path), read_tokenizer(tmp_path)
    assert ours is not None
    scorer = Scorer(tiny.model("t5-mini", ours))
    for text in ("A dog runs.", "the lazy brown fox"):
        assert list(prompt_of(scorer, ours, text).source) == theirs(text).input_ids
        towards = prompt_of(scorer, ours, text, language="fra")
        assert list(towards.source) == theirs(f">>fra<< {text}").input_ids
        assert towards.ids == (len(names) - 1,)
