"""`trivium eval`: scores on the screen, one JSON document, a results file, and sentences for what is wrong."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.conftest import Call
from tests.evaluation import corpora
from tests.generation import tiny
from trivium import api
from trivium.evaluation.likelihood import score_text
from trivium.records import results_of as results

GPT = tiny.model("gpt-mini", tiny.BYTES, spread=0.5)


@pytest.fixture
def call(invoke: Call, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Call:
    """Run a command in this process, beside a decoder, a translator and the corpora."""
    api.Model(GPT, tiny.BYTES, {"step": 9}).save(tmp_path / "gpt")
    api.Model(tiny.model("t5-mini", tiny.DENOISING, spread=0.5), tiny.DENOISING, {}).save(tmp_path / "t5")
    corpora.lay(tmp_path / "data")
    monkeypatch.chdir(tmp_path)
    return invoke


def test_a_score_is_printed_and_written_beside_the_model(call: Call) -> None:
    outcome = call("eval", "gpt", "books", "--data-dir", "data", "--stride", 8)
    assert outcome.code == 0, outcome.err
    assert outcome.out.startswith("books, valid\n  bits per byte")
    assert "gpt/results/books-valid.json" in outcome.err
    [written] = results(Path("gpt"))
    expected = [score_text(GPT, tiny.BYTES, text, stride=8) for text in corpora.BOOKS.split("\f")]
    assert written["scores"]["nll"] == pytest.approx(sum(score.nll for score in expected), rel=1e-5)
    assert written["model"]["notes"] == {"step": 9}
    assert written["settings"] == {"stride": 8, "precision": "fp32"}
    assert api.load("gpt").tokenizer.digest == written["model"]["tokenizer"]


def test_json_is_one_document_and_equals_the_file(call: Call) -> None:
    outcome = call("eval", "t5", "multi30k-en-de", "--data-dir", "data", "--beams", 2, "--json")
    assert outcome.code == 0, outcome.err
    told = json.loads(outcome.out)
    assert [told] == results(Path("t5"))
    assert "case:mixed" in told["signatures"]["bleu"]
    plain = call("eval", "t5", "multi30k-en-de", "--data-dir", "data/multi30k", "--beams", 2)
    assert told["signatures"]["bleu"] in plain.out
    assert "source: A dog runs.; translation:" in plain.out


def test_a_second_look_at_the_test_split_is_told(call: Call) -> None:
    first = call("eval", "gpt", "ptb", "--data-dir", "data", "--split", "test")
    assert first.code == 0, first.err
    assert "look" not in first.err
    assert "look 2 at the test split" in call("eval", "gpt", "ptb", "--data-dir", "data", "--split", "test").err


def test_the_probes_need_no_data(call: Call, tmp_path: Path) -> None:
    api.Model(tiny.model("gpt-mini", tiny.BYTES, context=160), tiny.BYTES, {}).save(tmp_path / "wide")
    outcome = call("eval", "wide", "cloze")
    assert outcome.code == 0, outcome.err
    assert outcome.out.startswith("cloze, probes\n  accuracy")
    assert "kind: fact; text: Stanford" in outcome.out


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["gpt", "pbt"], "there is no evaluation 'pbt'; there are ptb, wikitext-2"),
        (["gpt", "ptb"], "add --data-dir with the folder that holds ptb.valid.txt"),
        (["gpt", "ptb", "--data-dir", "gpt"], "gpt holds no ptb.valid.txt (also .gz or .xz), nor does gpt/ptb"),
        (["gpt", "multi30k-en-de", "--data-dir", "data"], "encoder-decoder family; this one is of the decoder family"),
        (["gpt", "cloze"], "the model reads at most 64"),
        (["gpt", "ptb", "--data-dir", "data", "--stride", "65"], "not between 1 and the context of 64"),
        (["gpt", "ptb", "--data-dir", "data", "--split", "train"], "ptb has no split 'train'; it has valid and test"),
        (["gpt", "ptb", "--data-dir", "data", "--precision", "fp8"], "'fp8' is neither fp32 nor bf16"),
        (["nowhere", "ptb", "--data-dir", "data"], "nowhere does not exist"),
    ],
)
def test_what_is_wrong_is_one_sentence_and_leaves_no_file(call: Call, arguments: list[str], sentence: str) -> None:
    outcome = call("eval", *arguments)
    assert (outcome.code, outcome.out) == (2, "")
    assert sentence in outcome.err
    assert outcome.err.count("\n") == 1
    assert not list(Path().glob("*/results"))
