"""`trivium runs`: every run has a line, whatever its files hold; what killed processes left is removed."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import Call
from tests.cli.test_cli import RECIPE
from trivium import api, records
from trivium.files import Lock, temporary
from trivium.training.about import preset_of
from trivium.training.recipe import Recipe
from trivium.training.scratch import prepared, sweep

ROOT = Path(__file__).resolve().parents[2]
CONFIG = 'name = "x"\n[model]\nwidth = 8\n[model.decoder]\nkind = "plain"\n[budget]\nsteps = 1200\n'
METRICS = [
    {"kind": "train", "step": 1, "loss": 5.0},
    {"kind": "valid", "step": 1, "loss": 4.0, "bits_per_byte": 3.25},
    {"kind": "train", "step": 1100, "loss": 3.0},
    {"kind": "valid", "step": 1100, "loss": 2.0, "bits_per_byte": 1.5},
]


def make(folder: Path, **files: Any) -> Path:
    """A run as its files tell of it; a value of None leaves a file out."""
    folder.mkdir(parents=True)
    about = {"started": "2026-03-01T12:00:00+00:00", "preset": "gpt-mini", "family": "decoder", "parameters": 123456}
    content = {"config": CONFIG, "metrics": METRICS, "card": {"notes": {"step": 1100}}, "about": about} | files
    names = {"config": "config.toml", "metrics": "metrics.jsonl", "card": "model.json", "about": "about.json"}
    for key, value in content.items():
        if isinstance(value, str):
            (folder / names[key]).write_text(value)
        elif isinstance(value, list):
            (folder / names[key]).write_text("".join(json.dumps(row) + "\n" for row in value))
        elif value is not None:
            (folder / names[key]).write_text(json.dumps(value))
    return folder


@pytest.fixture
def call(invoke: Call, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Call:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TZ", "UTC")
    return invoke


def lines(call: Call) -> dict[str, list[str]]:
    """The table by the first cell of each line."""
    outcome = call("runs")
    assert (outcome.code, outcome.err) == (0, ""), outcome
    head, *found = outcome.out.splitlines()
    assert re.split(" {2,}", head) == ["run", "state", "started", "preset", "parameters", "steps", "score"]
    return {cells[0]: cells[1:] for cells in (re.split(" {2,}", line) for line in found)}


def test_a_line_has_state_date_preset_size_steps_and_score_with_its_unit(call: Call) -> None:
    make(Path("runs/done"))
    make(Path("runs/stopped"), card=None)
    make(Path("runs/masked"), metrics=[{"kind": "valid", "step": 3, "loss": 2.5, "bits_per_byte": None}])
    translating = make(Path("runs/translating"), about=None)
    (translating / "results").mkdir()
    result = {"name": "multi30k", "split": "test", "metric": "bleu", "score": 31.25, "looks": 1, "examples": []}
    (translating / "results" / "multi30k-test.json").write_text(json.dumps(result))
    busy = make(Path("runs/busy"), card=None, metrics=None)
    with Lock(busy):
        found = lines(call)
    rest = ["2026-03-01 12:00", "gpt-mini", "123,456", "1,100/1,200", "1.5 bits/byte"]
    assert list(found) == ["busy", "done", "masked", "stopped", "translating"]
    assert found["done"] == ["finished", *rest]
    assert found["stopped"] == ["unfinished", *rest]
    assert found["busy"] == ["running", *rest[:3], "0/1,200"]
    assert found["masked"][-1] == "2.5 nats"
    assert found["translating"][0] == "finished"
    assert found["translating"][2:] == ["decoder", "1,100/1,200", "31.25 BLEU"]
    by_name = {Path(row["path"]).name: row for row in json.loads(call("runs", "--json").out)}
    assert by_name["translating"]["score"] == {"value": 31.25, "unit": "BLEU"}
    assert by_name["done"]["best"]["step"] == 1100


def _binary(path: Path) -> None:
    path.write_bytes(os.urandom(200) + b"\xff\n{")


def _text(text: str) -> Callable[[Path], object]:
    return lambda path: path.write_text(text)


DAMAGE: dict[str, Callable[[Path], object]] = {
    "random bytes": _binary,
    "nothing": _text(""),
    "a list": _text("[]"),
    "other types": _text('{"format": [], "notes": 3, "step": "x", "loss": {}, "kind": "valid", "started": 7}'),
    "deep tables": _text("[" * 100_000),
    "a deep key": _text("a" + ".a" * 5000 + " = 1"),
    "a large number": _text("[budget]\nsteps = 0x" + "f" * 9000),
    "wrong TOML types": _text("model = 3\nbudget = 7\n"),
    "escapes": _text(json.dumps({"preset": "\x1b[2J\n\n" * 99, "started": "9999-12-31T23:59:59+00:00"})),
    "a folder": lambda path: path.mkdir(),
    "a pipe": lambda path: os.mkfifo(path),
    "a link to nowhere": lambda path: path.symlink_to("nowhere"),
    "a link to itself": lambda path: path.symlink_to(path.name),
}


@pytest.mark.parametrize("name", ["config.toml", "metrics.jsonl", "model.json", "about.json", ".lock"])
@pytest.mark.parametrize("damage", DAMAGE)
def test_one_broken_run_does_not_break_the_table(call: Call, name: str, damage: str) -> None:
    make(Path("runs/a-whole-one"))
    broken = make(Path("runs/broken"))
    (broken / name).unlink(missing_ok=True)
    DAMAGE[damage](broken / name)
    found = lines(call)
    assert found["a-whole-one"][0] == "finished"
    state = found["broken"][0]
    assert state.split(":")[0] in ("broken", "finished", "unfinished")
    if name != ".lock" and damage in ("random bytes", "nothing", "a list", "a folder", "deep tables", "a pipe"):
        assert state.startswith(f"broken: {name} ")
    assert call("runs", "--json").code == 0


def test_damaged_metrics_are_told_from_a_torn_last_line(call: Call) -> None:
    good = "".join(json.dumps(row) + "\n" for row in METRICS)
    make(Path("runs/torn"), metrics=good + '{"kind": "tra')
    make(Path("runs/new"), metrics="", card=None)
    make(Path("runs/between"), metrics=good + "\0\0\0\n" + good)
    make(Path("runs/steps"), metrics=good.replace('"step": 1,', '"step": "x",'))
    make(Path("runs/gone"), metrics=None)
    found = lines(call)
    assert [found[name][0] for name in ("torn", "new")] == ["finished", "unfinished"]
    assert [found[name][0] for name in ("between", "steps")] == ["broken: metrics.jsonl is damaged"] * 2
    assert found["gone"] == ["broken: metrics.jsonl is missing"]


@pytest.mark.parametrize("name", ["config.toml", "metrics.jsonl", "about.json"])
def test_show_calls_a_run_broken_where_the_table_does(call: Call, name: str) -> None:
    Path("play.txt").write_text("To be, or not to be, that is the question.\n" * 60)
    Path("tiny.toml").write_text(RECIPE)
    assert call("train", "tiny.toml").code == 0
    (Path("runs/tiny") / name).write_text("\x01\n[")
    [reason] = lines(call)["tiny"]
    assert reason.startswith(f"broken: {name} ")
    outcome = call("show", "runs/tiny")
    assert outcome.code == 0, outcome.err
    assert f"state            {reason}\n" in outcome.out
    assert json.loads(call("show", "runs/tiny", "--json").out)["reason"] == reason.removeprefix("broken: ")


def test_a_run_without_its_configuration_is_broken(call: Call) -> None:
    make(Path("runs/headless"), config=None)
    assert lines(call)["headless"] == ["broken: config.toml is missing"]


def test_what_is_no_run_is_not_listed(call: Call) -> None:
    (Path("runs") / ".compile").mkdir(parents=True)
    (Path("runs") / "notes").mkdir()
    assert "No runs in runs" in call("runs").out
    make(Path("runs/my"))
    assert "`trivium show runs/my`" in call("runs", "runs/my").out


WITHOUT_TORCH = """
import sys
from trivium.cli.main import main
sys.argv = ["trivium", "runs", "--json"]
try:
    main()
