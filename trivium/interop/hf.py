"""Export to a folder that `transformers` opens: written beside its place, read back, compared, then moved there."""

# B batch, T tokens, D width

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from trivium.errors import CheckpointError, RequestError
from trivium.files import exists_already, sweep_prepared, sync_folder, temporary, write_synced
from trivium.interop import proof, shards
from trivium.interop.alike import resolved
from trivium.interop.architectures import ARCHITECTURES
from trivium.interop.architectures.architecture import Architecture
from trivium.interop.fields import Fields
from trivium.interop.folder import CONFIG, GENERATION, open_model
from trivium.interop.foreign import Say
from trivium.models.config import ModelConfig
from trivium.models.transformer import Transformer, shapes_of, weights
from trivium.objectives.options import PADDING
from trivium.parts.options.embeddings import TokenEmbeddingOptions
from trivium.text.adopt import Frame
from trivium.text.framing import PAD, frame_of
from trivium.text.missing import MissingTokenizer
from trivium.text.published import WRITTEN, write_tokenizer
from trivium.text.tokenizer import Tokenizer

README = "README.md"
_FORCED = "forced_bos"  # how to write, not what the model is: in the generation settings only


class Target(NamedTuple):
    """The architecture that expresses a configuration, and its settings."""

    kind: str
    architecture: Architecture
    table: dict[str, Any]


def export_folder(
    module: Transformer,
    tokenizer: Tokenizer | None,
    folder: Path,
    *,
    say: Say,
    chat: str = "",
    ids: Mapping[str, Sequence[int]] | None = None,
    labels: Sequence[str] = (),
) -> None:
    """Write `module` to a new folder in the form of Hugging Face; `say` gets the largest difference of its logits.

    `chat` is the published text of its chat template, and `ids` are special ids by their role (bos, eos, pad,
    decoder_start), both as the notes of an import hold them; without `ids` they are those that our models have.
    `labels` name the classes of a classifier.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise CheckpointError(exists_already(folder))
    tokenizer = None if isinstance(tokenizer, MissingTokenizer) else tokenizer
    target = _labelled(find(module.config), labels)
    frame = Frame() if tokenizer is None else frame_of(module.config.family, tokenizer)
    special = _special_ids(module.config.vocab, tokenizer, frame, ids)
    folder.parent.mkdir(parents=True, exist_ok=True)
    sweep_prepared(folder, (shards.WEIGHTS, CONFIG, GENERATION, README, *WRITTEN))
    hidden = temporary(folder)
    hidden.mkdir()
    try:
        _write(module, hidden, target, special, own_ids=ids is None)
        if tokenizer is not None:
            embedding = module.config.embedding
            segments = isinstance(embedding, TokenEmbeddingOptions) and embedding.segments > 1
            write_tokenizer(tokenizer, hidden, template=chat, frame=frame, segments=segments)
        back, _ = open_model(hidden, tick=lambda what, done, whole: None)
        gap = proof.compare(module, back)
        sync_folder(hidden)
        if folder.exists():
            folder.rmdir()
        os.rename(hidden, folder)
    except BaseException:
        shutil.rmtree(hidden, ignore_errors=True)
        raise
    sync_folder(folder.parent)
    say(f"exported as {target.kind}; read back, its logits differ by at most {gap:.1e}")


def _labelled(target: Target, labels: Sequence[str]) -> Target:
    """The same with the names of its classes, where it has as many."""
    if len(target.table.get("id2label", ())) != len(labels) or not labels:
        return target
    names = {"id2label": {str(number): label for number, label in enumerate(labels)}}
    return target._replace(table={**target.table, **names, "label2id": {name: at for at, name in enumerate(labels)}})


def find(config: ModelConfig) -> Target:
    """The first architecture whose settings, read back, compute the same; else the nearest one names what it lacks."""
    plain, own = resolved(config), weights(shapes_of(config))

    def reading(architecture: Architecture) -> ModelConfig:
        fields = Fields(architecture.write(plain), CONFIG)
        return architecture.read(fields, architecture.rules(config).names(own))

    found = proof.nearest(config, {kind: partial(reading, one) for kind, one in ARCHITECTURES.items()})
    if found is None:
        raise RequestError("no architecture of Hugging Face is like this model; export a model of another family")
    kind, lost = found
    if lost:
        raise RequestError(f"no architecture of Hugging Face has {proof.lacking(lost)}; the nearest is {kind}")
    return Target(kind, ARCHITECTURES[kind], ARCHITECTURES[kind].write(plain))


def _write(
    module: Transformer, folder: Path, target: Target, special: Mapping[str, Sequence[int]], own_ids: bool
) -> None:
    own = weights(module)
    plain = weights(shapes_of(module.config))
    if own.keys() != plain.keys():
        raise RequestError("this model has adapters or quantised weights; merge them, or export the model it came from")
    rules = target.architecture.rules(module.config)
    shapes = {name: tuple(tensor.shape) for name, tensor in rules.write(plain)}
    shards.write(folder / shards.WEIGHTS, shapes, rules.write(own), tick=lambda size: None)
    numbers = {f"{role}_token_id": found[0] if len(found) == 1 else list(found) for role, found in special.items()}
    # without them `transformers` would take the ids of the architecture's first checkpoint
    nothing = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    plainly = {name: id for name, id in numbers.items() if not name.startswith(_FORCED)}
    # last what the architecture says: RoBERTa counts its positions from the id of the padding on
    _json(folder / CONFIG, {**nothing, **plainly, **target.table, "dtype": "float32"})
    if module.decoder is not None:
        # as here, padding is never written
        never = {"suppress_tokens": list(special["pad"])} if own_ids and "pad" in special else {}
        _json(folder / GENERATION, {"_from_model_config": True, **numbers, **never})
    write_synced(folder / README, _card(module.config, target).encode())


def _special_ids(
    vocab: int, tokenizer: Tokenizer | None, frame: Frame, ids: Mapping[str, Sequence[int]] | None
) -> dict[str, Sequence[int]]:
    """The special ids by their roles: those given, or what the tokenizer says of itself; and a decoder's start."""
    found: dict[str, Sequence[int]] = dict(ids or {})
    if ids is None and tokenizer is not None:
        padding = [tokenizer.specials[name] for name in (PAD, PADDING) if name in tokenizer.specials]
        found = {"bos": [tokenizer.begin], "eos": [tokenizer.end], "pad": padding[:1]}
    found |= {role: [id] for role, id in zip(("decoder_start", _FORCED), frame.start, strict=False)}
    return {role: given for role, given in found.items() if given and max(given) < vocab}


def _json(path: Path, table: Mapping[str, Any]) -> None:
    write_synced(path, (json.dumps(table, indent=2) + "\n").encode())


def _card(config: ModelConfig, target: Target) -> str:
    """The model card: what the model is and how to open it."""
    name = target.table["architectures"][0]
    family = config.family.replace("-", " and ") if config.family == "encoder-decoder" else config.family
    return (
        "---\nlibrary_name: transformers\n---\n\n"
        f"# A {target.kind} model\n\n"
        f"A {family} with {config.parameters():,} parameters: {config.layers} layers of width {config.width}, "
        f"a context of {config.context} tokens and {config.vocab} ids. Trained or adapted with trivium, "
        "and compared with the original on its logits when this folder was written.\n\n"
        f'```python\nfrom transformers import {name}\n\nmodel = {name}.from_pretrained("PATH")\n```\n'
    )
