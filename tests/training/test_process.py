"""A run leaves its process as it found it, however it ends."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo.config as dynamo
import torch._functorch.config as functorch

from tests.training.conftest import finish, start
from trivium.errors import Diverged
from trivium.training import process
from trivium.training.process import process_settings, set_current_gpu
from trivium.training.recipe import Recipe

Make = Callable[..., Recipe]
CHANGED: dict[str, Any] = {"deterministic": "on", "compile": "on", "threads": 2}


def _state() -> dict[str, Any]:
    """Everything in this process that a run sets."""
    return {
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "warn only": torch.is_deterministic_algorithms_warn_only_enabled(),
        "threads": torch.get_num_threads(),
        "environment": dict(os.environ),
        "recompiles": dynamo.recompile_limit,
        "autograd cache": functorch.autograd_cache_allow_custom_autograd_functions,
        "random": torch.get_rng_state().tolist(),
        "recursion": sys.getrecursionlimit(),
        "signals": [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)],
    }


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TORCHINDUCTOR_CACHE_DIR", "CUBLAS_WORKSPACE_CONFIG", "TRITON_CACHE_DIR"):
        monkeypatch.delenv(name, raising=False)


def test_inside_a_run_everything_is_set(small: Make, tmp_path: Path) -> None:
    before = _state()
    with process_settings(small(**CHANGED), tmp_path):
        inside = _state()
    assert inside["deterministic"]
    assert inside["threads"] == 2
    assert inside["recompiles"] == 32
    assert inside["autograd cache"]
    assert inside["environment"]["TORCHINDUCTOR_CACHE_DIR"] == str(tmp_path / ".compile")
    assert inside["environment"]["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    assert _state() == before


def test_what_the_compiler_sets_is_restored(small: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for own in (None, "mine"):
        if own is not None:
            monkeypatch.setenv("TRITON_CACHE_DIR", own)
        before = _state()
        with process_settings(small(compile="on"), tmp_path):
            sys.setrecursionlimit(before["recursion"] + 1000)
            os.environ["_TORCHINDUCTOR_PYOBJECT_TENSOR_DATA_PTR"] = "123"
            os.environ["TRITON_CACHE_DIR"] = str(tmp_path)
        assert _state() == before


@pytest.mark.full
@pytest.mark.filterwarnings("ignore")
def test_a_compiled_run_restores_its_process(small: Make, tmp_path: Path) -> None:
    before = _state()
    session = start(small(compile="on", **{"budget.steps": 2}), tmp_path)
    finish(session)
    assert "torch._inductor.compile_fx" in sys.modules
    assert _state() == before


def test_a_users_own_variables_and_modes_stay(small: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "mine")
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        with dynamo.patch(recompile_limit=100):
            with process_settings(small(**CHANGED), tmp_path):
                assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == "mine"
                assert dynamo.recompile_limit == 100
                assert not torch.is_deterministic_algorithms_warn_only_enabled()
            assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == "mine"
            assert torch.is_deterministic_algorithms_warn_only_enabled()
            assert dynamo.recompile_limit == 100
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("ending", ["done", "failed", "closed"])
def test_a_run_restores_its_process(small: Make, tmp_path: Path, ending: str) -> None:
    changes: dict[str, Any] = {"deterministic": "on", "threads": 2}
    if ending == "failed":
        changes |= {"optim.rate": 1e30, "clip": 0.0, "spike": "off"}
    torch.manual_seed(17)
    before = _state()
    session = start(small(**changes), tmp_path)
    assert _state() == before
    if ending == "done":
        finish(session)
    elif ending == "failed":
        with pytest.raises(Diverged):
            finish(session)
    else:
        events = session.events()
        next(event for event in events if type(event).__name__ == "Progress")
        assert torch.are_deterministic_algorithms_enabled()
        events.close()  # type: ignore[attr-defined]
    assert _state() == before


def test_measuring_before_a_run_restores_its_process_too(small: Make, tmp_path: Path) -> None:
    before = _state()
    recipe = small(**{"deterministic": "on", "threads": 2, "budget.steps": 0, "budget.minutes": 0.05})
    assert start(recipe, tmp_path).recipe.threads == 2
    assert _state() == before


@pytest.mark.parametrize(("name", "made"), [("cuda:1", ["cuda:1"]), ("cuda", []), ("cpu", []), ("mps", [])])
def test_a_gpu_that_is_named_becomes_the_current_one(
    name: str, made: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[str] = []
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: found.append(str(device)))
    set_current_gpu(torch.device(name))
    assert found == made


def test_the_allocator_gives_memory_back_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[object] = []
    monkeypatch.setattr(process, "set_allocator", lambda *, keep: calls.append(keep))
    monkeypatch.setattr(process, "trim_heap", lambda: calls.append("trim"))
    with pytest.raises(ZeroDivisionError), process.keep_freed_memory():
        raise ZeroDivisionError
    assert calls == [True, False, "trim"]