except SystemExit:
    assert not {"torch", "numpy"} & set(sys.modules)
"""


def test_the_table_does_without_torch(tmp_path: Path) -> None:
    make(tmp_path / "runs" / "one")
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    found = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH], check=True, capture_output=True, cwd=tmp_path, env=environment
    )
    assert json.loads(found.stdout)[0]["state"] == "finished"


def _dead() -> int:
    """The number of a process that has ended."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def test_leftovers_of_killed_processes_are_removed_and_those_of_living_ones_are_not(call: Call) -> None:
    run = make(Path("runs/my"))
    dead = _dead()
    gone = [
        Path(f"runs/.tmp-other-{dead}"),
        Path(f"runs/.tmp-with-dashes-and-1-{dead}"),
        run / f".tmp-model.safetensors-{dead}",
        run / "checkpoints" / f".tmp-step-00000010-{dead}",
    ]
    kept = [Path(f"runs/.tmp-other-{os.getppid()}"), Path("runs/.tmp-none"), Path("runs/.compile")]
    for path in (*gone, *kept):
        path.mkdir(parents=True)
        (path / "file").touch()
    with prepared(Path("runs/new")) as scratch:  # this very process prepares a run
        lines(call)
        assert scratch.is_dir()
    assert not any(path.exists() for path in gone)
    assert all((path / "file").exists() for path in kept)
    left = run / f".tmp-model.json-{dead}"
    left.touch()
    with Lock(run):  # another process writes into the run
        lines(call)
        assert left.exists()
    lines(call)
    assert not left.exists()


