"""Linear layers whose weights are 8- or 4-bit levels with a scale per group of inputs.

Here the matrix is made whole for every product; `fast/quantized.py` multiplies by the levels themselves.
"""

# O outputs, I inputs, P inputs filled up to whole groups, G groups, R rows at a time

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trivium.parts.declared import declared
from trivium.parts.linear import Linear, give_bias

Bits = Literal[8, 4]

# Inputs that share a scale. Both are symmetric: at 4.5 bits a weight, groups of 32 without a minimum err by 8.7 % of
# the weights, groups of 64 with one by 9.1 % (root mean square, the demo's model; 9.1 and 9.5 % in MiniLM). Scales
# searched for the least error err by 8.3 %, and the model's bits per byte were no better for it.
GROUP: dict[Bits, int] = {8: 64, 4: 32}
LEVELS: dict[Bits, torch.dtype] = {8: torch.int8, 4: torch.uint8}
TABLE: Bits = 8  # of the embeddings in a file, whatever the rest has
_CHUNK = 1 << 20  # weights that are floats at one time on the CPU: 4 MB


class Packed(NamedTuple):
    """A matrix [O, I] as levels, int8 [O, P] or uint8 [O, P / 2], and scales, bfloat16 [O, G].

    A byte of 4-bit levels holds input i in its low half and input i + P / 2 in its high half, both signed. Scales have
    8 significant bits: float32 then holds every level times its scale exactly, and a packed matrix packs to itself.
    """

    levels: Tensor
    scales: Tensor


def bits_of(levels: Tensor) -> Bits:
    """How many bits a level has."""
    return 8 if levels.dtype == torch.int8 else 4


