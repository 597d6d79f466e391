"""Our models as GGUF files, where LLaMA's architecture or Qwen's can say what they are."""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from math import prod
from pathlib import Path
from typing import Any, BinaryIO, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from trivium.errors import CheckpointError, RequestError
from trivium.files import exists_already, sweep_prepared, sync_folder, temporary
from trivium.interop import proof
from trivium.interop.architectures.architecture import first_block, like
from trivium.interop.architectures.llama import QK_EPS
from trivium.interop.foreign import Say
from trivium.interop.gguf import FREQUENCIES, KINDS, Bias, Kind, like_llama, open_gguf, rules
from trivium.interop.gguf_file import MAGIC
from trivium.interop.gguf_text import write_text
from trivium.interop.proof import Mismatch
from trivium.interop.quants import FORMATS, Format, q8_0
from trivium.models.config import ModelConfig
from trivium.models.presets.llama import Shape
from trivium.models.transformer import Transformer, shapes_of, weights
from trivium.parts.options.attention import MultiHeadOptions
from trivium.parts.options.feedforward import GluOptions
from trivium.parts.options.norms import RMSNormOptions
from trivium.parts.options.positions import RotaryOptions
from trivium.parts.options.scaling import LinearScaling, Llama3, NoScaling, Scaling, Yarn, plain
from trivium.text.tokenizer import Tokenizer

Bits = Literal[32, 16, 8]

_ALIGNMENT = 32
_F32, _F16, _Q8_0 = 0, 1, 8
_MATRICES: dict[Bits, int] = {32: _F32, 16: _F16, 8: _Q8_0}
_BIASES: dict[str, Bias] = {"llama": "none", "qwen2": "inputs", "qwen3": "none"}
_FILE_TYPES: dict[Bits, int] = {32: 0, 16: 1, 8: 7}
# How far a weight may lie from itself after writing and reading: as a share of the largest of its block, and at all,
# where the numbers of a float16 grow sparse. Q8_0 has 127 steps to the largest, and a float16 says how wide they are.
_TOLERANCE = {_F32: (0.0, 0.0), _F16: (2**-11, 2**-24), _Q8_0: (1 / 254 + 2**-11, 127 * 2**-24)}


class Target(NamedTuple):
    """The architecture that expresses a model, and its sizes."""

    name: str
    shape: Shape


def export_gguf(
    module: Transformer,
    tokenizer: Tokenizer | None,
    path: Path,
    *,
    say: Say,
    bits: Bits = 32,
    template: str = "",
) -> None:
    """Write a model as a new GGUF file; it appears at `path` only after it was read back and gave the same weights.

    Matrices are kept as they are (32), as F16 (16) or as Q8_0 (8). A model or a tokenizer that the format cannot
    express is a RequestError that names the part. `template` is the text of a chat template.
    """
    if path.is_dir():
        raise CheckpointError(f"{path} is a folder; name a file in it, such as {path / 'model.gguf'}")
    if path.exists():
        raise CheckpointError(exists_already(path))
    target = find(module.config)
    meta = shapes_of(module.config)
    if weights(module).keys() != weights(meta).keys():
        raise RequestError("this model has adapters or quantised weights; merge them, or export the model it came from")
    settings = _settings(target, bits)
    if tokenizer is not None:
        settings |= write_text(tokenizer, module.config.vocab)
    if template:
        settings["tokenizer.chat_template"] = template
    formats = {name: (tensor.shape, _format(tensor, bits)) for name, tensor in _tensors(meta, target)}
    path.parent.mkdir(parents=True, exist_ok=True)
    sweep_prepared(path)
    hidden = temporary(path)
    try:
        with hidden.open("wb") as file:
            _write(file, settings, formats, _tensors(module, target))
            file.flush()
            os.fsync(file.fileno())
        gap = _compare(module, target, hidden, bits)
        os.replace(hidden, path)
    finally:
        hidden.unlink(missing_ok=True)
    sync_folder(path.parent)
    say(f"exported as {target.name}; read back, its logits differ by at most {gap:.1e}")


