"""What `make demo` says at its end, and the command that an error about a missing package names."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import venv
from pathlib import Path

import pytest

import bootstrap
from trivium.errors import pip_install

ROOT = Path(bootstrap.__file__).resolve().parent


def test_the_activation_that_is_printed_puts_the_command_on_the_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = tmp_path / ".venv"
    venv.create(home, with_pip=False)
    command = home / "bin" / "trivium"
    command.write_text("#!/bin/sh\necho found\n")
    command.chmod(0o755)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("VIRTUAL_ENV", raising=False)
    monkeypatch.setenv("SHELL", "/bin/bash")
    activate, direct = bootstrap.activation(home).split("`")[3::2]
    assert (activate, direct) == ("source .venv/bin/activate", ".venv/bin/trivium")
    for line in (f"{activate} && trivium", direct):
        assert subprocess.run(["bash", "-c", line], capture_output=True, text=True).stdout == "found\n"
    monkeypatch.chdir("/")
    assert f"source {home}/bin/activate" in bootstrap.activation(home)
    monkeypatch.setenv("SHELL", "/usr/bin/fish")
    assert bootstrap.activation(home).count("activate.fish") == 1
    monkeypatch.setenv("VIRTUAL_ENV", str(home))
    assert bootstrap.activation(home) == ""


def test_the_demo_ends_with_the_activation_even_if_it_was_interrupted(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*arguments: str) -> None:
        sys.exit(130)

    monkeypatch.setattr(bootstrap, "install", lambda extra: None)
    monkeypatch.setattr(bootstrap, "run", interrupted)
    monkeypatch.setattr(sys, "argv", ["bootstrap.py", "demo"])
    monkeypatch.delenv("VIRTUAL_ENV", raising=False)
    with pytest.raises(SystemExit):
        bootstrap.main()
    assert "bin/activate" in capsys.readouterr().err


def test_the_readme_names_the_activation_before_the_first_command() -> None:
    text = (ROOT / "README.md").read_text()
    assert text.index("source .venv/bin/activate") < text.index("\ntrivium ")
    assert "trivium[" not in text


def test_the_pip_command_is_that_of_the_python_that_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    for path in (os.path.dirname(sys.executable), "/nowhere"):
        monkeypatch.setenv("PATH", path)
        python, *rest = shlex.split(pip_install("onnx", "onnxscript"))
        assert rest == ["-m", "pip", "install", "onnx", "onnxscript"]
        code = [python, "-c", "import sys; print(sys.prefix)"]
        assert subprocess.run(code, capture_output=True, text=True).stdout.strip() == sys.prefix
