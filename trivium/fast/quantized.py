"""Products with 8- and 4-bit levels as they are, for the few rows of decoding; for more the matrix is made in parts."""

# O outputs, I inputs, P inputs filled up to whole groups, R rows of the input

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self, final

import torch
import torch.nn.functional as F
from torch import Tensor

from trivium.fast.linear import linear
from trivium.kernels import levels as kernel
from trivium.kernels.hardware import working
from trivium.parts.quantized import GROUP, TABLE, Packed, QuantizedLinear, TiedLinear, bits_of, pack, row_chunks, unpack

# Rows up to which the kernel is faster than floats made for the occasion (AVX-512, 768 x 2304 and 3072 x 768).
_FEW = 16


@final
class FastQuantizedLinear(QuantizedLinear):
    """`QuantizedLinear` that multiplies by the levels themselves."""

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[-1] != self.in_features:  # kernels for few rows would compute something
            raise ValueError(f"{x.shape[-1]} inputs for a layer that has {self.in_features}")
        few = _few_rows(x, self.packed, self.bias)
        if few is not None:
            return few
        if x.device.type != "cpu" or torch.compiler.is_compiling():
            return F.linear(x, self._whole(x), self.bias)
        parts = [
            linear(x, self._rows(rows).to(x.dtype), None if self.bias is None else self.bias[rows])
            for rows in row_chunks(self.out_features, self.in_features)
        ]
        return parts[0] if len(parts) == 1 else torch.cat(parts, -1)

    def _whole(self, x: Tensor) -> Tensor:
        """The matrix as a product with `x` wants it."""
        if not _gpu_fits(x, self.packed):
            return self.dense().to(x.dtype)
        from trivium.kernels import narrow  # not above: without a GPU there is no Triton

        return narrow.whole(self.packed, self.in_features, working(x))

    def _rows(self, rows: slice) -> Tensor:
        return unpack(Packed(self.levels[rows], self.scales[rows]), self.in_features)


@final
class FastTiedLinear(TiedLinear):
    """`TiedLinear` with 8-bit levels beside its table, made when they are first wanted."""

    _copy: Packed | None = None
    _made = (0, -1)  # of which storage and version

    def forward(self, x: Tensor) -> Tensor:
        if _wanted(x, self.in_features):
            few = _few_rows(x, self._levels(), self.bias)
            if few is not None:
                return few
        return linear(x, self.weight, self.bias)

    def _levels(self) -> Packed:
        # weights of inference mode have no version
        now = (self.weight.data_ptr(), 0 if self.weight.is_inference() else self.weight._version)
        if self._copy is None or self._made != now:
            self._copy, self._made = pack(self.weight, TABLE), now
        return self._copy

    def __getstate__(self) -> dict[str, Any]:
        """Without the levels: a copy has another table."""
        state: dict[str, Any] = super().__getstate__()  # type: ignore[no-untyped-call]
        return {name: value for name, value in state.items() if name not in ("_copy", "_made")}

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        self._copy = None
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        return self


def _wanted(x: Tensor, inputs: int) -> bool:
    """Whether a product with the levels themselves is the fastest on a CPU, and there is a kernel for it."""
    return (
        x.device.type == "cpu"
        and x.dtype != torch.float64
        and 0 < x.numel() <= _FEW * inputs
        and not torch.compiler.is_compiling()
        and not torch.is_autocast_enabled("cpu")
        and not (torch.is_grad_enabled() and x.requires_grad)
        and kernel.product() is not None
    )


def _few_rows(x: Tensor, packed: Packed, bias: Tensor | None) -> Tensor | None:
    """The product of a few rows with the levels themselves; None where that is not the way."""
    if x.device.type == "cuda":
        return _few_rows_on_gpu(x, packed, bias)
    levels, scales = packed
    multiply = kernel.product() if _wanted(x, x.shape[-1]) else None
    if multiply is None or levels.device.type != "cpu" or scales.dtype != torch.bfloat16:
        return None
    extra = scales.shape[1] * GROUP[bits_of(levels)] - x.shape[-1]
    x_RP = x.reshape(-1, x.shape[-1]).float()
    x_RP = F.pad(x_RP, (0, extra)) if extra else x_RP.contiguous()
    result_RO = multiply(levels.contiguous(), scales.contiguous(), None if bias is None else bias.float(), x_RP)
    return result_RO.to(x.dtype).view(*x.shape[:-1], -1)


def _gpu_fits(x: Tensor, packed: Packed) -> bool:
    """Whether there are kernels for `x` and these levels, and they may be started."""
    if x.device.type != "cuda" or x.dtype == torch.float64 or torch.compiler.is_compiling():
        return False
    index = torch.cuda.current_device()  # kernels start there and nowhere else
    if x.device.index != index or packed.levels.device != x.device or not kernel.gpu(index):
        return False
    from trivium.kernels import narrow  # not above: without a GPU there is no Triton

    return narrow.fits(packed)


def _few_rows_on_gpu(x: Tensor, packed: Packed, bias: Tensor | None) -> Tensor | None:
    if torch.is_autocast_enabled("cuda") or (torch.is_grad_enabled() and x.requires_grad) or not _gpu_fits(x, packed):
        return None
    from trivium.kernels import narrow

    x_RI = x.reshape(-1, x.shape[-1]).contiguous()
    if not 0 < len(x_RI) <= narrow.MOST:
        return None
    return narrow.multiply(x_RI, packed, bias).view(*x.shape[:-1], -1)
