"""Checkpoints of llama2.c: the older format without a name, and version 1; the tokenizer lies beside them."""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator
from io import BufferedReader
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from trivium.errors import CheckpointError, ConfigError, DataError
from trivium.files import read_inside
from trivium.interop.foreign import Foreign, Say, Tick
from trivium.interop.gguf import Pairs
from trivium.models.presets.llama import Shape, llama
from trivium.models.transformer import Lay, empty, shapes_of, weights
from trivium.parts.site import MOST
from trivium.text.adopt import Frame, Roles
from trivium.text.library import SPACE
from trivium.text.sentencepiece import BYTE, CONTROL, NORMAL, UNKNOWN, Scored, bpe
from trivium.text.tokenizer import LARGEST, Tokenizer

_MAGIC = 0x616B3432  # "ak42"
_SIZES = "<7i"  # width, hidden, layers, heads, groups, vocabulary, context
_HEADER = 256  # bytes of version 1 before the numbers
_LONGEST = 1024  # bytes of a piece: pairs that make a longer one would take too long to find
_CHUNK = 1 << 18  # numbers that are read at a time
_BEGIN = "<s>"

# In the order of the older format; a star is the layer, and all layers of one tensor lie together.
_LAYER = "decoder.blocks.*"
_NORMS = (f"{_LAYER}.around_attention.norm.weight", f"{_LAYER}.around_feedforward.norm.weight")
_ATTENTION = tuple(f"{_LAYER}.attention.{part}.weight" for part in ("query", "key", "value", "out"))
_FEEDFORWARD = tuple(f"{_LAYER}.feedforward.{part}.weight" for part in ("gate", "down", "up"))
_FIRST, _FINAL, _OUTPUT = "embedding.weight", "decoder.final.weight", "output.project.weight"
_TABLES = ""  # two tables of cosines and sines, which nobody reads


class _Header(NamedTuple):
    shape: Shape
    order: tuple[str, ...]  # of the tensors
    start: int  # where they begin


def open_llama2c(path: Path, *, say: Say, tick: Tick, lay: Lay = lambda module: None, fill: bool = True) -> Foreign:
    """The model in a llama2.c file, and the tokenizer of `tokNNN.bin` (NNN ids) or `tokenizer.bin` beside it."""
    try:
        with path.open("rb") as file:
            return _open(path, file, tick, lay, fill)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from None


def _open(path: Path, file: BufferedReader, tick: Tick, lay: Lay, fill: bool) -> Foreign:
    header = _header(path, file.read(_HEADER))
    shape = header.shape
    held = header.start + 4 * sum(_numbers(name, shape) for name in header.order)
    size = path.stat().st_size
    if size != held:  # before a model of that size is made
        raise CheckpointError(
            f"{path} is damaged or no llama2.c file: it has {size} bytes, its header asks for {held}; fetch it again"
        )
    try:
        config = llama(shape)
        own = weights(shapes_of(config))
    except ConfigError as error:
        raise CheckpointError(f"{path} cannot be opened: {error.problems[0]}") from None
    names = list(_each(header.order, shape.layers))
    assert {name for name in names if name} == own.keys()
    module = empty(config) if fill else shapes_of(config)
    if fill:
        lay(module)  # before it is filled: nothing is held twice
    own = weights(module)
    file.seek(header.start)
    for done, name in enumerate(names if fill else []):
        if name:
            _read(path, file, own[name], _form(name, shape))
        else:
            file.seek(4 * _numbers(_TABLES, shape), 1)
        tick("reading the weights", done + 1, len(names))
    notes = {"format": "llama2.c", "architecture": "llama", "ignored": [], "ids": {"bos": [1], "eos": [1]}}
    return Foreign(module.eval(), _tokenizer(path, shape.vocab), notes)


