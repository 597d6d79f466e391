"""A trained model at work: `fill`, `translate`, `embed` and `generate` from the command line, and the same by `tv`."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from tests.cli.conftest import Call, refused
from tests.generation import tiny
from trivium import api, config
from trivium.checkpoints.store import Store
from trivium.errors import CheckpointError, RequestError
from trivium.evaluation import results
from trivium.generation.beam import Beam
from trivium.generation.fill import Filling
from trivium.generation.translation import search_texts
from trivium.models.transformer import Transformer, weights
from trivium.text.tokenizer import Tokenizer

MANY = tiny.DENOISING.extended([">>fra<<", ">>deu<<"])
MODELS: dict[str, tuple[Transformer, Tokenizer]] = {
    "encoder": (tiny.model("bert-mini", tiny.MASKED, spread=0.5), tiny.MASKED),
    "decoder": (tiny.model("gpt-mini", tiny.MASKED, spread=0.5), tiny.MASKED),
    "both": (tiny.model("t5-mini", tiny.DENOISING, spread=0.5), tiny.DENOISING),
    "second": (tiny.model("t5-mini", tiny.DENOISING, spread=0.5, seed=2), tiny.DENOISING),
    "many": (tiny.model("t5-mini", MANY, spread=0.5), MANY),
    "other": (tiny.model("t5-mini", tiny.BYTES.extended(["<pad>"]), spread=0.5), tiny.BYTES.extended(["<pad>"])),
}


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Saved models of the three families, and a run with three checkpoints."""
    folder = tmp_path_factory.mktemp("models")
    for name, (module, tokenizer) in MODELS.items():
        api.Model(module, tokenizer, {}).save(folder / name)
    run = folder / "run"
    store = Store(run / "checkpoints", keep=10)
    for step in (1, 2, 3):
        module = tiny.model("t5-mini", tiny.DENOISING, spread=0.5, seed=step)
        store.save(step, tensors={"model": weights(module)}, documents={})
    (run / "config.toml").write_text(config.write({"model": config.dump(module.config)}))
    tiny.DENOISING.save(run / "tokenizer.json")
    return folder


@pytest.fixture
def call(invoke: Call, monkeypatch: pytest.MonkeyPatch, home: Path) -> Call:
    """Run a command in this process, beside the models, with `piped` on standard input."""
    monkeypatch.chdir(home)
    return invoke


def load(home: Path, name: str, **options: Any) -> api.Model:
    return api.load(home / name, device="cpu", **options)


def test_fill_prints_ranked_candidates(call: Call, home: Path) -> None:
    expected = cast("list[Filling]", load(home, "encoder").fill("the [MASK] sat", top=3))
    assert len(expected) == 3
    outcome = call("fill", "encoder", "the [MASK] sat", "--top", 3, "--device", "cpu")
    assert outcome.code == 0, outcome.err
    assert outcome.out.splitlines()[0] == "the [MASK] sat"
    assert outcome.out.count("%") >= 3
    found = json.loads(call("fill", "encoder", "the [MASK] sat", "--top", 3, "--json").out)
    assert [item["id"] for item in found[0]["masks"][0]] == [item.id for item in expected]
    assert [item["piece"] for item in found[0]["masks"][0]] == [str(item) for item in expected]
    assert found[0]["masks"][0][0]["probability"] == pytest.approx(expected[0].probability)


def test_fill_gives_a_list_for_each_of_several_masks(call: Call, home: Path) -> None:
    m = load(home, "encoder")
    one, two = m.fill(["[MASK]", "a [MASK] b [MASK]"])
    assert (len(one), len(two), len(two[0])) == (5, 2, 5)
    outcome = call("fill", "encoder", piped="[MASK]\na [MASK] b [MASK]\n")
    assert outcome.code == 0, outcome.err
    assert outcome.out.count("gap") == 2


