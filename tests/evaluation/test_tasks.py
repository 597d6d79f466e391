"""The evaluations by name: the right files, the right units, and sentences for what is missing."""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.evaluation import corpora
from tests.generation import tiny
from trivium import records
from trivium.data.sources import held_out
from trivium.errors import ConfigError, DataError, RequestError
from trivium.evaluation import results
from trivium.evaluation.corpus import Corpus
from trivium.evaluation.likelihood import score_text
from trivium.evaluation.tasks import EVALUATIONS, Likelihood, Outcome, Settings, Translation, evaluate
from trivium.fast.choose import for_inference
from trivium.models.transformer import Transformer
from trivium.text.kinds import Words
from trivium.text.tokenizer import Tokenizer

SUBJECTS: dict[str, tuple[Transformer, Tokenizer]] = {
    "encoder": (tiny.model("bert-mini", tiny.MASKED, spread=0.5, context=160), tiny.MASKED),
    "decoder": (tiny.model("gpt-mini", tiny.BYTES, spread=0.5), tiny.BYTES),
    "encoder-decoder": (tiny.model("t5-mini", tiny.DENOISING, spread=0.5, context=48), tiny.DENOISING),
}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return corpora.lay(tmp_path_factory.mktemp("data"))


def run(name: str, data: Path | None, **options: Any) -> Outcome:
    family = EVALUATIONS[name].families[0]
    return evaluate(*SUBJECTS[family], name, folder=data, **options)


def test_words_count_the_ends_of_lines(data: Path) -> None:
    found = run("ptb", data)
    alone = score_text(*SUBJECTS["decoder"], corpora.PTB)
    assert (found.split, found.metric, found.scores["words"]) == ("valid", "word_perplexity", 11)
    assert found.score == pytest.approx(math.exp(alone.nll / 11), rel=1e-6)
    tokenizer = Words().build([corpora.PTB])
    by_words = evaluate(tiny.model("gpt-mini", tokenizer), tokenizer, "ptb", folder=data)
    assert by_words.scores["tokens"] == by_words.scores["words"]
    assert by_words.score == pytest.approx(by_words.scores["token_perplexity"])


def test_a_stride_is_obeyed_and_reported(data: Path) -> None:
    whole, strided = run("ptb", data), run("ptb", data, settings=Settings(stride=3))
    assert (whole.settings["stride"], strided.settings["stride"]) == (0, 3)
    assert strided.scores["tokens"] == whole.scores["tokens"]
    long = "x" * 100
    (data / "books" / "valid.txt").write_text(long)
    try:
        found = run("books", data, settings=Settings(stride=7))
    finally:
        (data / "books" / "valid.txt").write_text(corpora.BOOKS)
    assert found.scores["nll"] == pytest.approx(score_text(*SUBJECTS["decoder"], long, stride=7).nll, rel=1e-6)


def test_books_are_documents_and_count_bytes(data: Path) -> None:
    found = run("books", data)
    alone = [score_text(*SUBJECTS["decoder"], text) for text in corpora.BOOKS.split("\f")]
    assert found.metric == "bits_per_byte"
    total = sum(score.bytes for score in alone)
    assert found.score == pytest.approx(sum(score.nll for score in alone) / math.log(2) / total, rel=1e-6)


def test_shakespeare_is_judged_by_its_last_tenth(data: Path) -> None:
    text = (data / "tinyshakespeare" / "input.txt").read_text()
    found = run("shakespeare-char", data)
    assert found.scores["characters"] == 10
    assert found.metric == "nats_per_character"
    assert found.score == pytest.approx(score_text(*SUBJECTS["decoder"], text[90:]).nll / 10, rel=1e-6)


def test_translations_are_scored_with_their_signatures(data: Path) -> None:
    found = run("multi30k-en-de", data, settings=Settings(beams=2))
    assert (found.metric, found.scores["sentences"]) == ("bleu", 2)
    assert [example["source"] for example in found.examples] == ["A dog runs.", "Two cats sit."]
    assert [example["references"] for example in found.examples] == [["Ein Hund rennt."], ["Zwei Katzen sitzen."]]
    assert "case:mixed" in found.signatures["bleu"]
    assert "case:lc" in found.signatures["bleu_lc"]
    assert found.settings == {"beams": 2, "alpha": 0.6}
    back = run("multi30k-de-en", data, settings=Settings(beams=2))
    assert back.examples[0]["source"] == "Ein Hund rennt."


def test_tatoeba_asks_what_training_has_not_seen_and_knows_several_answers(data: Path) -> None:
    found = run("tatoeba-en-de", data, settings=Settings(beams=1))
    kept = [text for number in range(400) if held_out(text := f"I have {number} cats.", 0.01)]
    assert kept
    assert [example["source"] for example in found.examples] == kept
    assert all(len(example["references"]) == 2 for example in found.examples)


def test_masked_words_come_from_the_ranks_of_training(data: Path) -> None:
    found = run("masked-words", data)
    assert (found.metric, found.scores["sentences"]) == ("top1", 2)
    assert set(found.data) == {"train.txt", "valid.txt"}
    words = {word.strip(".").lower() for word in corpora.BOOKS.split()}
    assert {example["word"].lower() for example in found.examples} <= words
    assert run("masked-words", data, settings=Settings(sentences=1)).scores["sentences"] == 1


