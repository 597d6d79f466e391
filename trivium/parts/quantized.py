"""Linear layers whose weights are 8- or 4-bit levels with a scale per group of inputs.

A few rows at a time, as in decoding, are multiplied with the levels as they are; for more the matrix is made whole, on
a CPU some of its rows at a time.
"""

# O outputs, I inputs, P inputs filled up to whole groups, G groups, R rows at a time

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Literal, NamedTuple, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trivium.kernels import levels as kernel
from trivium.kernels.hardware import working
from trivium.parts.attention import MultiHeadAttention
from trivium.parts.linear import Linear, give_bias, product

Bits = Literal[8, 4]

# Inputs that share a scale. Both are symmetric: at 4.5 bits a weight, groups of 32 without a minimum err by 8.7 % of
# the weights, groups of 64 with one by 9.1 % (root mean square, the demo's model; 9.1 and 9.5 % in MiniLM). Scales
# searched for the least error err by 8.3 %, and the model's bits per byte were no better for it.
GROUP: dict[Bits, int] = {8: 64, 4: 32}
LEVELS: dict[Bits, torch.dtype] = {8: torch.int8, 4: torch.uint8}
TABLE: Bits = 8  # of the embeddings in a file, whatever the rest has
_CHUNK = 1 << 20  # weights that are floats at one time on the CPU: 4 MB
# Rows up to which the kernel is faster than floats made for the occasion (AVX-512, 768 x 2304 and 3072 x 768).
_FEW = 16


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
    for rows in _chunks(*weight_OI.shape):
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
        for rows in _chunks(*target_OI.shape):
            target_OI[rows] = unpack(Packed(packed.levels[rows], packed.scales[rows]), target_OI.shape[1])


