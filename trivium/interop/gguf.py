"""Models in GGUF files: LLaMA and those that are built like it, with their tokenizer."""

# D width, H heads

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from trivium.checkpoints.format import fresh
from trivium.errors import CheckpointError, ConfigError, listed, shown
from trivium.interop.architectures.architecture import first_block, like
from trivium.interop.architectures.llama import QK_EPS
from trivium.interop.fields import Fields
from trivium.interop.foreign import Foreign, Say, Tick
from trivium.interop.gguf_file import GgufFile
from trivium.interop.gguf_text import read_text
from trivium.interop.names import Plan, Rule, Rules, Same, attention, same
from trivium.interop.quants import dequantise
from trivium.models.config import ModelConfig, Stack
from trivium.models.presets.llama import Shape, llama
from trivium.models.transformer import Lay, Transformer, empty, shapes_of, weights
from trivium.parts.options.attention import MultiHeadOptions
from trivium.parts.options.positions import RotaryOptions
from trivium.parts.options.scaling import LinearScaling, Llama3, NoScaling, Scaling, Yarn, plain

FREQUENCIES = "rope_freqs.weight"  # what LLaMA 3.1 and later divide each frequency by

Bias = Literal["all", "inputs", "none"]
Layout = Literal["halves", "interleaved"]

_LAYER, _THEIRS = "decoder.blocks.*", "blk.*"
_CHUNK = 1 << 18  # numbers that are read at a time
_QUERY, _KEY = f"{_LAYER}.attention.query", f"{_LAYER}.attention.key"

NAMES = {
    "embedding": "token_embd",
    **attention(f"{_LAYER}.attention", _THEIRS, "attn_q attn_k attn_v attn_output"),
    f"{_LAYER}.attention.query_norm": f"{_THEIRS}.attn_q_norm",
    f"{_LAYER}.attention.key_norm": f"{_THEIRS}.attn_k_norm",
    f"{_LAYER}.around_attention.norm": f"{_THEIRS}.attn_norm",
    f"{_LAYER}.around_feedforward.norm": f"{_THEIRS}.ffn_norm",
    **{f"{_LAYER}.feedforward.{part}": f"{_THEIRS}.ffn_{part}" for part in ("gate", "up", "down")},
    "decoder.final": "output_norm",
    "output.project": "output",
}


class Kind(NamedTuple):
    """An architecture that is LLaMA but for these."""

    rows: Literal["pairs", "halves"]  # pairs: rows of queries and keys that are turned together lie side by side
    norm: Literal["none", "rms"] = "none"  # of queries and keys


KINDS = {"llama": Kind("pairs"), "qwen2": Kind("halves"), "qwen3": Kind("halves", "rms")}


@dataclass(frozen=True, kw_only=True, slots=True)
class Pairs:
    """Rows of each head as (0, E/2, 1, E/2 + 1, …): halves laid out for interleaved rotation."""

    heads: int

    def read(self, theirs: Tensor) -> tuple[Tensor, ...]:
        return (theirs.reshape(self.heads, -1, 2, *theirs.shape[1:]).transpose(1, 2).reshape(theirs.shape),)

    def write(self, ours: Sequence[Tensor]) -> Tensor:
        return ours[0].reshape(self.heads, 2, -1, *ours[0].shape[1:]).transpose(1, 2).reshape(ours[0].shape)


def rules(config: ModelConfig, kind: Kind) -> Rules:
    """The names of one architecture; where pairs lie side by side already, rows stay as they are."""
    block = first_block(config.decoder)
    heads, position = like(block.attention, MultiHeadOptions), like(block.position, RotaryOptions)
    table = same(NAMES)
    if kind.rows == "pairs" and position.layout == "halves":
        turned = {_QUERY: Pairs(heads=heads.heads), _KEY: Pairs(heads=heads.groups or heads.heads)}
        table = [Rule(rule.ours, rule.theirs, turned.get(rule.ours[0], rule.form)) for rule in table]
    return Rules(table=table, copies={}, ignored=(FREQUENCIES,))


