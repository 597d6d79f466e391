"""One file per evaluation beside a model: `results/NAME-SPLIT.json` in its folder, whole or absent.

A model that is a single file has a folder of its own name in the `results` beside it, and a checkpoint in those of its
run.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from trivium import records, report
from trivium.errors import RequestError
from trivium.evaluation.tasks import Outcome
from trivium.files import json_line, read_inside, write_atomic
from trivium.models.transformer import Transformer, weights
from trivium.text.tokenizer import Tokenizer

_LARGEST = 256 << 20  # bytes of a results file, with its examples


def place(model: Path) -> Path:
    """The folder of a model's results files; a RequestError if it cannot be written, before any work is done."""
    folder = records.results_folder(model)
    there = next(path for path in (folder, *folder.parents) if path.exists())
    if model.exists() and not (there.is_dir() and os.access(there, os.W_OK)):
        raise RequestError(f"the results cannot be written to {folder}; copy or import the model to where they can")
    return folder


def record(
    model_path: Path,
    outcome: Outcome,
    *,
    model: Transformer,
    tokenizer: Tokenizer,
    notes: Mapping[str, Any],
    date: str,
    seconds: float,
) -> dict[str, Any]:
    """Write the results file of an outcome and give its content; `looks` counts the evaluations of this split."""
    path = records.results_folder(model_path) / f"{outcome.name}-{outcome.split}.json"
    before = _looks(path)
    told = asdict(outcome)
    examples = told.pop("examples")
    content: dict[str, Any] = {
        **_plain(told),
        "looks": before + 1,
        "date": date,
        "seconds": round(seconds, 3),
        "model": {"weights": weights_digest(model), "tokenizer": tokenizer.digest, "notes": dict(notes)},
        "examples": _plain(examples),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, json_line(content, indent=1))
    if (model_path / records.CONFIG).is_file():  # the page of a run has its evaluations
        write_atomic(model_path / "report.html", report.page(model_path).encode())
    return content


def weights_digest(model: Transformer) -> str:
    """The sha256 of all weights, by name; how they lie in memory does not matter."""
    hash = hashlib.sha256()
    for name, tensor in sorted(weights(model, shards="gathered").items()):
        hash.update(f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
        flat = tensor.detach().cpu().contiguous().reshape(-1)
        hash.update(flat.view(torch.uint8).numpy().tobytes())
    return hash.hexdigest()


def _read(path: Path) -> dict[str, Any] | None:
    try:
        content = json.loads(read_inside(path.parent, path.name, _LARGEST))
        sound = isinstance(content["looks"], int) and all(isinstance(content[key], str) for key in ("name", "metric"))
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
    return dict(content) if sound else None


def _looks(path: Path) -> int:
    content = _read(path)
    return 0 if content is None else int(content["looks"])


def _plain(value: Any) -> Any:
    """The same for JSON, which has no number for infinity or none at all: null."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value
