"""What a run writes down of its model and its data when it begins, for those who list and show runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from trivium import records
from trivium.config import kind_of
from trivium.data.shards import Shards
from trivium.files import json_line
from trivium.models.config import ModelConfig
from trivium.models.presets import PRESETS
from trivium.objectives.options import OBJECTIVES
from trivium.text.tokenizer import Tokenizer
from trivium.training.recipe import DEFAULT, Recipe


def preset_of(recipe: Recipe, *layers: Mapping[str, Any]) -> str:
    """The preset that a recipe's model is, or the one that it was changed from; "" if that cannot be known.

    `layers` are the tables that the recipe was read from: the last one that names a preset decides.
    """
    named = [_named(layer.get("model")) for layer in layers]
    name = next((name for name in reversed(named) if name in PRESETS), "")
    equal = [other for other in PRESETS if _alike(recipe.model, other)]
    if name in equal or (not name and equal):
        return name or equal[0]
    if recipe.start:
        start = Path(recipe.start)
        return str(records.about(records.run_of(start) or start).get("preset", ""))
    name = name or DEFAULT
    return f"{name}, changed" if PRESETS[name]().family == recipe.model.family else ""


def _named(model: object) -> str:
    if isinstance(model, Mapping):
        model = model.get("preset", model.get(""))
    return str(model) if isinstance(model, str) else ""


def _alike(model: ModelConfig, name: str) -> bool:
    preset = PRESETS[name]()
    return replace(model, vocab=preset.vocab) == preset


def describe(recipe: Recipe, tokenizer: Tokenizer, shards: Shards, preset: str) -> bytes:
    """The content of about.json."""
    model = recipe.model
    splits = {name: _split(shards.manifest["splits"][name]) for name in ("train", "valid")}
    content = {
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "preset": preset,
        "family": model.family,
        "parameters": model.parameters(),
        "layers": {side: getattr(model, side).layers for side in ("encoder", "decoder") if getattr(model, side).layers},
        "width": model.width,
        "context": model.context,
        "vocab": model.vocab,
        "tokenizer": tokenizer.kind,
        "objective": kind_of(recipe.objective, OBJECTIVES),
        "data": {
            "form": shards.manifest.get("form", "text"),
            "files": [Path(source["path"]).name for source in shards.manifest["sources"]],
            **splits,
        },
    }
    return json_line(content, indent=2)


def _split(split: Mapping[str, Any]) -> dict[str, int]:
    return {key: int(split[key]) for key in ("documents", "tokens", "text_bytes")}