def open_gguf(path: Path, *, say: Say, tick: Tick, lay: Lay = lambda module: None, fill: bool = True) -> Foreign:
    """The model in a GGUF file in float32, whatever the format of its numbers, and its tokenizer."""
    with GgufFile(path) as file:
        name = file.settings.get("general.architecture")
        kind = KINDS.get(name) if isinstance(name, str) else None
        if kind is None:
            raise CheckpointError(
                f"{path} holds the architecture {shown(name, 60)}; trivium reads {', '.join(KINDS)} from GGUF"
            )
        prefix = f"{name}."
        table = {key.removeprefix(prefix): value for key, value in file.settings.items() if key.startswith(prefix)}
        fields = Fields(table, f"{path}: {name}")
        try:
            config = _config(file, fields, kind)
            bare = shapes_of(config)
        except ConfigError as error:
            raise CheckpointError(f"{path} cannot be opened: {error.problems[0]}") from None
        shapes = {tensor: info.shape for tensor, info in file.tensors.items()}
        plan = rules(config, kind).match(shapes, weights(bare), str(path))
        tokenizer, notes = read_text(file.settings, config.vocab, str(path), say=say)
        module = empty(config) if fill else bare
        if fill:
            lay(module)
            _fill(module, file, plan, tick)
    if fields.ignored:
        say(f"{path.name}: not read: {listed(fields.ignored)}")
    facts = {"format": "gguf", "architecture": name, "ignored": list(fields.ignored), **notes}
    return Foreign(module.eval(), tokenizer, facts)


def _fill(module: Transformer, file: GgufFile, plan: Plan, tick: Tick) -> None:
    own = weights(module)
    total, done = sum(info.stop - info.start for info in file.tensors.values()), 0
    for source, (ours,), form in plan.steps:
        if isinstance(form, Same):
            _pour(file, source, own[ours])
        else:
            stored = fresh(file.tensors[source].shape)
            file.read(source, stored.numpy())
            own[ours].copy_(form.read(stored)[0])
        done += file.tensors[source].stop - file.tensors[source].start
        tick("reading the weights", done, total)


