"""What `trivium doctor` tells."""

from __future__ import annotations

import os
import platform
import shutil
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import trivium
from trivium.errors import pip_install
from trivium.training.machine import this_machine

_PACKAGES = ("torch", "numpy", "safetensors", "tokenizers", "rich", "typer", "sacrebleu")


def facts(runs: Path) -> dict[str, Any]:
    """Name and value of everything worth knowing before a run."""
    machine = this_machine()
    kind, number = machine.device("auto")
    here = runs if runs.exists() else Path()
    found: dict[str, Any] = {
        "trivium": trivium.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "device": machine.gpus[number].name if kind == "cuda" else kind,
        "cores": os.cpu_count(),
        "free disk": f"{shutil.disk_usage(here).free / 2**30:.1f} GiB",
        "runs": str(runs),
        "compile cache": str(runs / ".compile"),
    }
    return found | {name: _version(name) for name in _PACKAGES}


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return f"missing: {pip_install(name)}"