def _header(path: Path, raw: bytes) -> _Header:
    """What the first bytes say, every size bounded."""
    if raw[:2] in (b"PK", b"\x80\x02", b"\x80\x03", b"\x80\x04"):
        raise CheckpointError(f"{path} is a pickle, which can run code; name a folder with safetensors instead")
    if len(raw) < 64:
        raise CheckpointError(f"{path} is too short to be a llama2.c file; fetch it again")
    order = (_FIRST, _NORMS[0], *_ATTENTION, _NORMS[1], *_FEEDFORWARD, _FINAL, _TABLES)
    if struct.unpack_from("<I", raw)[0] != _MAGIC:
        sizes, start = struct.unpack_from(_SIZES, raw), struct.calcsize(_SIZES)
        tied = sizes[5] > 0
    else:
        version = struct.unpack_from("<i", raw, 4)[0]
        if version != 1:
            kind = " (int8)" if version == 2 else ""
            raise CheckpointError(f"{path} is of llama2.c's version {version}{kind}; export it as version 0 or 1")
        sizes, start = struct.unpack_from(_SIZES, raw, 8), _HEADER
        tied = raw[36] != 0
        order = (*_NORMS, _FINAL, _FIRST, *_ATTENTION, *_FEEDFORWARD)
    width, hidden, layers, heads, groups, vocab, context = sizes
    vocab = abs(vocab)  # in the older format a negative one means an output matrix of its own
    bounded = all(1 <= size <= MOST for size in (width, hidden, layers, heads, groups, vocab, context))
    if not bounded or width % heads or heads % groups:
        raise CheckpointError(f"{path} is damaged or no llama2.c file: its sizes are {sizes}; fetch it again")
    shape = Shape(layers, width, hidden, heads, groups, width // heads, vocab, context, tie="all" if tied else "none")
    return _Header(shape, order if tied else (*order, _OUTPUT), start)


def _numbers(name: str, shape: Shape) -> int:
    """How many numbers lie under a name, all layers together."""
    rows = {
        _TABLES: shape.context * (shape.head // 2) * 2,
        _FIRST: shape.vocab * shape.width,
        _OUTPUT: shape.vocab * shape.width,
        _FINAL: shape.width,
    }
    if name in rows:
        return rows[name]
    if name in _NORMS:
        return shape.layers * shape.width
    if name in _FEEDFORWARD:
        return shape.layers * shape.width * shape.hidden
    heads = shape.groups if name in _ATTENTION[1:3] else shape.heads
    return shape.layers * shape.width * heads * shape.head


def _each(order: tuple[str, ...], layers: int) -> Iterator[str]:
    for name in order:
        yield from (name.replace("*", str(layer)) for layer in range(layers if "*" in name else 1))


def _form(name: str, shape: Shape) -> Pairs | None:
    """Queries and keys lie as Meta's do, pairs side by side."""
    heads = {"query": shape.heads, "key": shape.groups}.get(name.split(".")[-2])
    return None if heads is None else Pairs(heads=heads)


def _read(path: Path, file: BufferedReader, target: Tensor, form: Pairs | None) -> None:
    """Fill a tensor, whatever its layout and its device, some whole rows at a time; one with a form as a whole."""
    step = len(target) if form is not None else max(1, _CHUNK * len(target) // max(1, target.numel()))
    for part in torch.split(target, step):
        stored = torch.empty(part.shape)
        view = stored.numpy().reshape(-1).view(np.uint8).data
        if file.readinto(view) != len(view):
            raise CheckpointError(f"{path} became shorter while it was read; fetch it again")
        part.copy_(stored if form is None else form.read(stored)[0])


def _tokenizer(path: Path, size: int) -> Tokenizer | None:
    found = next((file for name in (f"tok{size}.bin", "tokenizer.bin") if (file := path.parent / name).is_file()), None)
    if found is None:
        return None
    try:
        pieces = list(_pieces(read_inside(found.parent, found.name, LARGEST), size))
        if len({piece.text for piece in pieces}) < size:
            raise DataError("two of its pieces are the same")
        # Stories lie one after another with <s> between them: it begins the next, and so it ends this one.
        return bpe(pieces, roles=Roles(begin=_BEGIN, end=_BEGIN), frame=Frame(before=(1,)))
    except OSError as error:
        raise DataError(f"{found} cannot be read: {error.strerror}") from None
    except (struct.error, UnicodeDecodeError):
        raise DataError(
            f"{found} is damaged or not the tokenizer of {size} pieces for {path.name}; restore it"
        ) from None
    except DataError as error:
        raise DataError(f"{found} cannot be used: {error}; restore it from a copy") from None


def _pieces(raw: bytes, size: int) -> Iterator[Scored]:
    """The pieces of a llama2.c tokenizer: its longest piece, then of each the score, the length and the bytes."""
    at = 4
    for id in range(size):
        score, length = struct.unpack_from("<fi", raw, at)
        at += 8 + length
        if not 0 < length <= min(_LONGEST, len(raw)) or not math.isfinite(score):
            raise DataError(f"piece {id} has {length} bytes and the score {score}")
        text = raw[at - length : at].decode().replace(" ", SPACE)
        if id < 3:
            yield ((Scored("<unk>", 0.0, UNKNOWN), Scored(_BEGIN, 0.0, CONTROL), Scored("</s>", 0.0, CONTROL)))[id]
        else:
            yield Scored(text, score, BYTE if id < 259 and text == f"<0x{id - 3:02X}>" else NORMAL)
    if at != len(raw):
        raise DataError(f"it has {len(raw)} bytes where {size} pieces take {at}")
