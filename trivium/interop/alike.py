"""Whether two configurations compute the same, whatever they leave to defaults."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Any

from trivium import config as settings
from trivium.errors import shown
from trivium.models.config import BlockStack, ModelConfig, Stack
from trivium.models.options import AnyBlock, Block, Parallel
from trivium.parts.options.attention import MultiHeadOptions
from trivium.parts.options.embeddings import TokenEmbeddingOptions
from trivium.parts.options.feedforward import GluOptions, MlpOptions
from trivium.parts.options.positions import RotaryOptions
from trivium.parts.options.scaling import NoScaling, Ntk
from trivium.parts.site import Site

# settings that only training reads
_TRAINING = ("dropout", "variational_dropout", "word_dropout", "unigram_noise", "init", "fixed")


def differences(one: ModelConfig, other: ModelConfig) -> list[str]:
    """The dotted keys in which two configurations differ in use, with the values of the first."""
    mine, theirs = _leaves(one), _leaves(other)
    keys = [key for key in mine if key not in theirs or mine[key] != theirs[key]]
    keys += [key for key in theirs if key not in mine]
    # where the kind of a part differs, its other settings have nothing to be compared with
    kinds = [key.removesuffix("kind") for key in keys if key.endswith(".kind")]
    keys = [key for key in keys if key.endswith(".kind") or not any(key.startswith(kind) for kind in kinds)]
    return [f"{key} = {shown(mine.get(key))}" if key in mine else key for key in keys]


def _leaves(config: ModelConfig) -> dict[str, Any]:
    plain = resolved(config)
    table = settings.dump(plain)
    result = {}
    for side in ("encoder", "decoder"):
        stack = getattr(plain, side)
        if isinstance(stack, BlockStack):
            table[side] = {"kind": table[side]["kind"], "layers": stack.layers, **_by_layer(stack)}
    for key, value in settings.flat(table).items():
        if not any(part in _TRAINING for part in key.split(".")):
            result[key] = value
    return result


def _by_layer(stack: BlockStack) -> Mapping[str, Any]:
    """The block of all layers, and of each layer that differs from the first one."""
    dumps = [settings.dump(Stack(block=block))["block"] for block in stack.blocks()]
    others = {f"layer {layer}": dump for layer, dump in enumerate(dumps) if dump != dumps[0]}
    return {"block": dumps[0], **others}


def resolved(config: ModelConfig) -> ModelConfig:
    """The same model with every 0 that means a rule replaced by what the rule gives, and an equal one simpler."""
    site = config.site()
    changes: dict[str, Any] = {}
    for side in ("encoder", "decoder"):
        stack = getattr(config, side)
        if isinstance(stack, BlockStack):
            variants = {name: _block(block, site) for name, block in stack.variants.items()}
            changes[side] = replace(stack, block=_block(stack.block, site), variants=variants)
    embedding = config.embedding
    if isinstance(embedding, TokenEmbeddingOptions) and config.family != "encoder-decoder":
        changes["embedding"] = replace(embedding, tie="all" if config.tied else "none")
    return replace(config, **changes)


def _block(block: AnyBlock, site: Site) -> AnyBlock:
    if not isinstance(block, Block | Parallel):
        return block
    parts = {name: _part(part, site) for name, part in _parts(block) if is_dataclass(part)}
    if isinstance(block.position, RotaryOptions) and isinstance(block.position.scaling, Ntk):
        size = int(block.attention.head_size(site) * block.position.share)
        theta = block.position.theta * block.position.scaling.factor ** (size / (size - 2))
        parts["position"] = replace(block.position, theta=theta, scaling=NoScaling())
    return replace(block, **parts)


def _parts(block: Block | Parallel) -> Iterator[tuple[str, Any]]:
    for field in fields(block):
        yield field.name, getattr(block, field.name)


def _part(part: Any, site: Site) -> Any:
    if isinstance(part, MultiHeadOptions):
        size = part.head_size(site)
        window = 0 if part.window >= site.context else part.window
        return replace(part, groups=part.groups or part.heads, head=size, value=part.value or size, window=window)
    if isinstance(part, GluOptions):
        return replace(part, hidden=part.size(site), multiple=1)
    if isinstance(part, MlpOptions):
        return replace(part, hidden=part.size(site))
    return part