def test_translate_gives_a_line_for_each_line(call: Call, home: Path) -> None:
    texts = ["ein Hund", "", "zwei\u2028Katzen", "Bäume"]
    expected = load(home, "both").translate(texts, tokens=9)
    outcome = call("translate", "both", "--tokens", 9, piped="ein Hund\n\nzwei\u2028Katzen\r\nBäume\n")
    assert outcome.code == 0, outcome.err
    lines = outcome.out.removesuffix("\n").split("\n")
    assert lines == [" ".join(text.splitlines()) for text in expected]
    found = json.loads(call("translate", "both", *texts, "--tokens", 9, "-n", 3, "--beams", 3, "--json").out)
    assert [item["text"] for item in found] == texts
    assert all(len(item["best"]) == 3 for item in found)
    scores = [hypothesis["score"] for hypothesis in found[0]["best"]]
    assert scores == sorted(scores, reverse=True)


def test_translate_into_one_of_several_languages(call: Call, home: Path) -> None:
    m = load(home, "many")
    expected = search_texts(m.module, MANY, ["a dog"], beam=Beam(), tokens=8, language="fra")
    outcome = call("translate", "many", "a dog", "--tokens", 8, "--language", "fra", "--json")
    assert outcome.code == 0, outcome.err
    assert json.loads(outcome.out)[0]["best"][0]["ids"] == expected[0][0].ids
    refused(call("translate", "many", "a dog", "--language", "ita"), ">>ita<<", "deu, fra")
    refused(call("translate", "many", ">>fra<< a dog"), "--language fra")


def test_settings_out_of_bounds_are_refused(call: Call) -> None:
    refused(call("translate", "both", "ein Hund", "--alpha", 1000), "alpha: 1000", "from 0 to 10")
    refused(call("translate", "both", "ein Hund", "--beams", 10**6), "beams: 1000000", "more than 1,000")
    for penalty in ("1e-300", "1e300", "nan"):
        refused(call("generate", "decoder", "a", "--repetition-penalty", penalty), "repetition_penalty: ")
    refused(call("generate", "decoder", "a", "--tokens", 10**12), "tokens: ", "1,000,000")


def test_translate_takes_one_text_or_many_and_the_n_best(home: Path) -> None:
    m = load(home, "both")
    one = m.translate("ein Hund", tokens=8)
    assert isinstance(one, str)
    assert m.translate(["ein Hund"], tokens=8) == [one]
    best = m.translate("ein Hund", tokens=8, n=3)
    assert best[0] == one
    assert best[0].score >= best[1].score >= best[2].score
    assert m.search("ein Hund", tokens=8, n=3) == best
    decoder = load(home, "decoder")
    assert len(decoder.search("ein Hund", tokens=8, n=2)) == 2


def test_an_ensemble_of_one_model_with_itself_is_that_model(call: Call, home: Path) -> None:
    m, second = load(home, "both"), load(home, "second")
    texts = ["ein Hund", "zwei Katzen"]
    alone = m.translate(texts, tokens=8, beams=2)
    assert m.translate(texts, tokens=8, beams=2, ensemble=[m]) == alone
    together = m.translate(texts, tokens=8, beams=2, ensemble=[second])
    assert together != alone
    swapped = second.translate(texts, tokens=8, beams=2, ensemble=[m])
    assert swapped == together
    piped = call("translate", "both", *texts, "--tokens", 8, "--beams", 2, "--ensemble", "second", "--json")
    assert [item["best"][0]["text"] for item in json.loads(piped.out)] == together


def test_average_is_the_mean_of_the_newest_checkpoints(call: Call, home: Path) -> None:
    m = load(home, "run", average=2)
    assert m.notes["average"] == [2, 3]
    found = weights(m.module)
    seeds = [weights(tiny.model("t5-mini", tiny.DENOISING, spread=0.5, seed=seed)) for seed in (2, 3)]
    for name, tensor in found.items():
        torch.testing.assert_close(tensor, (seeds[0][name] + seeds[1][name]) / 2)
    newest = weights(load(home, "run").module)
    assert all(torch.equal(newest[name], tensor) for name, tensor in seeds[1].items())
    printed = call("translate", "run", "ein Hund", "--tokens", 8, "--average", 2, "--json")
    assert json.loads(printed.out)[0]["best"][0]["text"] == m.translate("ein Hund", tokens=8)
    refused(call("translate", "run", "x", "--average", 4), "3 whole checkpoints, not 4", "checkpoint.keep=4")
    refused(call("translate", "both", "x", "--average", 4), "both is not a run")
    with pytest.raises(RequestError, match="average: -1"):
        load(home, "run", average=-1)


