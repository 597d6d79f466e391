"""`trivium show` and `eval` of models that came from elsewhere, and how progress is told."""

from __future__ import annotations

import io
import json
import os
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import Call, refused
from tests.evaluation import corpora
from tests.generation import tiny
from tests.hostile import folders
from trivium import api, records
from trivium.cli.render import PlainWatcher
from trivium.errors import RequestError

MODULE = tiny.model("llama-mini", tiny.BYTES, spread=0.5)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """One LLaMA as a Hugging Face folder, a GGUF file and an import, and a corpus."""
    model = api.Model(MODULE, tiny.BYTES, {"step": 9, "chat_template": "x\n" * 99})
    model.save(tmp_path / "own")
    model.export("hf", tmp_path / "hf", say=lambda text: None)
    model.export("gguf", tmp_path / "model.gguf", say=lambda text: None)
    corpora.lay(tmp_path / "data")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(("name", "told"), [("hf", "hf"), ("model.gguf", "gguf"), ("brought", "hf")])
def test_a_published_model_shows_what_is_known_of_it(invoke: Call, home: Path, name: str, told: str) -> None:
    if name == "brought":
        assert invoke("import", "hf", "brought").code == 0
    outcome = invoke("show", name)
    assert (outcome.code, outcome.err) == (0, "")
    lines = dict(line.split(maxsplit=1) for line in outcome.out.splitlines())
    assert (lines["model"], lines["family"], lines["format"]) == (name, "decoder", told)
    assert lines["parameters"] == f"{MODULE.config.parameters():,}"
    assert not {"run", "state", "steps", "report"} & lines.keys()
    facts = json.loads(invoke("show", name, "--json").out)
    assert facts["parameters"] == sum(weight.numel() for weight in MODULE.parameters())
    assert facts["notes"] == json.loads(json.dumps(api.load(home / name, device="cpu").notes))


def test_a_long_note_is_only_begun(invoke: Call, home: Path) -> None:
    outcome = invoke("show", "own")
    assert "step             9\n" in outcome.out
    assert "chat template    x x x" in outcome.out
    assert max(map(len, outcome.out.splitlines())) < 120


def test_what_is_no_model_is_refused(invoke: Call, home: Path) -> None:
    refused(invoke("show", "nowhere"), "nowhere")
    (home / "empty").mkdir()
    refused(invoke("show", "empty"), "neither a model nor a run")


def test_the_results_of_a_file_lie_beside_it_under_its_name(invoke: Call, home: Path) -> None:
    outcome = invoke("eval", "model.gguf", "ptb", "--data-dir", "data", "--device", "cpu")
    assert outcome.code == 0, outcome.err
    assert "written to results/model.gguf/ptb-valid.json" in outcome.err
    (found,) = records.results_of(home / "model.gguf")
    assert found["metric"] in found["scores"]
    own = invoke("eval", "own", "ptb", "--data-dir", "data", "--device", "cpu", "--json")
    assert json.loads(own.out)["scores"] == pytest.approx(found["scores"], rel=1e-5)
    assert records.results_of(home) == []  # those of the folder itself
    assert "ptb valid" in invoke("show", "model.gguf").out