def _chunks(outputs: int, inputs: int) -> Iterator[slice]:
    rows = max(1, _CHUNK // inputs)
    for start in range(0, outputs, rows):
        yield slice(start, min(start + rows, outputs))


@final
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
        if x.shape[-1] != self.in_features:  # kernels for few rows would compute something
            raise ValueError(f"{x.shape[-1]} inputs for a layer that has {self.in_features}")
        few = _few(x, Packed(self.levels, self.scales), self.bias)
        if few is not None:
            return few
        if x.device.type != "cpu" or torch.compiler.is_compiling():
            return F.linear(x, self._whole(x), self.bias)
        parts = [
            product(x, self._rows(rows).to(x.dtype), None if self.bias is None else self.bias[rows])
            for rows in _chunks(self.out_features, self.in_features)
        ]
        return parts[0] if len(parts) == 1 else torch.cat(parts, -1)

    def dense(self) -> Tensor:
        """The matrix that it stands for, float32 [O, I]."""
        return unpack(Packed(self.levels, self.scales), self.in_features)

    def _whole(self, x: Tensor) -> Tensor:
        """The same as a product with `x` wants it."""
        packed = Packed(self.levels, self.scales)
        if not _by_gpu(x, packed):
            return self.dense().to(x.dtype)
        from trivium.kernels import narrow

        return narrow.whole(packed, self.in_features, working(x))

    def _rows(self, rows: slice) -> Tensor:
        return unpack(Packed(self.levels[rows], self.scales[rows]), self.in_features)

    def fill(self, weight_OI: Tensor) -> None:
        """Take the nearest levels of a matrix."""
        packed = pack(weight_OI, self.bits)
        self.levels.data, self.scales.data = packed.levels, packed.scales


@final
class TiedLinear(nn.Module):
    """A `Linear` whose matrix is a table of vectors, which stays as it is: levels of it are kept beside, for decoding.

    They are made when they are first wanted. In a quantised model they say exactly what the table says.
    """

    def __init__(self, linear: Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.role, self.head = linear.role, linear.head
        self.weight = linear.weight
        self.bias: Tensor | None
        give_bias(self, linear.bias)
        self._copy: Packed | None = None
        self._made = (0, -1)  # of which storage and version

    def forward(self, x: Tensor) -> Tensor:
        if _wanted(x, self.in_features):
            few = _few(x, self._levels(), self.bias)
            if few is not None:
                return few
        return product(x, self.weight, self.bias)

    def _levels(self) -> Packed:
        # weights of inference mode have no version
        now = (self.weight.data_ptr(), 0 if self.weight.is_inference() else self.weight._version)
        if self._copy is None or self._made != now:
            self._copy, self._made = pack(self.weight, TABLE), now
        return self._copy

    def size(self) -> int:
        """How many bytes the levels take beside the table."""
        return sum(tensor.nbytes for tensor in blank(self.weight.shape, TABLE, torch.device("meta")))


def _wanted(x: Tensor, inputs: int) -> bool:
    """Whether a product with the levels themselves is the fastest, and there is a kernel for it."""
    return (
        x.device.type == "cpu"
        and x.dtype != torch.float64
        and 0 < x.numel() <= _FEW * inputs
        and not torch.compiler.is_compiling()
        and not torch.is_autocast_enabled("cpu")
        and not (torch.is_grad_enabled() and x.requires_grad)
        and kernel.product() is not None
    )


def _few(x: Tensor, packed: Packed, bias: Tensor | None) -> Tensor | None:
    """The product of a few rows with the levels themselves; None where that is not the way."""
    if x.device.type == "cuda":
        return _few_there(x, packed, bias)
    levels, scales = packed
    multiply = kernel.product() if _wanted(x, x.shape[-1]) else None
    if multiply is None or levels.device.type != "cpu" or scales.dtype != torch.bfloat16:
        return None
    extra = scales.shape[1] * GROUP[bits_of(levels)] - x.shape[-1]
    x_RP = x.reshape(-1, x.shape[-1]).float()
    x_RP = F.pad(x_RP, (0, extra)) if extra else x_RP.contiguous()
    result_RO = multiply(levels.contiguous(), scales.contiguous(), None if bias is None else bias.float(), x_RP)
    return result_RO.to(x.dtype).view(*x.shape[:-1], -1)


def _by_gpu(x: Tensor, packed: Packed) -> bool:
    """Whether there are kernels for `x` and these levels, and they may be started."""
    if x.device.type != "cuda" or x.dtype == torch.float64 or torch.compiler.is_compiling():
        return False
    index = torch.cuda.current_device()  # kernels start there and nowhere else
    if x.device.index != index or packed.levels.device != x.device or not kernel.gpu(index):
        return False
    from trivium.kernels import narrow  # not above: triton is not everywhere

    return narrow.fits(packed)


def _few_there(x: Tensor, packed: Packed, bias: Tensor | None) -> Tensor | None:
    """As `_few`, on a GPU."""
    if torch.is_autocast_enabled("cuda") or (torch.is_grad_enabled() and x.requires_grad) or not _by_gpu(x, packed):
        return None
    from trivium.kernels import narrow

    x_RI = x.reshape(-1, x.shape[-1]).contiguous()
    if not 0 < len(x_RI) <= narrow.MOST:
        return None
    return narrow.multiply(x_RI, packed, bias).view(*x.shape[:-1], -1)


def hollow(model: nn.Module, bits: Bits) -> dict[str, Linear]:
    """Give a model layers whose levels are still to be filled; the old ones by the names of the new.

    A layer that is tied to a table keeps its floats. An output matrix of its own gets 8 bits even where the rest has 4.
    Nothing is left to train.
    """
    tables = {id(getattr(module, name)) for module in model.modules() for name in getattr(module, "tables", {})}
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
        if isinstance(module, MultiHeadAttention):
            module.packed = None  # it belongs to the old layers


def bits_in(model: nn.Module) -> int:
    """How many bits the weights of a quantised model have, its output matrix aside; 0 if it is not quantised."""
    return min((module.bits for module in model.modules() if isinstance(module, QuantizedLinear)), default=0)


def embeddings(model: nn.Module) -> dict[str, nn.Parameter]:
    """The tables of vectors by id, by name: a file keeps those of a quantised model as 8-bit levels."""
    tables = {
        id(getattr(module, name))
        for module in model.modules()
        for name, kind in getattr(module, "tables", {}).items()
        if kind == "embedding"
    }
    return {name: parameter for name, parameter in model.named_parameters() if id(parameter) in tables}