def test_a_checkpoint_is_a_model(call: Call, home: Path) -> None:
    path = "run/checkpoints/step-00000002"
    m = load(home, path)
    assert m.notes == {"run": "run", "step": 2}
    expected = weights(tiny.model("t5-mini", tiny.DENOISING, spread=0.5, seed=2))
    assert all(torch.equal(weights(m.module)[name], tensor) for name, tensor in expected.items())
    printed = call("translate", path, "ein Hund", "--tokens", 8)
    assert printed.out == " ".join(m.translate("ein Hund", tokens=8).splitlines()) + "\n"
    facts = json.loads(call("show", path, "--json").out)
    assert (facts["state"], facts["step"], facts["family"]) == ("checkpoint", 2, "encoder-decoder")
    assert "checkpoint" in call("show", path).out
    assert results.place(home / path) == home / "run" / "results" / "step-00000002"
    refused(call("translate", path, "x", "--average", 2), "is one checkpoint", "name its run", "run")
    shutil.copytree(home / path, home / "alone")
    refused(call("translate", "alone", "x"), "alone", "a checkpoint without its run", "RUN/checkpoints")


def test_a_damaged_checkpoint_is_not_opened(home: Path, tmp_path: Path) -> None:
    shutil.copytree(home / "run", tmp_path / "run")
    file = tmp_path / "run" / "checkpoints" / "step-00000002" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"x")
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        api.load(file.parent, device="cpu")


def test_embed_prints_a_line_of_numbers_for_each_text(call: Call, home: Path) -> None:
    expected = load(home, "encoder").embed(["one", "two words"])
    outcome = call("embed", "encoder", "one", "two words")
    assert outcome.code == 0, outcome.err
    rows = [[float(value) for value in line.split()] for line in outcome.out.splitlines()]
    torch.testing.assert_close(torch.tensor(rows), expected, atol=1e-4, rtol=1e-4)
    assert call("embed", "encoder", "-", piped="one\ntwo words\n").out == outcome.out
    unit = json.loads(call("embed", "encoder", "one", "--normalise", "--pooling", "cls", "--json").out)
    assert sum(value**2 for value in unit[0]["vector"]) == pytest.approx(1)
    assert load(home, "decoder").embed("one").shape == (32,)


def test_texts_are_ranked_by_their_cosine_with_another(call: Call, home: Path) -> None:
    m = load(home, "encoder")
    texts = ["dog", "cat", "a dog runs"]
    both = m.embed(["a dog ran", *texts], normalise=True)
    order = (both[1:] @ both[0]).argsort(descending=True).tolist()
    found = m.neighbours("a dog ran", among=texts)
    assert list(found) == [texts[number] for number in order]
    printed = call("embed", "encoder", *texts, "--near", "a dog ran")
    assert [line.split(maxsplit=1)[1] for line in printed.out.splitlines()] == list(found)


def test_static_neighbours_leave_out_the_word_itself(home: Path) -> None:
    m = load(home, "encoder")
    found = m.neighbours("k", top=4)
    table = torch.nn.functional.normalize(m.module.embedding.weight[:256].detach(), dim=-1)
    order = (table @ table[ord("k")]).argsort(descending=True).tolist()[1:5]
    assert [item.similarity for item in found] == pytest.approx((table[order] @ table[ord("k")]).tolist(), abs=1e-5)
    assert "k" not in found


def test_a_word_has_another_vector_in_another_text(home: Path) -> None:
    m = load(home, "encoder")
    river, money = m.embed_word("by the bank of the river", "bank"), m.embed_word("money in the bank", "bank")
    assert not torch.allclose(river, money, atol=1e-2)


def test_generate_writes_from_a_source_without_repeating_it(call: Call, home: Path) -> None:
    m = load(home, "both")
    text = m.generate("ein Hund", tokens=9, temperature=0)
    assert "".join(m.stream("ein Hund", tokens=9, temperature=0)) == text
    outcome = call("generate", "both", "ein Hund", "--tokens", 9, "--temperature", 0)
    assert outcome.code == 0, outcome.err
    assert outcome.out == text + "\n"
    several = call("generate", "both", "ein Hund", "--tokens", 9, "-n", 2)
    assert "ein Hund" not in several.out


