"""`trivium config` refuses what `trivium train` would refuse before it reads any text, all of it at once."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from tests.cli.conftest import Call, Outcome, refused
from tests.cli.test_cli import RECIPE


@pytest.fixture
def call(invoke: Call, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Call:
    monkeypatch.chdir(tmp_path)
    Path("play.txt").write_text("To be, or not to be, that is the question.\n" * 60)
    Path("pairs.tsv").write_text("a dog\tein Hund\n" * 60)
    Path("five.txt").write_text("To be")
    Path("tiny.toml").write_text(RECIPE)
    return invoke


def problems(outcome: Outcome) -> list[str]:
    assert outcome.code == 2, outcome
    assert outcome.out == ""
    lines = outcome.err.strip().splitlines()
    assert all(line.startswith("error: ") for line in lines), lines
    return sorted(line.removeprefix("error: ").split(":")[0] for line in lines)


CASES = {
    "no budget": (["budget.steps=0"], ["budget"]),
    "no text": (["data.paths=[]"], ["data.paths"]),
    "missing files": (["data.paths=a.txt,b.txt"], ["data.paths", "data.paths"]),
    "missing validation": (["data.valid=held.txt"], ["data.valid"]),
    "a device that is no device": (["device=tpu"], ["device"]),
    "a device that is not here": (["device=mps"], ["device"]),
    "no GPU": (["compile=graphs", "precision=fp8"], ["compile", "precision"]),
    "pairs for a decoder": (["data.pairs=pairs.tsv"], ["objective"]),
    "no pairs": (["model=t5-mini", "objective=seq2seq", "batch.tokens=99"], ["batch.tokens", "data"]),
    "missing pairs": (["model=t5-mini", "objective=seq2seq", "data.pairs=no.tsv"], ["data.pairs"]),
    "a family that the objective cannot train": (["objective=masked"], ["objective"]),
    "no tokenizer": (["tokenizer=file", "tokenizer.path=no.json"], ["tokenizer.path"]),
    "no start": (["start=nowhere"], ["start"]),
    "what only the recipe is wrong with": (["seed=-1", "optim.lr=1", "clip=x"], ["clip", "optim.lr", "seed"]),
    "a setting, a file and a device": (["lr=1", "data.paths=no.txt", "device=tpu"], ["data.paths", "device", "lr"]),
    "parts and the whole": (["optim.rate=-1", "objective=masked", "device=tpu"], ["device", "objective", "optim.rate"]),
    "nothing that follows from what is left out": (["model=brt-mini", "objective=masked"], ["model"]),
    "a budget that is none": (["budget.steps=x"], ["budget.steps"]),
    "a tokenizer without a file": (["tokenizer=file"], ["tokenizer.path"]),
    "weights for other sources": (["data.weights=1,2"], ["data.weights"]),
    "a text of five bytes": (["data.paths=five.txt", "model.context=64"], ["data.paths"]),
    "a shape that a preset has a part in": (
        ["model.width=7", "data.paths=no.txt", "name=a/b", "device=tpu"],
        ["data.paths", "device", "model.decoder.block.attention.heads", "name"],
    ),
    "a shape and what it brings with it": (
        ["model.width=7", "objective=masked", "seed=-1"],
        ["model.decoder.block.attention.heads", "seed"],
    ),
    "many": (
        ["budget.steps=0", "data.paths=a.txt", "device=tpu", "batch.tokens=9", "start=nowhere"],
        ["batch.tokens", "budget", "data.paths", "device", "start"],
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_config_and_train_name_the_same_problems(call: Call, case: str) -> None:
    settings, expected = CASES[case]
    found = call("config", "tiny.toml", *settings)
    assert problems(found) == expected
    assert call("train", "tiny.toml", *settings) == found
    assert not Path("runs").exists()


def test_what_an_objective_asks_of_its_model_is_known_before_the_text_is_read(call: Call) -> None:
    Path("pairs.toml").write_text(
        'model = "bert-mini"\n[objective]\nkind = "masked"\nframe = "pair"\n'
        '[data]\npaths = ["play.txt"]\n[budget]\nsteps = 1\n'
    )
    found = call("config", "pairs.toml")
    assert problems(found) == ["model.embedding.segments", "model.sentence"]
    noise = ("model=t5-mini", "objective=denoise", "objective.sentinels=1", "model.context=64")
    assert problems(call("config", "tiny.toml", *noise, "model.decoder.layers=1")) == ["objective.sentinels"]
    assert call("train", "pairs.toml") == found


def test_a_folder_of_data_and_a_folder_of_runs_are_the_same_as_for_train(call: Call) -> None:
    Path("elsewhere").mkdir()
    Path("play.txt").rename("elsewhere/play.txt")
    refused(call("config", "tiny.toml"), "data.paths", "does not exist")
    refused(call("config", "tiny.toml", "--data-dir", "nowhere"), "--data-dir", "nowhere is not a folder")
    outcome = call("config", "tiny.toml", "--data-dir", "elsewhere")
    assert outcome.code == 0, outcome.err
    assert 'paths = ["play.txt"]' in outcome.out


def test_a_run_of_that_name_is_worth_a_note_and_no_refusal(call: Call) -> None:
    Path("runs/tiny").mkdir(parents=True)
    outcome = call("config", "tiny.toml")
    assert (outcome.code, outcome.err) == (
        0,
        "note: runs/tiny exists already; go on with `trivium train runs/tiny` or set another name\n",
    )
    refused(call("train", "tiny.toml"), "name: runs/tiny exists already")


def test_a_budget_of_steps_on_the_command_line_replaces_the_files_minutes(call: Call) -> None:
    Path("timed.toml").write_text(RECIPE.replace("steps = 4", "minutes = 10"))
    outcome = call("config", "timed.toml", "budget.steps=2")
    assert outcome.code == 0, outcome.err
    assert "steps = 2\ntokens = 0\nminutes = 0.0\n" in outcome.out


def test_a_missing_tensorboard_is_refused_before_a_folder_is_made(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trivium.training.track.find_spec", lambda name: None)
    refused(call("train", "tiny.toml", "track=tensorboard"), "track: tensorboard", "-m pip install tensorboard")
    assert not Path("runs").exists()


def test_a_text_is_refused_by_its_size_only_where_that_is_certain(call: Call) -> None:
    Path("short.txt").write_text("a" * 12)
    assert "the training text has 11 tokens" in call("train", "tiny.toml", "data.paths=short.txt").err
    assert call("config", "tiny.toml", "data.paths=short.txt").code == 0  # the tokenizer decides
    Path("ligature.txt").write_text("\ufdfa" * 2)  # 36 letters
    assert call("config", "tiny.toml", "data.paths=ligature.txt", "tokenizer=unigram").code == 0
    Path("packed.txt.gz").write_bytes(gzip.compress(b"a" * 1000)[:30])
    found = call("config", "tiny.toml", "data.paths=packed.txt.gz", "model.context=512")
    assert found.code == 0, found.err
    refused(call("config", "tiny.toml", "data.paths=short.txt", "data.length=60", "model.context=60"), "12 bytes")
    assert call("config", "tiny.toml", "data.paths=short.txt", "data.length=4").code == 0