def test_a_place_that_cannot_be_written_is_refused_before_the_work(
    invoke: Call, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (home / "results").write_text("a file is in the way")
    with monkeypatch.context() as patch:
        patch.setattr(api, "load", lambda *given, **options: pytest.fail("the model was loaded"))
        refused(invoke("eval", "model.gguf", "ptb", "--data-dir", "data"), "results/model.gguf", "cannot be written")
        patch.setattr(os, "access", lambda path, mode: mode != os.W_OK)  # permissions do not bind everybody
        refused(invoke("eval", "own", "ptb", "--data-dir", "data"), "own/results", "cannot be written")


@pytest.mark.parametrize(("of", "last"), [(48, "quantise: 100 %"), (5_000_000, "quantise: 100 % of 5.0 MB")])
def test_megabytes_are_said_only_of_bytes(of: int, last: str) -> None:
    file, clock = io.StringIO(), iter(range(0, 1000, 10))
    watch = PlainWatcher(file, clock=lambda: float(next(clock)))
    for at in (of // 2, of):
        watch.tick("quantise", at, of)
    assert file.getvalue().splitlines()[-1] == last


@pytest.mark.parametrize("verb", ["generate", "show", "eval", "chat", "export", "embed"])
def test_help_says_what_a_model_may_be(invoke: Call, verb: str) -> None:
    shown = " ".join(invoke(verb, "--help").out.replace("│", " ").split())
    assert "A run, a saved model, a Hugging Face folder or a .gguf file." in shown


DEEP: Any = []
for _ in range(600):
    DEEP = [DEEP]


def test_a_stopped_run_says_how_far_it_came_and_how_to_go_on(invoke: Call, tmp_path: Path) -> None:
    run = tmp_path / "runs" / "mine"
    run.mkdir(parents=True)
    (run / "config.toml").write_text("[budget]\nsteps = 3000\n[model]\nwidth = 16\nvocab = 300\n")
    (run / "about.json").write_text('{"preset": "gpt-mini"}')
    (run / "metrics.jsonl").write_text('{"kind": "train", "step": 13, "loss": 4.0}\n')
    told = invoke("show", str(run)).out
    assert "preset           gpt-mini\n" in told
    assert "steps            13 of 3,000\n" in told
    assert f"go on with       trivium train {run}\n" in told
    (run / "config.toml").write_text("[budget]\nsteps = 'many'\n[model]\nwidth = 16\nvocab = 300\n")
    assert "steps            13\n" in invoke("show", str(run)).out


@pytest.mark.parametrize(
    "notes",
    [{"valid": "x"}, {"valid": {"loss": "x"}}, {"deep": DEEP}, {"a\ud800": "b\udfff"}, {"\x1b[2J": "\x1b[2J"}],
    ids=["text", "no number", "deep", "half a pair", "escapes"],
)
def test_notes_of_a_stranger_are_shown_as_plain_text(invoke: Call, home: Path, notes: dict[str, Any]) -> None:
    model = api.Model(tiny.model("llama-mini", tiny.BYTES, spread=0.5), tiny.BYTES, notes)
    model.save(home / "own")
    outcome = invoke("show", home / "own")
    assert (outcome.code, outcome.err) == (0, "")
    assert outcome.out.replace("\n", "").isprintable()
    assert api.load(home / "own", device="cpu").notes == notes


def test_results_and_metrics_of_a_stranger_are_shown(invoke: Call, home: Path) -> None:
    folder = home / "own"
    api.Model(tiny.model("llama-mini", tiny.BYTES, spread=0.5), tiny.BYTES, {}).save(folder)
    (folder / "config.toml").touch()
    (folder / "metrics.jsonl").write_text('{"kind": "valid", "step": 1, "loss": 2.0, "bits_per_byte": "x"}\n')
    (folder / "results").mkdir()
    (folder / "results" / "a.json").write_text(json.dumps({"name": "a", "metric": "b", "looks": 1, "score": 10**400}))
    outcome = invoke("show", folder)
    assert (outcome.code, outcome.err) == (0, "")
    assert "2.0000 nats" in outcome.out


def test_a_published_model_is_not_saved_over(home: Path) -> None:
    m = api.Model(tiny.model("llama-mini", tiny.BYTES, spread=0.5), tiny.BYTES, {})
    m.export("hf", home / "made")
    before = (home / "made" / "model.safetensors").read_bytes()
    with pytest.raises(RequestError, match="already exists and is not replaced"):
        api.load(home / "made", device="cpu").save(home / "made")
    assert (home / "made" / "model.safetensors").read_bytes() == before
    with pytest.raises(RequestError, match="'' is not a path"):
        m.save("")


@pytest.mark.parametrize("place", ["", "checkpoints", "checkpoints/step-00000004", "data", "results/new"])
def test_a_run_and_its_parts_are_not_saved_over(home: Path, place: str) -> None:
    run = folders.run(home / "trained", finished=False)
    files = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    m = api.Model(tiny.model("llama-mini", tiny.BYTES, spread=0.5), tiny.BYTES, {})
    said = "already exists and is not replaced" if not place else f"is a part of the run {run.name}; name a place out"
    (home / "link").symlink_to(run / place)
    for folder in (run / place, home / "link"):
        with pytest.raises(RequestError, match=said):
            m.save(folder)
    (home / "elsewhere").mkdir()
    (run / "checkpoints" / "step-00000004").rename(home / "elsewhere" / "step")
    with pytest.raises(RequestError, match="already exists"):
        m.save(home / "elsewhere" / "step")
    (home / "elsewhere" / "step").rename(run / "checkpoints" / "step-00000004")
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == files


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json"])
def test_only_a_saved_model_is_saved_over(home: Path, name: str) -> None:
    m = api.Model(tiny.model("llama-mini", tiny.BYTES, spread=0.5), tiny.BYTES, {})
    theirs = home / "theirs" / name
    theirs.parent.mkdir(parents=True)
    theirs.write_bytes(b"theirs")
    (home / "config.toml").touch()  # a project's, not a run's
    with pytest.raises(RequestError, match="already exists and is not replaced"):
        m.save(home / "theirs")
    assert theirs.read_bytes() == b"theirs"
    assert m.save(home / "mine") == m.save(home / "mine")