def test_logits_of_the_three_families(home: Path) -> None:
    encoder, decoder, both = (load(home, name) for name in ("encoder", "decoder", "both"))
    ids = torch.tensor([[1, 2, 3], [4, 5, 6]])
    real = torch.tensor([[True, True, True], [True, True, False]])
    with torch.no_grad():
        expected = encoder.module.head.logits(encoder.module(ids, padding=real).hidden)
        torch.testing.assert_close(encoder.logits(ids, padding=real), expected)
        target = torch.tensor([[7, 8], [9, 10]])
        expected = both.module.head.logits(both.module(target, source=ids, source_padding=real).hidden)
        torch.testing.assert_close(both.logits(ids, target, padding=real), expected)
        torch.testing.assert_close(both.logits([1, 2, 3], [7, 8]), expected[0], atol=1e-5, rtol=1e-5)
    assert decoder.logits([1, 2, 3]).shape == (3, decoder.config.vocab)
    for model, given, words in (
        (both, (ids,), "a source and a target"),
        (decoder, (ids, ids), "takes one row of ids and no target"),
        (both, (ids, [1, 2]), "does not fit a target"),
    ):
        with pytest.raises(RequestError, match=words):
            model.logits(*given)
    with pytest.raises(RequestError, match="padding: its shape must be that of the ids"):
        encoder.logits(ids, padding=real[:1])
    with pytest.raises(RequestError, match="no segments"):
        encoder.logits(ids, segments=torch.zeros_like(ids))


def test_a_model_asked_for_what_it_cannot_do_says_so_in_a_sentence(call: Call) -> None:
    refused(call("generate", "encoder", "To be"), "an encoder sees both sides", "load a decoder")
    refused(call("fill", "decoder", "a [MASK]"), "decoder", "cannot fill a gap", "load an encoder")
    refused(call("fill", "encoder", "no gap"), "no [MASK]")
    refused(call("translate", "decoder", "ein Hund"), "cannot translate", "load an encoder-decoder")
    refused(call("translate", "encoder", "ein Hund"), "cannot translate")
    refused(call("translate", "both", "x" * 80), "the source has 81 tokens", "at most 64")
    refused(call("translate", "both", "x", "x" * 80), "text 2", "81 tokens", "64")
    refused(call("fill", "encoder", "[MASK]" + "x" * 80), "83 tokens", "at most 64")
    refused(call("embed", "decoder", "x" * 80), "80 tokens", "at most 64")
    refused(call("embed", "decoder", "x", "--pooling", "cls"), "[CLS]")
    refused(call("embed", "decoder", "x", "--pooling", "max"), "neither mean nor cls")
    refused(call("translate", "both", "x", "--ensemble", "other"), "different tokenizers")
    refused(call("translate", "both", "x", "--ensemble", "nowhere"), "nowhere", "does not exist")
    refused(call("translate", "both", "x", "--beams", 2, "-n", 3), "n: 3")
    for verb in ("fill", "translate", "embed"):
        refused(call(verb, "nowhere", "x"), "nowhere", "does not exist")
        refused(call(verb, "encoder"), "standard input is empty")


def test_an_encoder_has_no_likelihood_of_a_text(home: Path) -> None:
    with pytest.raises(RequestError, match="needs a decoder"):
        load(home, "encoder").score("a text")


def test_a_folder_without_checkpoints_has_nothing_to_average(home: Path, tmp_path: Path) -> None:
    (tmp_path / "config.toml").touch()
    with pytest.raises(CheckpointError, match="has no checkpoint yet"):
        api.load(tmp_path, average=2, device="cpu")


@pytest.mark.parametrize("verb", ["fill", "translate", "embed"])
def test_help_shows_an_example(call: Call, verb: str) -> None:
    outcome = call(verb, "--help")
    assert outcome.code == 0
    assert f"Example: trivium {verb}" in " ".join(outcome.out.split())
