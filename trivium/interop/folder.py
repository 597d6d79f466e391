"""Folders in the form of Hugging Face: config.json, safetensors, and a tokenizer if there is one."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trivium import config as settings
from trivium.checkpoints.format import Stored
from trivium.errors import CheckpointError, ConfigError, DataError, listed
from trivium.files import read_inside
from trivium.interop import shards
from trivium.interop.architectures import ARCHITECTURES
from trivium.interop.architectures.architecture import Architecture
from trivium.interop.fields import Fields
from trivium.interop.foreign import Foreign, Say, Tick
from trivium.interop.names import SAME, Rules
from trivium.interop.pooling import MODULES, pooling
from trivium.models.config import ModelConfig
from trivium.models.transformer import Lay, Transformer, empty, shapes_of, weights
from trivium.text.published import read_tokenizer
from trivium.text.tokenizer import Tokenizer

CONFIG, GENERATION = "config.json", "generation_config.json"
TEXT, TEMPLATE = "tokenizer_config.json", "chat_template.jinja"

_LONGEST = 1 << 20  # bytes of a chat template
_CLASSES = 100_000


def open_folder(folder: Path, *, say: Say, tick: Tick, lay: Lay = lambda module: None, fill: bool = True) -> Foreign:
    """The model in a folder: every shape is checked before a tensor is read, and no number is held twice."""
    module, notes = open_model(folder, tick=tick, lay=lay, fill=fill)
    if notes["ignored"]:
        say(f"settings of {folder / CONFIG} that were not read: {listed(notes['ignored'])}")
    sentences = pooling(folder)
    if sentences.get("unread"):
        say(f"steps of {folder / MODULES} that were not read: {listed(sentences['unread'])}")
    if sentences:
        notes["sentences"] = sentences
    return Foreign(module, _tokenizer(folder, module.config.vocab, say), notes)


def open_model(
    folder: Path, *, tick: Tick, lay: Lay = lambda module: None, fill: bool = True
) -> tuple[Transformer, dict[str, Any]]:
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
        hint = _hint(table, architecture.write(config))
        module = filled(config, architecture.rules(config), found, str(folder), tick, lay, hint, fill=fill)
    except ConfigError as error:
        raise CheckpointError(f"{where} cannot be used: {error.problems[0]}") from None
    notes = {
        "format": "hf",
        "architecture": kind,
        "ignored": list(fields.ignored),
        "ids": _special_ids(folder, table),
    }
    template, labels = _template(folder), _labels(table)
    notes |= {"chat_template": template} if template else {}
    return module, notes | ({"labels": labels} if labels else {})


def _labels(table: Mapping[str, Any]) -> list[str]:
    """The names of the classes in their order; none where they are not all there."""
    found = table.get("id2label")
    if not isinstance(found, dict) or not 0 < len(found) <= _CLASSES:
        return []
    labels = [found.get(str(number)) for number in range(len(found))]
    return [label for label in labels if isinstance(label, str)] if all(isinstance(x, str) for x in labels) else []


def filled(
    config: ModelConfig,
    rules: Rules,
    found: Mapping[str, Stored],
    where: str,
    tick: Tick,
    lay: Lay,
    hint: str = "",
    *,
    fill: bool = True,
) -> Transformer:
    """A model of `config` in evaluation mode with the tensors that `rules` find, or else a refusal with the `hint`."""
    shapes, bare = {name: entry.shape for name, entry in found.items()}, shapes_of(config)
    plan = rules.match(shapes, weights(bare), where, hint=hint)
    for step in plan.steps:
        shards.check(step.source, found[step.source])
    for copy, original in plan.copies:
        _same_numbers(found, copy, original, where)
    if not fill:
        return bare.eval()
    module = empty(config)
    lay(module)
    own = weights(module)
    done, whole = 0, sum(found[step.source].size for step in plan.steps)
    for source, ours, form in plan.steps:
        if form is SAME:
            found[source].pour(own[ours[0]])
        else:
            for name, part in zip(ours, form.read(found[source].read()), strict=True):
                own[name].copy_(part)
        done += found[source].size
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


def _hint(table: Mapping[str, Any], ours: Mapping[str, Any]) -> str:
    """What to do where tensors do not fit, if the model was saved with another head than the one that we have."""
    classes = table.get("architectures")
    theirs, mine = classes[0] if isinstance(classes, list) and classes else None, ours["architectures"][0]
    if not isinstance(theirs, str) or not theirs.isidentifier() or theirs == mine:
        return ""
    return f"{CONFIG} calls it {theirs[:80]}, and trivium opens {mine} there: fetch one of those"


def _same_numbers(found: Mapping[str, Stored], copy: str, original: str, where: str) -> None:
    """Two names of one tied tensor must not hold two tensors: one of them would be lost."""
    one, other = found[copy], found[original]
    same = one.kind == other.kind and one.size == other.size
    if not same or any(a != b for a, b in zip(one.pieces(), other.pieces(), strict=True)):
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
    if path.exists():
        try:
            return read_inside(folder, TEMPLATE, _LONGEST).decode(errors="replace")
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