def test_spans_and_probes_have_their_scores(data: Path) -> None:
    tokenizer = tiny.BYTES.extended(["<pad>", *(f"<extra_id_{number}>" for number in range(10))])
    found = evaluate(tiny.model("t5-mini", tokenizer, spread=0.5), tokenizer, "span", folder=data)
    assert found.metric == "nats_per_target"
    assert found.score == pytest.approx(found.scores["nll"] / found.scores["targets"])
    probes = run("cloze", None)
    assert (probes.split, probes.scores["probes"], len(probes.examples)) == ("probes", 7, 7)
    assert 0 <= probes.score <= 1


def test_the_test_set_is_looked_at_only_by_its_name(data: Path) -> None:
    assert "ptb.test.txt.xz" not in run("ptb", data).data
    found = run("ptb", data, split="test")
    digest = hashlib.sha256((data / "ptb" / "ptb.test.txt.xz").read_bytes()).hexdigest()
    assert found.data == {"ptb.test.txt.xz": digest}
    assert all(evaluation.splits[0] != "test" for evaluation in EVALUATIONS.values())


def test_the_folder_of_the_corpus_itself_will_do(data: Path) -> None:
    assert run("ptb", data / "ptb").score == run("ptb", data).score


def test_the_real_corpora_are_found_and_have_the_published_sizes(shared: Path) -> None:
    words = {("ptb", "valid"): 73_760, ("ptb", "test"): 82_430}
    words |= {("wikitext-2", "valid"): 217_646, ("wikitext-2", "test"): 245_569}
    for (name, split), size in words.items():
        entry = EVALUATIONS[name]
        assert isinstance(entry, Likelihood)
        [text] = Corpus(entry.corpus, shared / "data").documents(entry.files[split])
        assert len(text.split()) + text.count("\n") == size
    multi30k = EVALUATIONS["multi30k-en-de"]
    assert isinstance(multi30k, Translation)
    sizes = {split: len(Corpus("multi30k", shared / "data").pairs(*multi30k.files[split])) for split in multi30k.splits}
    assert sizes == {"valid": 1014, "test": 1000}
    books = Corpus("books", shared / "data").documents("valid.txt")
    assert len(books) == 3 + 1  # the newline behind the last form feed is a document too, as in training
    assert sum(map(len, Corpus("tinyshakespeare", shared / "data").documents("input.txt"))) == 1_115_394


def test_what_is_missing_or_unknown_is_said_in_a_sentence(data: Path, tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"no evaluation 'pbt'; there are ptb, wikitext-2, .*cloze"):
        evaluate(*SUBJECTS["decoder"], "pbt", folder=data)
    with pytest.raises(RequestError, match="books has no split 'test'; it has valid"):
        run("books", data, split="test")
    with pytest.raises(RequestError, match=r"needs its data; add --data-dir with the folder that holds ptb.valid.txt"):
        run("ptb", None)
    with pytest.raises(DataError, match=rf"{tmp_path} holds no val.en \(also .gz or .xz\), nor does .*multi30k"):
        run("multi30k-en-de", tmp_path)
    with pytest.raises(RequestError, match="ptb is for a model of the decoder family; this one is of the encoder"):
        evaluate(*SUBJECTS["encoder"], "ptb", folder=data)
    with pytest.raises(ConfigError, match="beams"):
        Settings(beams=0)


def outcome() -> Outcome:
    return Outcome(
        name="ptb",
        split="valid",
        metric="word_perplexity",
        score=math.inf,
        scores={"word_perplexity": math.inf, "tokens": 3},
        signatures={},
        settings={"stride": 2},
        data={"a": "b"},
        examples=[{"said": "x"}],
    )


def write(folder: Path, what: Outcome, model: Transformer) -> dict[str, Any]:
    facts: dict[str, Any] = {"notes": {"step": 3}, "date": "2026-01-02T03:04:05+00:00", "seconds": 1.5}
    return results.record(folder, what, model=model, tokenizer=tiny.BYTES, **facts)


def test_a_results_file_has_all_that_a_repetition_needs(tmp_path: Path) -> None:
    model = SUBJECTS["decoder"][0]
    told = write(tmp_path, outcome(), model)
    content = json.loads((tmp_path / "results" / "ptb-valid.json").read_text())
    assert content == told
    assert content["score"] is None  # infinity is no number in JSON
    assert (content["settings"], content["date"], content["looks"]) == ({"stride": 2}, "2026-01-02T03:04:05+00:00", 1)
    assert content["model"]["tokenizer"] == tiny.BYTES.digest
    assert content["model"]["weights"] == results.weights_digest(model)


def test_every_look_at_a_split_is_counted(tmp_path: Path) -> None:
    for look in (1, 2, 3):
        assert write(tmp_path, outcome(), SUBJECTS["decoder"][0])["looks"] == look
    assert write(tmp_path, replace(outcome(), split="test"), SUBJECTS["decoder"][0])["looks"] == 1


def test_results_are_listed_without_examples_and_damage_is_told(tmp_path: Path) -> None:
    assert records.results_of(tmp_path) == []
    write(tmp_path, outcome(), SUBJECTS["decoder"][0])
    (tmp_path / "results" / "torn.json").write_text('{"name": "torn"')
    first, second = records.results_of(tmp_path)
    assert (first["name"], first["scores"]["tokens"], "examples" in first) == ("ptb", 3, False)
    assert (second["name"], second["metric"], second["score"]) == ("torn", "damaged", None)


def test_the_digest_of_a_model_changes_with_any_weight_and_not_with_its_layout() -> None:
    model = tiny.model("gpt-mini", tiny.BYTES)
    before = results.weights_digest(model)
    for_inference(model)
    assert results.weights_digest(model) == before
    with torch.no_grad():
        list(model.parameters())[-1].view(-1)[0].add_(1e-3)
    assert results.weights_digest(model) != before
