"""A model ready for use: `model.safetensors`, `model.json` and `tokenizer.json` in one folder, tied by hashes."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from trivium import config as settings
from trivium.checkpoints import format
from trivium.checkpoints.format import Manifest, NewerFormat
from trivium.checkpoints.store import Store
from trivium.errors import CheckpointError, ConfigError
from trivium.files import sha256, temporary, write_atomic
from trivium.models.config import ModelConfig
from trivium.models.transformer import Transformer, build, check_weights, empty, load_weights
from trivium.text.tokenizer import Tokenizer, open_tokenizer

FORMAT = 1
WEIGHTS, CARD, TOKENIZER = "model.safetensors", "model.json", "tokenizer.json"


class Bundle(NamedTuple):
    """What a folder holds: a model on the CPU in evaluation mode, its tokenizer, and notes on where it comes from."""

    module: Transformer
    tokenizer: Tokenizer
    notes: Mapping[str, Any]


def save(
    folder: Path, config: ModelConfig, tensors: Mapping[str, Tensor], tokenizer: Tokenizer, notes: Mapping[str, Any]
) -> None:
    """Write a bundle; the card comes last, so that a folder with a card is whole."""
    folder.mkdir(parents=True, exist_ok=True)
    hidden = temporary(folder / WEIGHTS)
    try:
        format.write_tensors(hidden, tensors)  # a full disk leaves the model that was there as it was
        (folder / CARD).unlink(missing_ok=True)
        os.replace(hidden, folder / WEIGHTS)
    finally:
        hidden.unlink(missing_ok=True)
    tokenizer.save(folder / TOKENIZER)
    facts = {
        "format": FORMAT,
        "config": settings.dump(config),
        "weights": sha256(folder / WEIGHTS),
        "tokenizer": tokenizer.digest,
        "notes": dict(notes),
    }
    write_atomic(folder / CARD, (json.dumps(facts, indent=2, ensure_ascii=False) + "\n").encode())


def open_bundle(folder: Path, *, parts: Sequence[type[Any]] = ()) -> Bundle:
    """The model in a folder, every byte checked before a tensor is used."""
    facts = card(folder / CARD)
    weights = folder / WEIGHTS
    if not weights.is_file() or sha256(weights) != facts["weights"]:
        raise CheckpointError(f"{weights} is missing or damaged; restore it from a copy or from a checkpoint")
    tokenizer = open_tokenizer(folder / TOKENIZER)
    if tokenizer.digest != facts["tokenizer"]:
        raise CheckpointError(f"{folder / TOKENIZER} is not the tokenizer this model was trained with; restore it")
    module = model_from(facts["config"], format.read_tensors(weights), str(folder), parts)
    return Bundle(module, tokenizer, facts["notes"])


def model_from(
    table: Mapping[str, Any], tensors: dict[str, Tensor], where: str, parts: Sequence[type[Any]]
) -> Transformer:
    """A model of the configuration in `table`, filled with `tensors`."""
    try:
        config = settings.load(ModelConfig, table, parts=parts)
        check_weights(build(config, device="meta"), tensors)  # shapes before memory
        module = empty(config)
        load_weights(module, tensors)
    except ConfigError as error:
        raise CheckpointError(f"{where} cannot be opened: {error}") from None
    return module.eval()


def mean_weights(store: Store, count: int, *, say: Callable[[str], None]) -> tuple[dict[str, Tensor], list[int]]:
    """The mean of the weights in a run's newest `count` checkpoints, and their steps.

    Damaged ones are named through `say` and not counted; fewer whole ones than `count` are refused.
    """
    listed = {item.step: item.path for item in store.checkpoints()}  # of a step saved twice the newer one stands later
    newest: dict[str, Tensor] = {}
    total: dict[str, Tensor] = {}
    steps: list[int] = []
    for step in sorted(listed, reverse=True):
        try:
            found = weights_in(listed[step], format.verify(listed[step]))
        except NewerFormat:
            raise  # it is whole, and its steps must not be lost in silence
        except CheckpointError as error:
            say(f"skipped a checkpoint: {error}")
            continue
        if steps and {name: tensor.shape for name, tensor in found.items()} != {n: t.shape for n, t in newest.items()}:
            raise CheckpointError(f"{listed[step]} holds other weights than {listed[steps[0]]}; they have no mean")
        newest = newest or found
        for name, tensor in found.items():  # summed in float64: the mean of equal weights is exactly that weight
            total[name] = total[name] + tensor.double() if name in total else tensor.double()
        steps.append(step)
        if len(steps) == count:
            mean = {name: _like(newest[name], total[name] / count) for name in total}
            return mean, steps[::-1]
    raise CheckpointError(
        f"{store.folder} has {len(steps)} whole checkpoints, not {count}; average fewer, or train with "
        f"checkpoint.keep={count}"
    )


def weights_in(folder: Path, manifest: Manifest) -> dict[str, Tensor]:
    """The weights of a checkpoint for use: where the run keeps a moving average, that one."""
    averaged = format.tensors(folder, "average") if "average.safetensors" in manifest.files else {}
    return format.tensors(folder, "model") | averaged


def _like(newest: Tensor, mean: Tensor) -> Tensor:
    return mean.to(newest.dtype) if newest.is_floating_point() else newest  # a count has no mean


def card(path: Path) -> dict[str, Any]:
    """What `model.json` says, checked."""
    try:
        facts = json.loads(path.read_text(encoding="utf-8"))
        version = facts["format"]
        wanted = {"config": dict, "weights": str, "tokenizer": str, "notes": dict}
        sound = type(version) is int and all(isinstance(facts[key], kind) for key, kind in wanted.items())
    except FileNotFoundError:
        raise CheckpointError(f"{path.parent} holds no model: {path.name} is missing") from None
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        sound, version, facts = False, 0, {}
    if not sound:
        raise CheckpointError(f"{path} is not the card of a trivium model; restore it from a copy")
    if version > FORMAT:
        raise CheckpointError(f"{path} was written by a newer trivium (format {version}); upgrade trivium")
    return dict(facts)
