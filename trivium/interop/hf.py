"""Export to a folder that `transformers` opens: written beside its place, read back, compared, then moved there."""

# B batch, T tokens, D width

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from trivium.errors import CheckpointError, ConfigError, RequestError, TriviumError
from trivium.files import sync_folder, temporary, write_synced
from trivium.interop import shards
from trivium.interop.alike import differences, resolved
from trivium.interop.architectures import ARCHITECTURES
from trivium.interop.architectures.architecture import Architecture
from trivium.interop.fields import Fields
from trivium.interop.folder import CONFIG, GENERATION, open_model
from trivium.interop.foreign import Say
from trivium.models.config import ModelConfig
from trivium.models.transformer import Transformer, build, weights
from trivium.parts.output import NoOutput
from trivium.parts.sentence import PooledSentence
from trivium.text.missing import MissingTokenizer
from trivium.text.published import write_tokenizer
from trivium.text.tokenizer import Tokenizer

_NEAR = 1e-5  # of the largest logit: the numbers are the same, only the order of a sum may differ


class Target(NamedTuple):
    """The architecture that expresses a configuration, and its settings."""

    kind: str
    architecture: Architecture
    table: dict[str, Any]


class Mismatch(TriviumError):
    """An export that was read back gave other logits; nothing was written."""


def export_folder(
    module: Transformer,
    tokenizer: Tokenizer | None,
    folder: Path,
    *,
    say: Say,
    chat: str = "",
    ids: Mapping[str, Sequence[int]] | None = None,
) -> None:
    """Write `module` to a new folder in the form of Hugging Face; `say` gets the largest difference of its logits.

    `chat` is the published text of its chat template, and `ids` are special ids by their role (bos, eos, pad,
    decoder_start), both as the notes of an import hold them; without `ids` a text has the tokenizer's end around it.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise CheckpointError(f"{folder} already exists; delete it or name another folder")
    tokenizer = None if isinstance(tokenizer, MissingTokenizer) else tokenizer
    target = find(module.config)
    special = dict(ids) if ids is not None else _ends(tokenizer)
    folder.parent.mkdir(parents=True, exist_ok=True)
    hidden = temporary(folder)
    shutil.rmtree(hidden, ignore_errors=True)
    hidden.mkdir()
    try:
        _write(module, hidden, target, special)
        if tokenizer is not None:
            write_tokenizer(tokenizer, hidden, template=chat)
        gap = _compare(module, hidden)
        sync_folder(hidden)
        if folder.exists():
            folder.rmdir()
        os.rename(hidden, folder)
    except BaseException:
        shutil.rmtree(hidden, ignore_errors=True)
        raise
    sync_folder(folder.parent)
    say(f"exported as {target.kind}; read back, its logits differ by at most {gap:.1e}")


def find(config: ModelConfig) -> Target:
    """The first architecture whose settings, read back, compute the same; else the nearest one names what it lacks."""
    nearest: tuple[list[str], str] | None = None
    plain, own = resolved(config), weights(build(config, device="meta"))
    for kind, architecture in ARCHITECTURES.items():
        try:
            table = architecture.write(plain)
            lost = differences(config, architecture.read(Fields(table, CONFIG), architecture.rules(config).names(own)))
        except (CheckpointError, ConfigError):
            continue  # it cannot even be said in its terms
        if not lost:
            return Target(kind, architecture, table)
        if nearest is None or len(lost) < len(nearest[0]):
            nearest = lost, kind
    if nearest is None:
        raise RequestError("no architecture of Hugging Face is like this model; export a model of another family")
    lost, kind = nearest
    more = f" (and {len(lost) - 1} more)" if len(lost) > 1 else ""
    raise RequestError(f"no architecture of Hugging Face has model.{lost[0]}{more}; the nearest is {kind}")


def _write(module: Transformer, folder: Path, target: Target, special: Mapping[str, Sequence[int]]) -> None:
    own = weights(module)
    plain = weights(build(module.config, device="meta"))
    if own.keys() != plain.keys():
        raise RequestError("this model has adapters or quantised weights; merge them, or export the model it came from")
    rules = target.architecture.rules(module.config)
    shapes = {name: tuple(tensor.shape) for name, tensor in rules.write(plain)}
    shards.write(folder / shards.WEIGHTS, shapes, rules.write(own), tick=lambda size: None)
    numbers = {f"{role}_token_id": found[0] if len(found) == 1 else list(found) for role, found in special.items()}
    # without them `transformers` would take the ids of the architecture's first checkpoint
    nothing = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    # last what the architecture says: RoBERTa counts its positions from the id of the padding on
    _json(folder / CONFIG, {**nothing, **numbers, **target.table, "dtype": "float32"})
    if module.decoder is not None:
        _json(folder / GENERATION, {"_from_model_config": True, **numbers})
    write_synced(folder / "README.md", _card(module.config, target).encode())


def _ends(tokenizer: Tokenizer | None) -> dict[str, list[int]]:
    """Our documents begin and end with one id; a model without a tokenizer has no such ids."""
    return {} if tokenizer is None else {"bos": [tokenizer.end], "eos": [tokenizer.end]}


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


def _compare(module: Transformer, folder: Path) -> float:
    """The largest difference of logits between a model and the folder that holds it, on random ids."""
    back, _ = open_model(folder, tick=lambda what, done, whole: None)
    with torch.no_grad():
        pairs = list(zip(_logits(module), _logits(back.to(module.device)), strict=True))
    gap = max(float((mine.float() - theirs.float()).abs().max()) for mine, theirs in pairs)
    most = max(float(mine.float().abs().max()) for mine, _ in pairs)
    # a half-precision model is computed in its own precision, and its export in float32
    near = max(_NEAR, 8 * torch.finfo(module.embedding.weight.dtype).eps) * max(most, 1.0)
    if not gap <= near:
        raise Mismatch(f"the export gave logits that differ by {gap:.1e}; nothing was written")
    return gap


def _logits(module: Transformer) -> list[Tensor]:
    """What every head of a model says of the same random ids, and its last states where it has none."""
    length = min(module.config.context, 32)
    generator = torch.Generator().manual_seed(0)
    tokens_BT = torch.randint(module.config.vocab, (2, length), generator=generator).to(module.device)
    training = module.training
    module.eval()
    source = {"source": tokens_BT.flip(1)} if module.config.family == "encoder-decoder" else {}
    hidden_BTD = module(tokens_BT, **source).hidden
    result = [hidden_BTD if isinstance(module.config.output, NoOutput) else module.head.logits(hidden_BTD)]
    if module.sentence is not None:
        result.append(cast(PooledSentence, module.sentence).logits(hidden_BTD))
    module.train(training)
    return result
