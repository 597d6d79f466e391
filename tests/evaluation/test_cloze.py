"""The cloze probes against a plain loop over candidates and pieces."""

from __future__ import annotations

import pytest
import torch

from tests.generation import tiny
from trivium.errors import RequestError
from trivium.evaluation.cloze import BLANK, PROBES, Probe, try_probes
from trivium.evaluation.likelihood import score_text
from trivium.text.kinds import Words

SHORT = (
    Probe(kind="short", text="the ___ sat", answers=("cat", "dog"), distractors=("is", "tree")),
    Probe(kind="end", text="1, 2, ___", answers=("3",), distractors=("7",)),
)


def test_the_probes_are_those_of_the_slides() -> None:
    kinds = ["fact", "syntax", "coreference", "lexical field", "sentiment", "reasoning", "sequence"]
    assert [probe.kind for probe in PROBES] == kinds
    assert all(probe.text.count(BLANK) == 1 for probe in PROBES)
    assert all(len(set(probe.candidates)) == len(probe.answers) + len(probe.distractors) for probe in PROBES)
    text, first, last = PROBES[0].filled("Palo Alto")
    assert (text[first:last], text) == ("Palo Alto", "Stanford University is located in Palo Alto, California.")


def test_an_encoder_fills_piece_by_piece() -> None:
    model, tokenizer = tiny.model("bert-mini", tiny.MASKED, spread=0.5), tiny.MASKED
    specials = tokenizer.specials
    for probe, tried in zip(SHORT, try_probes(model, tokenizer, SHORT), strict=True):
        for candidate in probe.candidates:
            before, after = (list(part.encode()) for part in probe.text.split(BLANK))
            pieces, total = list(candidate.encode()), 0.0
            for known in range(len(pieces)):
                hidden = [specials["[MASK]"]] * (len(pieces) - known)
                row = [specials["[CLS]"], *before, *pieces[:known], *hidden, *after, specials["[SEP]"]]
                with torch.no_grad():
                    logits = model.head.logits(model(torch.tensor([row])).hidden)[0, 1 + len(before) + known]
                total += float(logits.log_softmax(-1)[pieces[known]])
            assert tried.scores[candidate] == pytest.approx(total, abs=1e-4)
            if candidate == "3":
                assert tried.place == 1 + sum(logits > logits[pieces[0]])
        assert tried.rank == 1 + sum(
            score > max(tried.scores[a] for a in probe.answers) for score in tried.scores.values()
        )
        assert (tried.rank == 1) == (tried.said in probe.answers)


def test_a_decoder_scores_the_answer_and_all_that_follows() -> None:
    model, tokenizer = tiny.model("gpt-mini", tiny.BYTES, spread=0.5), tiny.BYTES
    for probe, tried in zip(SHORT, try_probes(model, tokenizer, SHORT), strict=True):
        prefix = score_text(model, tokenizer, probe.text.split(BLANK)[0])
        for candidate in probe.candidates:
            whole = score_text(model, tokenizer, probe.text.replace(BLANK, candidate))
            assert tried.scores[candidate] == pytest.approx(prefix.nll - whole.nll, abs=1e-4)
        assert tried.place == 0


def test_a_candidate_that_has_no_piece_of_its_own_shares_one() -> None:
    tokenizer = Words().build(["the cat sat\n"]).extended(["[MASK]"])
    found = try_probes(tiny.model("bert-mini", tokenizer, spread=0.5), tokenizer, SHORT[:1])[0]
    assert found.scores["dog"] == pytest.approx(found.scores["tree"])  # both unknown
    assert found.scores["cat"] != pytest.approx(found.scores["dog"])


def test_who_cannot_be_asked_is_told_so() -> None:
    with pytest.raises(RequestError, match="encoder or a decoder"):
        try_probes(tiny.model("t5-mini", tiny.DENOISING), tiny.DENOISING, SHORT)
    with pytest.raises(RequestError, match=r"no special token \[MASK\]"):
        try_probes(tiny.model("bert-mini", tiny.BYTES), tiny.BYTES, SHORT)
    with pytest.raises(RequestError, match="the short probe has 12 tokens, the model reads at most 6"):
        try_probes(tiny.model("bert-mini", tiny.MASKED, context=8), tiny.MASKED, SHORT)
    with pytest.raises(RequestError, match="at most 8"):
        try_probes(tiny.model("gpt-mini", tiny.BYTES, context=8), tiny.BYTES, SHORT)
