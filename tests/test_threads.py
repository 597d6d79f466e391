"""How long waiting threads spin is decided before torch is loaded, or said where it is too late."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.generation import tiny
from trivium import api, threads
from trivium.threads import SETTING, SPINS

LATE = """
import os, sys
os.getloadavg = lambda: ({load}, 0, 0)
{first}
import trivium as tv
for _ in range(2):
    tv.load(sys.argv[1], device="cpu")
print(os.environ.get("GOMP_SPINCOUNT"))
"""


def ran(code: str, *arguments: str, **more: str) -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if name not in (SETTING, "OMP_WAIT_POLICY")}
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(command, env=clean | more, capture_output=True, text=True, timeout=120, check=True)


def test_importing_trivium_before_torch_lets_threads_yield() -> None:
    code = f"import trivium, os, torch; print(os.environ[{SETTING!r}])"
    assert ran(code).stdout.strip() == str(SPINS)
    assert ran(code.replace("trivium,", "trivium.cli.main,")).stdout.strip() == str(SPINS)


def test_what_the_user_set_stays() -> None:
    code = f"import trivium, os; print(os.environ.get({SETTING!r}))"
    assert ran(code, GOMP_SPINCOUNT="7").stdout.strip() == "7"
    assert ran(code, OMP_WAIT_POLICY="active").stdout.strip() == "None"


@pytest.mark.parametrize(("load", "first", "times"), [(9.0, "import torch", 1), (0.0, "import torch", 0), (9.0, "", 0)])
def test_the_way_out_is_said_once_on_a_busy_machine(tmp_path: Path, load: float, first: str, times: int) -> None:
    api.Model(tiny.model("llama-mini", tiny.BYTES, spread=0.5), tiny.BYTES, {}).save(tmp_path / "model")
    found = ran(LATE.format(load=load, first=first), str(tmp_path / "model"))
    assert found.stderr.count(f"import trivium before torch, or set {SETTING}={SPINS}") == times, found.stderr
    assert found.stdout.strip() == ("None" if first else str(SPINS))


def test_a_machine_without_a_load_average_is_not_called_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown() -> tuple[float, float, float]:
        raise OSError

    monkeypatch.setattr(os, "getloadavg", unknown)
    monkeypatch.setattr(threads, "_late", True)
    assert threads.advice() == ""