def test_a_lock_decides_and_not_the_number_of_a_process_that_is_another_one_by_now(tmp_path: Path) -> None:
    """In a container the next process often has the number of the one before; on a shared disk it is another host's."""
    left = tmp_path / f".tmp-run-{os.getppid()}"
    left.mkdir()
    (left / ".lock").touch()
    held = tmp_path / f".tmp-run-{_dead()}"
    held.mkdir()
    with Lock(held):
        sweep(tmp_path)
        assert (left.exists(), held.exists()) == (False, True)
    sweep(tmp_path)
    assert not held.exists()


def test_elsewhere_only_what_looks_like_a_run_is_removed(tmp_path: Path) -> None:
    """Another program may have left something of such a name in a folder that is not ours alone."""
    foreign, own = (tmp_path / f".tmp-{name}-{_dead()}" for name in ("thesis", "run"))
    (foreign / "chapter").mkdir(parents=True)
    (own / "data").mkdir(parents=True)
    file = tmp_path / f".tmp-notes-{_dead()}"
    file.touch()
    sweep(tmp_path)
    assert (foreign.exists(), file.exists(), own.exists()) == (True, True, False)


def test_a_folder_that_only_has_a_config_is_nobodys_run(tmp_path: Path) -> None:
    """Other programs have a config.toml too, and files of such names."""
    site = tmp_path / "site"
    (site / ".tmp-cache-1").mkdir(parents=True)
    for name in ("config.toml", ".tmp-cache-1/precious", ".tmp-notes-2024"):
        (site / name).touch()
    sweep(tmp_path)
    assert sorted(path.name for path in site.rglob("*")) == [
        ".tmp-cache-1",
        ".tmp-notes-2024",
        "config.toml",
        "precious",
    ]


def test_a_save_into_a_run_is_not_taken_for_a_leftover(tmp_path: Path) -> None:
    run = tmp_path / "runs" / "one"
    (run / "checkpoints").mkdir(parents=True)
    staged = run / f".tmp-.new-model-{_dead()}"
    staged.mkdir()
    sweep(run.parent)
    assert staged.exists()  # the next save removes it, under the lock of savers


def test_a_run_whose_replacement_was_killed_comes_back(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    old, new = (runs / f".tmp-{name}-{_dead()}" for name in ("x.replaced", "x"))
    for folder, mark in ((old, "old"), (new, "new")):
        folder.mkdir(parents=True)
        (folder / "config.toml").write_text(mark)
    sweep(runs)
    assert [path.name for path in runs.iterdir()] == ["x"]
    assert (runs / "x" / "config.toml").read_text() == "old"


def test_the_number_of_no_process_is_that_of_a_dead_one(tmp_path: Path) -> None:
    (left := tmp_path / "runs" / f".tmp-a-{10**20}").mkdir(parents=True)
    sweep(left.parent)
    assert not left.exists()


def test_train_removes_what_another_run_left(call: Call) -> None:
    Path("play.txt").write_text("To be, or not to be, that is the question.\n" * 60)
    Path("tiny.toml").write_text(RECIPE)
    left = Path(f"runs/.tmp-elsewhere-{_dead()}")
    left.mkdir(parents=True)
    outcome = call("train", "tiny.toml")
    assert outcome.code == 0, outcome.err
    assert not left.exists()
    found = lines(call)["tiny"]
    size = sum(weight.numel() for weight in api.load("runs/tiny", device="cpu").module.parameters())
    assert (found[0], found[2:5]) == ("finished", ["gpt-mini, changed", f"{size:,}", "4/4"])
    own = records.about(Path("runs/tiny"))
    assert own["data"]["files"] == ["play.txt"]
    assert own["data"]["train"]["documents"] == 1
    (inside := Path("runs/tiny") / f".tmp-report.html-{_dead()}").touch()
    left.mkdir()
    assert call("train", "runs/tiny", "budget.steps=5").code == 0
    assert not inside.exists()
    assert not left.exists()
    shutil.rmtree("runs")


def test_the_preset_is_the_one_that_a_recipe_names_or_equals() -> None:
    from trivium import config

    def name(*layers: dict[str, Any]) -> str:
        return preset_of(config.load(Recipe, *layers), *layers)

    masked = {"objective": "masked"}
    assert name() == "gpt-mini"
    assert name({"model": "llama-mini"}) == "llama-mini"
    assert name({"model": {"preset": "gpt-mini"}}, {"model": {"preset": "llama-mini"}}) == "llama-mini"
    assert name({"model": {"preset": "bert-mini", "width": 64}}, masked) == "bert-mini, changed"
    assert name({"model": {"width": 64}}) == "gpt-mini, changed"
    assert name({"model": config.dump(config.load(Recipe, {"model": "llama-mini"}).model)}) == "llama-mini"
    by_hand = {"encoder": {"kind": "plain"}, "decoder": {"kind": "none"}}
    assert name({"model": {**by_hand, "embedding": {"tie": "all"}}}, masked) == ""


def test_the_hidden_name_of_this_process_is_its_own(tmp_path: Path) -> None:
    assert temporary(tmp_path / "x").name == f".tmp-x-{os.getpid()}"