def find(config: ModelConfig) -> Target:
    """The first architecture that computes the same; else the nearest one names what it lacks."""
    found = proof.nearest(config, {name: partial(_nearest, config, name) for name in KINDS})
    if found is None:
        raise RequestError("no architecture of GGUF that trivium writes is like this model; export it as hf or onnx")
    name, lost = found
    if lost:
        raise RequestError(
            f"GGUF cannot express {proof.lacking(lost)}; the nearest of its architectures is {name}: "
            "export as hf or onnx"
        )
    return Target(name, _shape(config, KINDS[name]))


def _nearest(config: ModelConfig, name: str) -> ModelConfig:
    """The model of this name that is nearest to a configuration."""
    kind, rotary = KINDS[name], like(first_block(config.decoder).position, RotaryOptions)
    layout = rotary.layout if kind.rows == "pairs" else "halves"
    return like_llama(_shape(config, kind), _BIASES[name], layout)


def _shape(config: ModelConfig, kind: Kind) -> Shape:
    """The sizes of the model of this kind that is nearest to a configuration."""
    block, site = first_block(config.decoder), config.site()
    heads, rotary = like(block.attention, MultiHeadOptions), like(block.position, RotaryOptions)
    return Shape(
        layers=config.decoder.layers or 1,
        width=config.width,
        hidden=like(block.feedforward, GluOptions).size(site),
        heads=heads.heads,
        groups=heads.groups or heads.heads,
        head=heads.head_size(site),
        vocab=config.vocab,
        context=config.context,
        eps=QK_EPS if kind.norm == "rms" else like(block.norm, RMSNormOptions).eps,
        theta=rotary.theta,
        scaling=_scaling(rotary.scaling),
        tie="all" if config.tied else "none",
        norm=kind.norm,
    )


def _scaling(scaling: Scaling) -> Scaling:
    """The nearest scaling that settings of a file can hold."""
    if isinstance(scaling, LinearScaling):
        return scaling
    if isinstance(scaling, Llama3):
        return Llama3(factor=scaling.factor, original=scaling.original)
    return Yarn(factor=scaling.factor, original=scaling.original) if isinstance(scaling, Yarn) else NoScaling()


def _tensors(module: Transformer, target: Target) -> Iterator[tuple[str, Tensor]]:
    """Their names and tensors, one by one: what is laid out anew is not held for all layers at once."""
    shape = target.shape
    if isinstance(shape.scaling, Llama3):
        scaled = shape.scaling.frequencies(shape.theta, shape.head)
        divisors = np.array(plain(shape.theta, shape.head)) / np.array(scaled)
        yield FREQUENCIES, torch.tensor(divisors, dtype=torch.float32)
    yield from rules(module.config, KINDS[target.name]).write(weights(module))


def _settings(target: Target, bits: Bits) -> dict[str, Any]:
    name, shape = target
    table: dict[str, Any] = {
        "block_count": shape.layers,
        "context_length": shape.context,
        "embedding_length": shape.width,
        "feed_forward_length": shape.hidden,
        "attention.head_count": shape.heads,
        "attention.head_count_kv": shape.groups,
        "attention.key_length": shape.head,
        "attention.value_length": shape.head,
        "attention.layer_norm_rms_epsilon": shape.eps,
        "rope.dimension_count": shape.head,
        "rope.freq_base": float(shape.theta),
        "vocab_size": shape.vocab,
    }
    if isinstance(shape.scaling, LinearScaling | Yarn):
        kind = "yarn" if isinstance(shape.scaling, Yarn) else "linear"
        table |= {"rope.scaling.type": kind, "rope.scaling.factor": float(shape.scaling.factor)}
    if isinstance(shape.scaling, Yarn | Llama3):
        table["rope.scaling.original_context_length"] = shape.scaling.original
    general = {"general.architecture": name, "general.type": "model", "general.file_type": _FILE_TYPES[bits]}
    if bits == 8:
        general["general.quantization_version"] = 2
    return general | {f"{name}.{key}": value for key, value in table.items()}


