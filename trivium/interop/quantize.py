"""A model with 8- or 4-bit weights for use: smaller on the disk and in memory, and how much worse it is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from trivium.checkpoints import bundle
from trivium.checkpoints.bundle import Bundle
from trivium.checkpoints.model_files import has_model, require_place
from trivium.errors import RequestError
from trivium.fast.attention import FastAttention
from trivium.fast.choose import PLAIN, fast, for_inference
from trivium.files import exists_already
from trivium.interop.foreign import Tick
from trivium.models.transformer import Transformer, weights
from trivium.parts import quantized
from trivium.parts.quantized import Bits, QuantizedLinear, TiedLinear


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """What quantising did to a model; sizes are in bytes, of the weights alone."""

    bits: Bits
    before: int  # as floats
    after: int  # in a file
    memory: int  # in use: embeddings are floats there, with levels beside them where they are the output matrix too
    quantized: tuple[str, ...]  # the layers that have levels now
    kept: tuple[str, ...]  # the tensors that stay floats in a file too: gains, biases, positions


def quantize(module: Transformer, bits: int, *, tick: Tick = lambda what, done, of: None) -> Report:
    """Give every linear layer of a model 8- or 4-bit weights, in place, one layer after the other.

    Embeddings, and an output matrix tied to them, stay floats in memory but only with the values that 8 bits can say:
    the file has those 8 bits. The model can no longer be trained.
    """
    wanted = checked(bits)
    have = quantized.bits_in(module)
    if have:
        raise RequestError(f"the model has {have}-bit weights already; quantise the one that it was made from")
    _require_finite(module)
    before = _size(module)
    is_fast = any(type(part) in PLAIN for part in module.modules())
    for part in module.modules():
        if isinstance(part, FastAttention):
            part.fused = None  # it holds the floats of three layers
    old = quantized.hollow(module, wanted)
    for done, (name, layer) in enumerate(old.items()):
        tick("quantise", done, len(old))
        new = module.get_submodule(name)
        assert isinstance(new, QuantizedLinear)
        new.fill(layer.weight)
        layer.weight = torch.nn.Parameter(layer.weight.new_empty(0), requires_grad=False)  # its floats can go
    tables = quantized.embeddings(module)
    saved = 0
    for table in tables.values():
        packed = quantized.pack(table, quantized.TABLE)
        quantized.unpack_into(table, packed)
        saved += table.nbytes - packed.levels.nbytes - packed.scales.nbytes
    if is_fast:
        fast(module)
    tick("quantise", len(old), len(old))
    floats = (name for name, tensor in weights(module).items() if tensor.is_floating_point() and name not in tables)
    size = _size(module)
    return Report(
        bits=wanted,
        before=before,
        after=size - saved,
        memory=size + sum(part.size() for part in module.modules() if isinstance(part, TiedLinear)),
        quantized=tuple(old),
        kept=tuple(name for name in floats if not name.endswith(".scales")),
    )


def checked(bits: int) -> Bits:
    """The number of bits if it is one that weights can have."""
    if bits == 8:
        return 8
    if bits == 4:
        return 4
    raise RequestError(f"bits: weights can have 8 or 4 bits, not {bits}")


def _require_finite(module: Transformer) -> None:
    """Refuse before anything is changed: a half-quantised model would be of no use."""
    for name, tensor in weights(module).items():
        if not bool(tensor.isfinite().all()):
            raise RequestError(f"{name} holds weights that are not finite, which have no levels; load another model")


def _size(module: Transformer) -> int:
    return sum(tensor.nbytes for tensor in weights(module).values())


@dataclass(frozen=True, kw_only=True, slots=True)
class Export:
    """A quantised model in a folder of its own, read back."""

    report: Report
    size: int  # of all files in the folder, in bytes
    before: float  # what `score` said of the model
    after: float  # what it says of the one in the folder


def export_bits(
    found: Bundle,
    folder: Path,
    bits: int,
    *,
    score: Callable[[Transformer], float],
    tick: Tick = lambda what, done, of: None,
) -> Export:
    """Quantise a model in place and save it; `score` (bits per byte, say) hears the floats and what was read back."""
    checked(bits)
    require_place(folder)
    if has_model(folder):
        raise RequestError(exists_already(folder))
    before = score(found.module)
    report = quantize(found.module, bits, tick=tick)
    bundle.save(folder, found.module.config, weights(found.module), found.tokenizer, found.notes)
    back = bundle.open_bundle(folder, lay=for_inference)
    return Export(
        report=report,
        size=sum(path.stat().st_size for path in folder.iterdir() if path.is_file()),
        before=before,
        after=score(back.module),
    )
