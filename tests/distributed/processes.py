"""Two processes that meet in a folder: started once for a module of tests, each writes down what it found."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

PROCESSES = 2
_LIMIT = 300  # seconds: both may wait for other tests


def once(factory: pytest.TempPathFactory, name: str, work: Callable[[Path], object]) -> Path:
    """A folder that `work` has filled, once for a module of tests and for all workers of pytest-xdist."""
    base = factory.getbasetemp()
    root = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    folder = root / name
    with (root / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "done").exists():
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
            work(folder)
            (folder / "done").touch()
    return folder


def run(worker: str, folder: Path, *arguments: str, limit: float = _LIMIT) -> None:
    """Start `python -m tests.distributed.WORKER RANK FOLDER …` for both ranks, and wait until both are done."""
    root = Path(__file__).resolve().parents[2]
    command = [sys.executable, "-W", "ignore", "-m", f"tests.distributed.{worker}"]
    ranks = [
        subprocess.Popen([*command, str(rank), str(folder), *arguments], cwd=root, stderr=subprocess.PIPE, text=True)
        for rank in range(PROCESSES)
    ]
    errors = [process.communicate(timeout=limit)[1] for process in ranks]
    assert [process.returncode for process in ranks] == [0] * PROCESSES, "\n".join(errors)


def found_in(folder: Path) -> list[Any]:
    """What each of the two processes has saved."""
    return [torch.load(folder / f"{rank}.pt") for rank in range(PROCESSES)]


def meet(rank: int, folder: Path) -> DeviceMesh:
    """Join the other process."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder / 'meeting'}", rank=rank, world_size=PROCESSES)
    return init_device_mesh("cpu", (PROCESSES,))


def leave(rank: int, folder: Path, found: Any) -> None:
    """Write down what was found, and part."""
    torch.save(found, folder / f"{rank}.pt")
    dist.destroy_process_group()
