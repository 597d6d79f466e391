"""Folders in the form of Hugging Face: config.json, safetensors, and a tokenizer if there is one."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from trivium import config as settings
from trivium.errors import CheckpointError, ConfigError, DataError
from trivium.interop import shards
from trivium.interop.architectures import ARCHITECTURES
from trivium.interop.architectures.architecture import Architecture
from trivium.interop.fields import Fields
from trivium.interop.foreign import Foreign, Say, Tick
from trivium.interop.names import SAME, Rules
from trivium.interop.shards import Reader, Stored
from trivium.models.config import ModelConfig
from trivium.models.transformer import Transformer, build, empty, weights
from trivium.text.published import read_tokenizer
from trivium.text.tokenizer import Tokenizer

CONFIG, GENERATION = "config.json", "generation_config.json"
TEXT, TEMPLATE = "tokenizer_config.json", "chat_template.jinja"

_LONGEST = 1 << 20  # bytes of a chat template


def open_folder(folder: Path, *, say: Say, tick: Tick) -> Foreign:
    """The model in a folder: every shape is checked before a tensor is read, and no number is held twice."""
    module, notes = open_model(folder, tick=tick)
    if notes["ignored"]:
        say(f"settings of {folder / CONFIG} that were not read: {', '.join(notes['ignored'])}")
    return Foreign(module, _tokenizer(folder, module.config.vocab, say), notes)


def open_model(folder: Path, *, tick: Tick) -> tuple[Transformer, dict[str, Any]]:
    """The model alone and the notes on it, without looking for a tokenizer."""
    where = shards.within(folder, CONFIG)
    table = shards.json_table(where)
    kind, architecture = _architecture(table, where)
    found = shards.stored(folder)
    fields = Fields(table, str(where))
    fields.only("quantization_config")
    try:
        config = architecture.read(fields, found.keys())
        if config.layers > len(found):  # before the time of building so many is spent
            raise CheckpointError(
                f"{where} asks for {config.layers} layers, more than there are tensors; fetch it again"
            )
        module = filled(config, architecture.rules(config), found, str(folder), tick)
    except ConfigError as error:
        raise CheckpointError(f"{where} cannot be used: {error.problems[0]}") from None
    notes = {
        "format": "hf",
        "architecture": kind,
        "ignored": list(fields.ignored),
        "ids": _special_ids(folder, table),
    }
    template = _template(folder)
    return module, {**notes, "chat_template": template} if template else notes


def filled(config: ModelConfig, rules: Rules, found: Mapping[str, Stored], where: str, tick: Tick) -> Transformer:
    """A model of `config` in evaluation mode with the tensors that `rules` find."""
    shapes = {name: entry.shape for name, entry in found.items()}
    plan = rules.match(shapes, weights(build(config, device="meta")), where)
    reader = Reader(found)
    for step in plan.steps:
        reader.check(step.source)
    for copy, original in plan.copies:
        _same_numbers(reader, copy, original, where)
    module = empty(config)
    own = dict(module.named_parameters())
    done, whole = 0, sum(found[step.source].size for step in plan.steps)
    with torch.no_grad():
        for step in plan.steps:
            if step.form is SAME:  # as it lies in the file, where that is possible
                own[step.ours[0]].data = reader.mapped(step.source)
            else:
                for name, part in zip(step.ours, step.form.read(reader.read(step.source)), strict=True):
                    own[name].copy_(part)
            done += found[step.source].size
            tick("reading weights", done, whole)
    return module.eval()


def _architecture(table: Mapping[str, Any], where: Path) -> tuple[str, Architecture]:
    kind = table.get("model_type")
    if not isinstance(kind, str):
        raise CheckpointError(f"{where} has no model_type; is this the folder of a model?")
    if kind not in ARCHITECTURES:
        nearest = settings.unknown("architecture", kind[:40], ARCHITECTURES)
        raise CheckpointError(f"{where}: {nearest}; trivium reads {', '.join(sorted(ARCHITECTURES))}")
    return kind, ARCHITECTURES[kind]


def _same_numbers(reader: Reader, copy: str, original: str, where: str) -> None:
    """Two names of one tied tensor must not hold two tensors: one of them would be lost."""
    one, other = reader.entries[copy], reader.entries[original]
    same = one.dtype == other.dtype and one.size == other.size
    if not same or any(a != b for a, b in zip(reader.pieces(copy), reader.pieces(original), strict=True)):
        raise CheckpointError(
            f"{where}: {copy} and {original} differ, though {CONFIG} says they are one; correct tie_word_embeddings"
        )


def _tokenizer(folder: Path, vocab: int, say: Say) -> Tokenizer | None:
    """The tokenizer of a folder; one that cannot be used is no reason to do without the model."""
    try:
        tokenizer = read_tokenizer(folder)
    except DataError as error:
        say(f"without a tokenizer: {error}")
        return None
    if tokenizer is None or tokenizer.size <= vocab:
        return tokenizer
    # specials come only from code, so that one beyond the model's ids can never be asked for by a text
    if tokenizer.size - sum(id >= vocab for id in tokenizer.specials.values()) > vocab:
        say(f"without a tokenizer: that of {folder} has {tokenizer.size} ids, and the model {vocab}")
        return None
    return tokenizer


def _template(folder: Path) -> str:
    """The text of the chat template, which is recognised but never run."""
    path = folder / TEMPLATE
    if path.is_file():
        try:
            return shards.within(folder, TEMPLATE).read_bytes()[:_LONGEST].decode(errors="replace")
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error.strerror}") from None
    if not (folder / TEXT).is_file():
        return ""
    found = shards.json_table(shards.within(folder, TEXT)).get("chat_template")
    if isinstance(found, list):  # several by name
        named = [item for item in found if isinstance(item, dict) and item.get("name") == "default"]
        found = named[0].get("template") if named else None
    return found if isinstance(found, str) else ""


def _special_ids(folder: Path, table: Mapping[str, Any]) -> dict[str, list[int]]:
    """The ids that begin, end and fill a text, as the generation settings or else the configuration give them."""
    path = folder / GENERATION
    tables = [shards.json_table(shards.within(folder, GENERATION)) if path.exists() else {}, table]
    result: dict[str, list[int]] = {}
    for name in ("bos", "eos", "pad", "decoder_start"):
        for source in tables:
            value = source.get(f"{name}_token_id")
            numbers: list[Any] = value if isinstance(value, list) else [value]
            if numbers and all(type(number) is int and number >= 0 for number in numbers):
                result[name] = numbers
                break
    return result
