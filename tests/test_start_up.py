"""What answers without torch, whose import takes seconds, and how long it takes to answer."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

RECIPE = '[data]\npaths = ["text.txt"]\n[budget]\nsteps = 2\n'
WITHOUT: dict[str, tuple[list[str], int]] = {
    "help": (["--help"], 0),
    "presets": (["presets"], 0),
    "config": (["config", "recipe.toml"], 0),
    "a wrong setting": (["config", "recipe.toml", "optim.raet=1"], 2),
    "runs": (["runs"], 0),
    "doctor": (["doctor"], 0),
    "a recipe that is not there": (["train", "none.toml"], 2),
    "a wrong setting of a run": (["train", "recipe.toml", "heads=6"], 2),
    "a model that cannot fit": (["train", "recipe.toml", "model=gpt3-175b"], 2),
    "a device that is not there": (["train", "recipe.toml", "device=tpu"], 2),
    "too many threads": (["train", "recipe.toml", "threads=1000000"], 2),
    "a start that is not there": (["train", "recipe.toml", "start=nowhere"], 2),
    "text that is not there": (["train", "recipe.toml", "data.paths=none.txt"], 2),
}

# As the command line does, and then whether torch came along.
PROBE = "import sys; from trivium.cli.main import main\ntry:\n    main()\nfinally:\n    print('torch' in sys.modules)"


def call(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", PROBE, *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "recipe.toml").write_text(RECIPE)
    (tmp_path / "text.txt").write_text("To be, or not to be. " * 200)
    return tmp_path


@pytest.mark.parametrize("name", list(WITHOUT))
def test_answers_that_need_no_torch_do_not_import_it(folder: Path, name: str) -> None:
    arguments, code = WITHOUT[name]
    found = call(folder, *arguments)
    assert found.returncode == code, found.stderr
    assert found.stdout.splitlines()[-1] == "False"


def test_a_run_and_a_saved_model_are_shown_without_torch(folder: Path) -> None:
    made = ["model=gpt-mini", "model.width=16", "model.context=16", "model.decoder.layers=1", "tokenizer=bytes"]
    trained = call(folder, "train", "recipe.toml", "model.decoder.block.attention.heads=2", *made)
    assert trained.returncode == 0, trained.stderr
    assert call(folder, "import", "runs/recipe", "saved").returncode == 0
    for place, said in (("runs/recipe", "finished"), ("saved", "decoder")):
        found = call(folder, "show", place)
        assert (found.returncode, said in found.stdout) == (0, True), found.stderr
        assert found.stdout.splitlines()[-1] == "False"


def test_importing_the_package_imports_neither_torch_nor_its_compiler(tmp_path: Path) -> None:
    code = (
        "import sys, trivium; a = 'torch' in sys.modules; import trivium.api; print(a, 'torch._dynamo' in sys.modules)"
    )
    found = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert found.stdout.split() == ["False", "False"], found.stderr


def test_building_a_model_does_not_import_the_compiler(tmp_path: Path) -> None:
    code = (
        "import sys, trivium as tv; tv.build('gpt-mini', width=32); tv.build('t5-mini', device='meta'); "
        "print([name for name in ('torch._dynamo', 'sympy') if name in sys.modules])"
    )
    found = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert found.stdout.strip() == "[]", found.stderr


def _fastest(command: list[str], folder: Path, times: int) -> float:
    lengths = []
    for _ in range(times):
        began = time.monotonic()
        subprocess.run(command, cwd=folder, capture_output=True, timeout=120)
        lengths.append(time.monotonic() - began)
    return min(lengths)


@pytest.mark.full
def test_answers_come_at_once(folder: Path) -> None:
    """On an idle machine: 0.4 s for help, 0.7 s without torch, and 0.7 s above torch's own import with it."""
    trivium = [sys.executable, "-m", "trivium"]
    assert _fastest([*trivium, "--help"], folder, 5) < 0.4
    for arguments, _ in WITHOUT.values():
        assert _fastest([*trivium, *arguments], folder, 3) < 0.7, arguments
    torch = _fastest([sys.executable, "-c", "import torch"], folder, 3)
    assert _fastest([sys.executable, "-c", "import trivium.api"], folder, 3) < torch + 0.7