def blank(shape: Sequence[int], bits: Bits, device: torch.device) -> Packed:
    """A packed matrix of a shape [O, I] that is still to be filled."""
    outputs, inputs = shape
    groups = -(-inputs // GROUP[bits])
    return Packed(
        torch.empty(outputs, groups * GROUP[bits] * bits // 8, dtype=LEVELS[bits], device=device),
        torch.empty(outputs, groups, dtype=torch.bfloat16, device=device),
    )


def pack(weight_OI: Tensor, bits: Bits) -> Packed:
    """The nearest levels of a matrix."""
    result = blank(weight_OI.shape, bits, weight_OI.device)
    for rows in row_chunks(*weight_OI.shape):
        levels_RP, scales_RG = _rounded(weight_OI[rows].detach(), bits)
        result.scales[rows] = scales_RG
        if bits == 8:
            result.levels[rows] = levels_RP
        else:
            low, high = levels_RP.chunk(2, dim=-1)
            result.levels[rows] = (high << 4 | low & 15).view(torch.uint8)
    return result


def _rounded(weight_RI: Tensor, bits: Bits) -> tuple[Tensor, Tensor]:
    """Levels, int8 [R, P], and scales of some rows."""
    group = GROUP[bits]
    padded_RP = F.pad(weight_RI.float(), (0, -weight_RI.shape[1] % group))
    grouped = padded_RP.view(len(padded_RP), -1, group)
    size, at = grouped.abs().max(-1, keepdim=True)
    # 8 bits: -127..127. 4 bits: the largest weight is level -8, the end that has one level more, whatever its sign.
    scales = size / 127 if bits == 8 else grouped.gather(-1, at) / -8
    scales = scales.bfloat16()
    levels = (grouped / torch.where(scales == 0, 1, scales.float())).round_()
    levels = levels.clamp_(-127, 127) if bits == 8 else levels.clamp_(-8, 7)
    return levels.to(torch.int8).flatten(1), scales.squeeze(-1)


def unpack(packed: Packed, inputs: int) -> Tensor:
    """The matrix, float32 [O, I]."""
    levels, scales_OG = packed
    if bits_of(levels) == 8:
        whole_OP = levels.float()
    else:
        signed, half = levels.view(torch.int8), levels.shape[1]
        whole_OP = torch.empty(len(levels), 2 * half, device=levels.device)
        whole_OP[:, :half] = (signed << 4) >> 4  # the shift to the right copies the sign
        whole_OP[:, half:] = signed >> 4
    whole_OP.view(*scales_OG.shape, -1).mul_(scales_OG.float()[..., None])
    return whole_OP[:, :inputs]


def unpack_into(target_OI: Tensor, packed: Packed) -> None:
    """Fill a matrix of floats; never a second one of its size."""
    with torch.no_grad():
        for rows in row_chunks(*target_OI.shape):
            target_OI[rows] = unpack(Packed(packed.levels[rows], packed.scales[rows]), target_OI.shape[1])


def row_chunks(outputs: int, inputs: int) -> Iterator[slice]:
    rows = max(1, _CHUNK // inputs)
    for start in range(0, outputs, rows):
        yield slice(start, min(start + rows, outputs))


class QuantizedLinear(nn.Module):
    """A `Linear` with packed weights, still to be filled: for use, not for training.

    Its input has a gradient, its weights have none.
    """

    def __init__(self, linear: Linear, bits: Bits) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.bits, self.role, self.head = bits, linear.role, linear.head
        levels, scales = blank(linear.weight.shape, bits, linear.weight.device)
        # Parameters without a gradient, not buffers: what two stacks share is then saved once.
        self.levels = nn.Parameter(levels, requires_grad=False)
        self.scales = nn.Parameter(scales, requires_grad=False)
        self.bias: Tensor | None
        give_bias(self, linear.bias)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.dense().to(x.dtype), self.bias)

    def dense(self) -> Tensor:
        """The matrix that it stands for, float32 [O, I]."""
        return unpack(self.packed, self.in_features)

    @property
    def packed(self) -> Packed:
        return Packed(self.levels, self.scales)

    def fill(self, weight_OI: Tensor) -> None:
        """Take the nearest levels of a matrix."""
        packed = pack(weight_OI, self.bits)
        self.levels.data, self.scales.data = packed.levels, packed.scales


class TiedLinear(nn.Module):
    """A `Linear` of a quantised model whose matrix is a table of vectors, which stays as it is.

    Its values are those that 8-bit levels can say, so that decoding may multiply by levels kept beside it.
    """

    def __init__(self, linear: Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.role, self.head = linear.role, linear.head
        self.weight = linear.weight
        self.bias: Tensor | None
        give_bias(self, linear.bias)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)

    def size(self) -> int:
        """How many bytes levels take beside the table."""
        return sum(tensor.nbytes for tensor in blank(self.weight.shape, TABLE, torch.device("meta")))


def hollow(model: nn.Module, bits: Bits) -> dict[str, Linear]:
    """Give a model layers whose levels are still to be filled; the old ones by the names of the new.

    A layer that is tied to a table keeps its floats. An output matrix of its own gets 8 bits even where the rest has 4.
    Nothing is left to train.
    """
    tables = {id(found.parameter) for found in declared(model) if found.declared.kind not in ("matrix", "vector")}
    found = {name: module for name, module in model.named_modules() if isinstance(module, Linear)}
    old = {name: layer for name, layer in found.items() if id(layer.weight) not in tables}
    new: dict[nn.Module, nn.Module] = {layer: TiedLinear(layer) for name, layer in found.items() if name not in old}
    new |= {layer: QuantizedLinear(layer, 8 if layer.role == "head" else bits) for layer in old.values()}
    exchange(model, new)
    model.requires_grad_(False)
    return old


def exchange(model: nn.Module, new: Mapping[nn.Module, nn.Module]) -> None:
    """Put new layers in the place of old ones, wherever a model has them."""
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if child in new:
                setattr(module, name, new[child])


def bits_in(model: nn.Module) -> int:
    """How many bits the weights of a quantised model have, its output matrix aside; 0 if it is not quantised."""
    return min((module.bits for module in model.modules() if isinstance(module, QuantizedLinear)), default=0)


def embeddings(model: nn.Module) -> dict[str, nn.Parameter]:
    """The tables of vectors by id, by name: a file keeps those of a quantised model as 8-bit levels."""
    tables = {id(found.parameter) for found in declared(model) if found.declared.kind == "embedding"}
    return {name: parameter for name, parameter in model.named_parameters() if id(parameter) in tables}
