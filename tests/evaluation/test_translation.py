"""BLEU and chrF: the numbers of the spec, sacrebleu itself, and a model's own translations."""

from __future__ import annotations

import pytest
import sacrebleu

from tests.generation import tiny
from trivium.errors import RequestError
from trivium.evaluation.translation import quality, translate_and_score
from trivium.generation.beam import Beam
from trivium.generation.translation import search_texts

HYPOTHESES = ["The cat sat on the mat.", "Hello world"]
REFERENCES = [["The cat is on the mat."], ["Hello world"]]
VERSION = f"version:{sacrebleu.__version__}"


def test_the_worked_example_of_the_spec() -> None:
    found = quality(HYPOTHESES, REFERENCES)
    assert found["bleu"].score == pytest.approx(50.20, abs=0.005)
    assert found["bleu"].signature == f"nrefs:1|case:mixed|eff:no|tok:13a|smooth:exp|{VERSION}"
    assert found["bleu_lc"].signature == f"nrefs:1|case:lc|eff:no|tok:13a|smooth:exp|{VERSION}"


def test_lower_casing_is_only_in_the_score_that_says_so() -> None:
    found = quality([text.upper() for text in HYPOTHESES], REFERENCES)
    assert found["bleu"].score < 10
    assert found["bleu_lc"].score == pytest.approx(quality(HYPOTHESES, REFERENCES)["bleu_lc"].score)


def test_the_scores_are_those_of_sacrebleu_itself() -> None:
    found = quality(HYPOTHESES, REFERENCES)
    streams = [["The cat is on the mat.", "Hello world"]]
    assert found["chrf"].score == pytest.approx(sacrebleu.corpus_chrf(HYPOTHESES, streams).score)
    assert found["bleu"].score == pytest.approx(sacrebleu.corpus_bleu(HYPOTHESES, streams).score)


def test_a_second_reference_helps_where_it_is_there() -> None:
    found = quality(HYPOTHESES, [["The cat is on the mat.", "The cat sat on the mat."], ["Hello world"]])
    assert found["bleu"].score == pytest.approx(100.0)
    assert "nrefs:var" in found["bleu"].signature


def test_texts_without_references_are_refused() -> None:
    for references in ([["one"]], [["one"], []]):
        with pytest.raises(RequestError, match="do not fit"):
            quality(HYPOTHESES, references)
    with pytest.raises(RequestError, match="do not fit"):
        quality([], [])


def test_a_model_is_scored_by_its_best_translations() -> None:
    model, beam = tiny.model("t5-mini", tiny.DENOISING, spread=0.5), Beam(beams=2)
    sources = ["ein Hund", "zwei Katzen", "ein Baum"]
    best = [str(found[0]) for found in search_texts(model, tiny.DENOISING, sources, beam=beam)]
    own = [[" ".join(text.split())] for text in best]
    found = translate_and_score(model, tiny.DENOISING, sources, own, beam=beam)
    assert [[text] for text in found.texts] == own
    assert found.quality["chrf"].score == pytest.approx(100.0)
    with pytest.raises(RequestError, match="cannot translate"):
        translate_and_score(tiny.model("gpt-mini", tiny.BYTES), tiny.BYTES, sources, own, beam=beam)