def _pour(file: GgufFile, name: str, target: Tensor) -> None:
    """Fill a tensor, whatever its layout and its device, some whole rows at a time: nothing is held twice."""
    format, shape, start, _ = file.tensors[name]
    rows = target if target.ndim > 1 else target[None]  # a row holds whole blocks
    numbers = shape[-1] * math.prod(rows.shape[1:-1])
    step = max(1, _CHUNK // numbers)
    try:
        with file.path.open("rb", buffering=0) as source:
            source.seek(start)
            for first in range(0, len(rows), step):
                part = rows[first : first + step]
                raw = np.empty(format.bytes(part.numel()), np.uint8)
                if source.readinto(raw.data) != raw.size:
                    raise CheckpointError(f"{file.path} became shorter while it was read; fetch it again")
                floats = np.empty(part.shape, np.float32)
                dequantise(format, raw, floats)
                part.copy_(torch.from_numpy(floats))
    except OSError as error:
        raise CheckpointError(f"{file.path} cannot be read: {error.strerror}") from None


def _config(file: GgufFile, fields: Fields, kind: Kind) -> ModelConfig:
    """The configuration; no size goes beyond what the tensors of the file have."""
    layers, width = fields.integer("block_count", 0), fields.integer("embedding_length", 0)
    heads = fields.integer("attention.head_count", 0)
    groups = fields.integer("attention.head_count_kv", heads)
    head = fields.integer("attention.key_length", max(1, width // heads))
    for size in ("attention.value_length", "rope.dimension_count"):
        fields.only(size, head)
    for refused in ("expert_count", "expert_used_count", "attention.sliding_window"):
        fields.only(refused, 0)
    fields.only("attention.causal", True)
    fields.skip("vocab_size")
    rows = _rows(file, "token_embd.weight", width)
    if layers > len(file.tensors) or _rows(file, "blk.0.attn_q.weight", width) != heads * head:
        raise CheckpointError(f"{file.path} is damaged: its settings speak of other tensors than it holds")
    eps = _short(fields.number("attention.layer_norm_rms_epsilon", 1e-5, least=1e-30, most=1))
    if kind.norm == "rms" and eps != QK_EPS:
        raise fields.refusal("attention.layer_norm_rms_epsilon", eps, f"trivium norms queries with {QK_EPS} only")
    theta = _short(fields.number("rope.freq_base", 10_000.0, least=1e-30))
    shape = Shape(
        layers=layers,
        width=width,
        hidden=fields.integer("feed_forward_length", 0),
        heads=heads,
        groups=groups,
        head=head,
        vocab=rows,
        context=fields.integer("context_length", 0),
        eps=eps,
        theta=theta,
        scaling=_scaling(file, fields, theta, head),
        tie="none" if "output.weight" in file.tensors else "all",
        norm=kind.norm,
    )
    bias: Bias = "none"
    if "blk.0.attn_q.bias" in file.tensors:
        bias = "all" if "blk.0.attn_output.bias" in file.tensors else "inputs"
    return like_llama(shape, bias)


def _rows(file: GgufFile, name: str, width: int) -> int:
    """The rows of a matrix that reads or gives the stream."""
    info = file.tensors.get(name)
    if info is None:
        raise CheckpointError(f"{file.path} is not a whole model: {name} is missing; fetch it again")
    if len(info.shape) != 2 or info.shape[1] != width:
        raise CheckpointError(
            f"{file.path}: {name} has shape {list(info.shape)}, which embedding_length {width} denies"
        )
    return info.shape[0]


def _short(number: float) -> float:
    """The shortest decimal that is the same float32: 1e-05 and not 9.999999747378752e-06."""
    return float(str(np.float32(number)))


def _scaling(file: GgufFile, fields: Fields, theta: float, head: int) -> Scaling:
    kind = fields.choice("rope.scaling.type", "none", {word: word for word in ("none", "linear", "yarn")})
    factor = fields.number("rope.scaling.factor", fields.number("rope.scale_linear", 1.0, least=1), least=1)
    original = fields.integer("rope.scaling.original_context_length", 8192)
    fast = fields.number("rope.scaling.yarn_beta_fast", 32.0)
    slow = fields.number("rope.scaling.yarn_beta_slow", 1.0)
    strength = fields.number("rope.scaling.attn_factor", 1.0)
    fields.skip("rope.scaling.finetuned")
    if FREQUENCIES in file.tensors:
        return _llama3(file, theta, head, original)
    if kind == "yarn":
        attention = 0.0 if strength == 1 else strength * (0.1 * math.log(factor) + 1)
        return Yarn(factor=factor, original=original, fast=fast, slow=slow, attention=attention)
    return NoScaling() if factor == 1 else LinearScaling(factor=factor)


def _llama3(file: GgufFile, theta: float, head: int, original: int) -> Scaling:
    """The scaling that gives the stored divisors; the file does not say its settings."""
    if file.tensors[FREQUENCIES].shape != (head // 2,):
        raise CheckpointError(f"{file.path} is damaged: {FREQUENCIES} does not have half of {head} numbers")
    divisors = np.empty(head // 2, np.float32)
    file.read(FREQUENCIES, divisors)
    largest = float(divisors.max(initial=1.0))
    if 1 <= largest < math.inf:
        scaling = Llama3(factor=_short(largest), original=original)
        wanted = np.array(plain(theta, head)) / np.array(scaling.frequencies(theta, head))
        if np.allclose(wanted, divisors, rtol=1e-5, atol=0):
            return scaling
    raise CheckpointError(f"{file.path}: {FREQUENCIES} is not the scaling of LLaMA 3; trivium knows no other there")


def like_llama(shape: Shape, bias: Bias, layout: Layout = "halves") -> ModelConfig:
    """LLaMA in this shape with these biases: Qwen2 has those of queries, keys and values."""
    config = llama(shape)
    block = first_block(config.decoder)
    heads = replace(like(block.attention, MultiHeadOptions), bias=bias)
    turned = replace(like(block.position, RotaryOptions), layout=layout)
    stack = Stack(layers=shape.layers, block=replace(block, attention=heads, position=turned))
    return replace(config, decoder=stack)
