"""The command line as a user meets it: exit codes, one sentence per error, nothing half-written."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.cli.conftest import Call, refused
from trivium.files import Lock

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def call(invoke: Call, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Call:
    """Run a command in this process, in an empty folder."""
    monkeypatch.chdir(tmp_path)
    return invoke


RECIPE = """
device = "cpu"
[data]
paths = ["play.txt"]
valid = 0.1
[tokenizer]
kind = "bytes"
[model]
width = 16
context = 16
[model.decoder]
layers = 1
[model.decoder.block.attention]
heads = 2
[batch]
rows = 4
[budget]
steps = 4
"""


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    (tmp_path / "play.txt").write_text("To be, or not to be, that is the question.\n" * 60)
    path = tmp_path / "tiny.toml"
    path.write_text(RECIPE)
    return path


def test_a_misspelt_key_is_refused(call: Call, recipe: Path) -> None:
    refused(call("train", recipe, "optim.raet=1"), "optim.raet", "did you mean optim.rate?")
    assert not Path("runs").exists()


def test_a_width_not_divisible_by_heads_is_refused(call: Call, recipe: Path) -> None:
    refused(call("train", recipe, "model.width=17"), "model.decoder.block.attention.heads", "not divisible", "try 1")
    assert not Path("runs").exists()


def test_a_missing_file_is_refused(call: Call, recipe: Path) -> None:
    refused(call("train", recipe, "data.paths=nowhere.txt"), "nowhere.txt", "does not exist")
    refused(call("train", "nowhere.toml"), "nowhere.toml", "does not exist")
    refused(call("generate", "nowhere", "To be"), "nowhere", "does not exist")
    assert not Path("runs").exists()


def test_an_empty_file_is_refused(call: Call, recipe: Path) -> None:
    Path("empty.txt").touch()
    refused(call("train", recipe, "data.paths=empty.txt"), "empty.txt", "is empty")
    assert not Path("runs").exists()


def test_a_file_that_is_not_utf8_is_refused(call: Call, recipe: Path) -> None:
    Path("latin.txt").write_bytes("Über".encode("latin-1") * 100)
    refused(call("train", recipe, "data.paths=latin.txt"), "latin.txt", "UTF-8", "byte 0")
    assert not Path("runs").exists()


def test_a_run_folder_in_use_is_refused(call: Call, recipe: Path) -> None:
    assert call("train", recipe).code == 0
    before = snapshot(Path("runs"))
    with Lock(Path("runs/tiny")):
        refused(call("train", "runs/tiny"), "runs/tiny", "in use by process")
    assert snapshot(Path("runs")) == before


def test_a_checkpoint_for_another_configuration_is_refused(call: Call, recipe: Path) -> None:
    assert call("train", recipe).code == 0
    before = snapshot(Path("runs"))
    refused(call("train", "runs/tiny", "model.width=32"), "another configuration", "model.width")
    assert snapshot(Path("runs")) == before


def test_a_prompt_longer_than_the_context_is_refused(call: Call, recipe: Path) -> None:
    assert call("train", recipe).code == 0
    refused(call("generate", "runs/tiny", "x" * 40), "40 tokens", "context", "16")


def snapshot(folder: Path) -> dict[str, tuple[int, float]]:
    """Every file with its size and time of change; the lock may be touched."""
    files = (path for path in folder.rglob("*") if path.is_file() and path.name != ".lock")
    return {str(path): (path.stat().st_size, path.stat().st_mtime) for path in files}


def test_all_problems_of_a_recipe_are_told_at_once(call: Call, recipe: Path) -> None:
    outcome = call("train", recipe, "sed=1", "model.widht=3", "schedule=cosin", "clip=-1")
    assert outcome.code == 2
    assert len(outcome.err.strip().splitlines()) >= 3


def test_train_then_generate_then_show(call: Call, recipe: Path) -> None:
    outcome = call("train", recipe)
    assert outcome.code == 0, outcome.err
    assert "bits/byte" in outcome.err
    assert outcome.out == ""  # progress goes to standard error
    written = call("generate", "runs/tiny", "To be", "--tokens", 5, "--temperature", 0)
    assert written.code == 0
    assert written.out.startswith("To be")
    found = json.loads(call("generate", "runs/tiny", "To", "-n", 2, "--tokens", 3, "--logprobs", 2, "--json").out)
    assert len(found["samples"]) == 2
    assert all(len(sample["logprobs"]) == len(sample["ids"]) for sample in found["samples"])
    facts = json.loads(call("show", "runs/tiny", "--json").out)
    assert facts["state"] == "finished"
    assert facts["step"] == 4
    assert [row["path"] for row in json.loads(call("runs", "--json").out)] == ["runs/tiny"]
    assert "tiny" in call("runs").out
    assert "4" in call("show", "runs/tiny").out


def test_the_printed_configuration_is_a_recipe_that_repeats_the_run(call: Call, recipe: Path) -> None:
    printed = call("config", recipe, "seed=3")
    assert printed.code == 0
    Path("again.toml").write_text(printed.out)
    assert call("config", "again.toml").out == printed.out
    assert json.loads(call("config", recipe, "seed=3", "--json").out)["seed"] == 3


def test_presets_are_listed_with_their_counts(call: Call) -> None:
    rows: list[dict[str, Any]] = json.loads(call("presets", "--json").out)
    assert {row["name"]: row["parameters"] for row in rows}["gpt2"] == 124_439_808
    assert "124,439,808" in call("presets").out


def test_shards_are_built_described_and_shown(call: Call, recipe: Path) -> None:
    assert call("data", "build", "shards", "play.txt", "--tokenizer", "bpe", "--size", 300).code == 0
    stats = json.loads(call("data", "stats", "shards", "--json").out)
    assert "train" in json.dumps(stats)
    assert call("data", "show", "shards", "--context", 8).out.count("\n") >= 9
    refused(call("data", "build", "shards", "play.txt"), "already exists")
    refused(call("data", "stats", "nowhere"), "holds no shards")
    outcome = call("train", recipe, "data.paths=shards", "name=onshards")
    assert outcome.code == 0, outcome.err


def test_a_tokenizer_is_trained_shown_and_used(call: Call, recipe: Path) -> None:
    assert call("tokenizer", "train", "tok.json", "play.txt", "--size", 280).code == 0
    facts = json.loads(call("tokenizer", "show", "tok.json", "--json").out)
    assert facts["kind"] == "bpe"
    assert facts["size"] <= 280
    found = json.loads(call("tokenizer", "encode", "tok.json", "To be <|endoftext|>", "--json").out)
    assert facts["specials"]["<|endoftext|>"] not in found["ids"]
    refused(call("tokenizer", "train", "tok.json", "play.txt"), "already exists")
    refused(call("tokenizer", "train", "t2.json", "play.txt", "--kind", "bep"), "did you mean bpe?")


def test_a_damaged_card_is_named_and_the_other_runs_are_listed(call: Call, recipe: Path) -> None:
    assert call("train", recipe).code == 0
    Path("runs/tiny/model.json").write_text("{")
    refused(call("show", "runs/tiny"), "model.json")
    assert "broken: model.json is not JSON" in call("runs").out


def test_a_folder_that_cannot_be_written_is_named(call: Call, recipe: Path) -> None:
    Path("taken").write_text("a file")
    refused(call("train", recipe, "--runs", "taken"), "taken")
    refused(call("tokenizer", "train", "nowhere/tok.json", "play.txt"), "nowhere is not a folder")


def test_generation_says_when_the_context_is_full(call: Call, recipe: Path) -> None:
    assert call("train", recipe).code == 0
    outcome = call("generate", "runs/tiny", "To be", "--tokens", 60, "--temperature", 0)
    assert outcome.code == 0
    assert "context of 16 tokens is full" in outcome.err
    assert "full" not in call("generate", "runs/tiny", "To be", "--tokens", 60, "--temperature", 0, "--slide").err


def test_logits_refuse_what_is_no_id(call: Call, recipe: Path) -> None:
    from trivium import api
    from trivium.errors import RequestError

    assert call("train", recipe).code == 0
    m = api.load("runs/tiny", device="cpu")
    wrong: list[Any] = [[[999]], [], [[1, 2], [3]], [[0.5]], [-1]]
    for ids in wrong:
        with pytest.raises(RequestError):
            m.logits(ids)


def test_doctor_names_the_versions_and_the_compile_cache(call: Call) -> None:
    facts = json.loads(call("doctor", "--json").out)
    assert facts["torch"].startswith(torch.__version__.split("+")[0])
    assert facts["compile cache"] == "runs/.compile"


def test_a_traceback_only_with_debug(call: Call) -> None:
    from trivium.errors import CheckpointError

    with pytest.raises(CheckpointError):
        call("--debug", "show", "nowhere")


def test_help_answers_within_four_tenths_of_a_second() -> None:
    times = []
    for _ in range(5):
        start = time.perf_counter()
        subprocess.run([sys.executable, "-m", "trivium", "--help"], check=True, capture_output=True, cwd=ROOT)
        times.append(time.perf_counter() - start)
    assert min(times) < 0.4, times


WITHOUT_TORCH = """
import sys
from trivium.cli.main import main
sys.argv = ["trivium", "--help"]
try:
    main()
except SystemExit:
    assert not {"torch", "numpy"} & set(sys.modules)
"""


def test_help_does_without_torch() -> None:
    subprocess.run([sys.executable, "-c", WITHOUT_TORCH], check=True, capture_output=True, cwd=ROOT)
