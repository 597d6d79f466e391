"""A run that begins with a published model: a llama2.c file, a GGUF file or a Hugging Face folder, as they are."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import BertConfig, BertModel

import trivium as tv
from tests.training.conftest import finish, resume, silent, start
from tests.training.test_resume import assert_goes_on_exactly
from trivium.config import load, overrides
from trivium.errors import ConfigError
from trivium.models.transformer import weights
from trivium.text.library import byte_alphabet
from trivium.training.build_job import build_job
from trivium.training.recipe import Recipe
from trivium.training.setup import create_run

STORIES = Path(__file__).parents[1] / "assets" / "stories260K" / "stories260K.bin"
BASE: dict[str, Any] = {
    "name": "on",
    "device": "cpu",
    "threads": 1,
    "precision": "fp32",
    "data.valid": 0.1,
    "data.length": 24,
    "batch.rows": 4,
    "budget.steps": 6,
    "optim.rate": 1e-3,
    "evaluate.every": 3,
    "checkpoint.every": 2,
    "checkpoint.keep": 9,
    "sample.every": 0,
    "log": 2,
}


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "story.txt"
    path.write_text("Once upon a time there was a little red fox who liked to run in the snow.\n" * 60)
    return path


def recipe(begin: Path, text: Path, **changes: Any) -> Recipe:
    return load(Recipe, overrides({**BASE, "start": str(begin), "data.paths": [str(text)], **changes}))


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One model in three forms."""
    folder = tmp_path_factory.mktemp("published")
    m = tv.load(STORIES, device="cpu")
    m.export("hf", folder / "hf", say=silent)
    m.export("gguf", folder / "model.gguf", say=silent)
    return {"llama2.c": STORIES, "hf": folder / "hf", "gguf": folder / "model.gguf"}


@pytest.mark.parametrize("form", ["llama2.c", "hf", "gguf"])
def test_training_begins_with_its_weights_and_its_tokenizer(
    published: dict[str, Path], text: Path, tmp_path: Path, form: str
) -> None:
    path = published[form]
    session = start(recipe(path, text), tmp_path / "runs")
    known = tv.load(path, device="cpu", say=silent)
    begun = build_job(session.context, 6)
    for name, tensor in weights(known.module).items():
        assert torch.equal(weights(begun.model)[name], tensor)
    sentence = "Once upon a time there was a fox."
    assert session.context.tokenizer.encode(sentence) == known.tokenizer.encode(sentence)
    assert session.context.task.length == 24  # and not the 512 of the context
    before = known.score(text.read_text()[:500]).bits_per_byte
    finish(session)
    after = tv.load(session.folder, device="cpu")
    assert after.score(text.read_text()[:500]).bits_per_byte < before - 0.05
    assert after.notes["ids"] == known.notes["ids"]  # what ends a text stays known


def test_it_goes_on_exactly_even_if_the_start_is_gone(published: dict[str, Path], text: Path, tmp_path: Path) -> None:
    copied = shutil.copytree(published["hf"], tmp_path / "copied")
    session = start(recipe(copied, text), tmp_path / "runs")
    finish(session)
    shutil.rmtree(copied)
    assert_goes_on_exactly(session.folder, 4, tmp_path, last=6)


def test_a_chat_template_is_kept(published: dict[str, Path], text: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(published["hf"], tmp_path / "chat")
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    session = start(recipe(folder, text), tmp_path / "runs")
    finish(session)
    assert tv.load(session.folder, device="cpu").notes["chat_template"] == "{{ messages }}"
    again = start(recipe(session.folder, text, name="third"), tmp_path / "runs")  # and by a run that begins there
    finish(again)
    assert tv.load(again.folder, device="cpu").notes["chat_template"] == "{{ messages }}"


@pytest.fixture
def headless(tmp_path: Path) -> Path:
    """A BERT without any output over its vocabulary, as sentence encoders are."""
    folder = tmp_path / "headless"
    BertModel(
        BertConfig(vocab_size=300, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32)
    ).save_pretrained(folder)
    (folder / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *byte_alphabet()]))
    return folder


def test_an_encoder_without_a_head_is_refused_before_data_are_built(headless: Path, text: Path, tmp_path: Path) -> None:
    ticked: list[object] = []
    with pytest.raises(ConfigError, match=r"start: .*headless has no output over its vocabulary, so objective=masked"):
        create_run(
            recipe(headless, text, objective="masked"),
            tmp_path / "runs",
            say=silent,
            tick=lambda *what: ticked.append(what),
        )
    assert not ticked
    assert not (tmp_path / "runs").exists()


def test_a_recipe_without_an_output_is_refused_too() -> None:
    with pytest.raises(ConfigError, match=r"model.output: none has no vocabulary, .* objective=masked"):
        load(Recipe, overrides({"model": "bert-mini", "model.output": "none", "objective": "masked"}))


def test_what_is_no_start_is_one_sentence(published: dict[str, Path], text: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="keeps no optimizer; set start_optimizer=fresh"):
        start(recipe(published["gguf"], text, start_optimizer="keep"), tmp_path / "runs")
    (tmp_path / "nothing").mkdir()
    with pytest.raises(ConfigError, match="start: name a run, a checkpoint in it, a saved or a published model"):
        start(recipe(tmp_path / "nothing", text), tmp_path / "runs")
    without = shutil.copytree(published["hf"], tmp_path / "without")
    for path in without.glob("*token*"):
        path.unlink()
    with pytest.raises(ConfigError, match="brings no tokenizer"):
        start(recipe(without, text), tmp_path / "runs")
    assert not (tmp_path / "runs").exists()


def test_a_finished_run_from_a_published_start_is_resumed(
    published: dict[str, Path], text: Path, tmp_path: Path
) -> None:
    session = start(recipe(published["gguf"], text), tmp_path / "runs")
    finish(session)
    longer = resume(session.folder, **{"budget.steps": 8})
    finish(longer)
    assert max(row["step"] for row in longer.record.metrics.rows()) == 8
