"""The one place that decides which modules are fast.

A module is fast if its type is exactly a plain one of the table: it is re-classed in place, so parameters, names and
hooks stay. What changes from call to call (gradients, autocast, shapes, wrapped children) only the fast class asks.
`plain` takes it all back.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from trivium.errors import RequestError
from trivium.fast.attention import FastAttention
from trivium.fast.block import FastBlock
from trivium.fast.feedforward import FastGlu, FastMlp
from trivium.fast.linear import FastLinear, column_major, use_fp8
from trivium.fast.norms import FastRMSNorm
from trivium.fast.output import FastMaskedOutput, FastSoftmaxOutput
from trivium.fast.positions import FastBucketPositions, FastRotaryPositions
from trivium.fast.quantized import FastQuantizedLinear, FastTiedLinear
from trivium.fast.stack import FastStack
from trivium.kernels.hardware import trim_heap
from trivium.models.block import StandardBlock
from trivium.models.stack import PlainStack
from trivium.parts.attention import MultiHeadAttention
from trivium.parts.feedforward import GluFeedForward, MlpFeedForward
from trivium.parts.linear import Linear
from trivium.parts.norms import RMSNorm
from trivium.parts.output import MaskedOutput, SoftmaxOutput
from trivium.parts.positions import BucketPositions, RotaryPositions
from trivium.parts.quantized import QuantizedLinear, TiedLinear
from trivium.parts.sharded import is_sharded

FAST: dict[type[nn.Module], type[nn.Module]] = {
    Linear: FastLinear,
    RMSNorm: FastRMSNorm,
    RotaryPositions: FastRotaryPositions,
    BucketPositions: FastBucketPositions,
    MlpFeedForward: FastMlp,
    GluFeedForward: FastGlu,
    MultiHeadAttention: FastAttention,
    SoftmaxOutput: FastSoftmaxOutput,
    MaskedOutput: FastMaskedOutput,
    StandardBlock: FastBlock,
    PlainStack: FastStack,
    QuantizedLinear: FastQuantizedLinear,
    TiedLinear: FastTiedLinear,
}
PLAIN = {fast: plain for plain, fast in FAST.items()}
# What a fast class keeps on its instances beside the plain one's attributes.
_KEPT = ("fp8", "bf16_copy", "fused", "_copy", "_made")


@dataclass(frozen=True, kw_only=True, slots=True)
class FastOptions:
    """What a training run asks of the fast floor."""

    fp8: bool = False  # products in float8


def fast(model: nn.Module) -> None:
    """Re-class every plain module that has a fast class."""
    for module in model.modules():
        chosen = FAST.get(type(module))
        if chosen is not None:
            module.__class__ = chosen


def for_training(model: nn.Module, options: FastOptions) -> None:
    """A fast model for training steps."""
    fast(model)
    use_fp8(model, options.fp8)


def for_inference(model: nn.Module, device: torch.device | None = None) -> None:
    """A fast model for use on `device` (None: where it is), its weights in the layout for decoding.

    Values, names and shapes stay the same. Before the model is filled this takes no more memory than its weights will;
    afterwards those that move are held twice.
    """
    if device is not None:
        model.to(device)
    fast(model)
    for module in model.modules():
        if isinstance(module, FastAttention):
            module.fuse_qkv()
    for module in model.modules():
        if type(module) is FastLinear and module.role not in ("query", "key", "value"):
            weight = module.weight.data
            able = weight.device.type == "cpu" and not is_sharded(weight)
            module.weight.data = column_major(weight) if able else weight
    trim_heap()  # malloc keeps a hole for every attention whose matrices were moved


def plain(model: nn.Module) -> None:
    """Every module as it was before `fast`: class, attributes and storage; refused where that is not possible."""
    for name, module in model.named_modules():
        if type(module) not in PLAIN:
            changed = next((kind for kind in type(module).__mro__[1:] if kind in PLAIN), None)
            if changed is not None:
                raise RequestError(f"{name} was sharded or parametrised since it became fast; undo that first")
        elif any(is_sharded(parameter) for parameter in module.parameters(recurse=False)):
            raise RequestError(f"{name} was sharded since it became fast; gather its weights first")
    for module in model.modules():
        if type(module) in PLAIN:
            for parameter in module.parameters(recurse=False):
                if not parameter.is_contiguous() or parameter.untyped_storage().nbytes() != parameter.nbytes:
                    parameter.data = parameter.data.clone(memory_format=torch.contiguous_format)
            for name in _KEPT:
                module.__dict__.pop(name, None)
            module.__class__ = PLAIN[type(module)]


def chosen(model: nn.Module) -> list[tuple[str, str, str]]:
    """Every module by name, its class, and why it has that one."""
    return [(name, type(module).__name__, _why(module)) for name, module in model.named_modules() if name]


def _why(module: nn.Module) -> str:
    kind = type(module)
    if kind in PLAIN:
        return f"fast {PLAIN[kind].__name__}"
    if kind in FAST:
        return "plain: fast is off"
    if any(base in FAST or base in PLAIN for base in kind.__mro__[1:]):
        return "plain: a class of its own"
    return "plain: there is no fast class"