def _format(tensor: Tensor, bits: Bits) -> int:
    """The format of a tensor: vectors stay float32, rows that do not fit into blocks stay F16."""
    if tensor.ndim == 1:
        return _F32
    if bits == 8 and tensor.shape[-1] % FORMATS[_Q8_0].numbers:
        return _F16
    return _MATRICES[bits]


def _write(
    file: BinaryIO,
    settings: Mapping[str, Any],
    formats: Mapping[str, tuple[Sequence[int], int]],
    tensors: Iterator[tuple[str, Tensor]],
) -> None:
    file.write(MAGIC + struct.pack("<IQQ", 3, len(formats), len(settings)))
    for key, value in settings.items():
        file.write(_text(key) + _value(value))
    place = 0
    for name, (shape, number) in formats.items():
        file.write(_text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *reversed(shape), number, place))
        place += _padded(FORMATS[number].bytes(prod(shape)))
    file.write(bytes(_padded(file.tell()) - file.tell()))
    for name, tensor in tensors:
        raw = _raw(tensor, FORMATS[formats[name][1]])
        file.write(raw)
        file.write(bytes(_padded(len(raw)) - len(raw)))


def _padded(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def _raw(tensor: Tensor, format: Format) -> memoryview:
    values = tensor.detach().to("cpu", torch.float32).contiguous().numpy()
    if format.name == "F16":
        with np.errstate(over="ignore"):  # what is too large becomes infinite, and is found on reading back
            values = values.astype(np.float16)
    elif format.name == "Q8_0":
        with np.errstate(all="ignore"):
            values = q8_0(values)
    return np.ascontiguousarray(values).reshape(-1).view(np.uint8).data


def _text(text: str) -> bytes:
    raw = text.encode()
    return struct.pack("<Q", len(raw)) + raw


def _value(value: Any) -> bytes:
    """A value behind the number of its type."""
    if isinstance(value, str):
        return struct.pack("<I", 8) + _text(value)
    if isinstance(value, bool):
        return struct.pack("<I?", 7, value)
    if isinstance(value, int):
        return struct.pack("<II", 4, value)
    if isinstance(value, float):
        return struct.pack("<If", 6, value)
    if isinstance(value, np.ndarray):
        kind = {"int32": 5, "float32": 6}[value.dtype.name]
        return struct.pack("<IIQ", 9, kind, len(value)) + value.tobytes()
    texts: Sequence[str] = value
    return struct.pack("<IIQ", 9, 8, len(texts)) + b"".join(map(_text, texts))


def _compare(module: Transformer, target: Target, path: Path, bits: Bits) -> float:
    """The largest difference of logits between a model and the file; a Mismatch unless it holds the same model.

    Every tensor is compared with itself, read back: float32 to the bit, float16 number by number, and Q8_0 by the
    largest number of each block. Only where all are float32 have the logits to be the same.
    """
    again = open_gguf(path, say=lambda sentence: None, tick=lambda what, done, whole: None).module
    for (name, mine), (_, theirs) in zip(_tensors(module, target), _tensors(again, target), strict=True):
        number = _format(mine, bits)
        share, least = _TOLERANCE[number]
        blocks_NE = mine.to("cpu", torch.float32).reshape(-1, FORMATS[number].numbers)
        far_NE = (theirs.reshape(blocks_NE.shape) - blocks_NE).abs()
        if not bool((far_NE <= share * blocks_NE.abs().amax(1, keepdim=True) + least).all()):
            far = float(far_NE.max())
            raise Mismatch(f"the export does not match: {name} is off by {far:.1e}; nothing was written")
    return proof.compare(module, again, rounded=bits != 32)
