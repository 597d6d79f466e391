"""Positions that are added to the embeddings: none, a sinusoid, a trained table (spec: architecture §2.1-2.3)."""

# B batch (1 where all rows agree), T tokens, D width, n positions

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trivium.errors import RequestError
from trivium.parts.options.positions import Sinusoidal
from trivium.parts.positions.base import Computed, Positions


class SinusoidalPositions(Computed):
    """A longer context needs no training: the table is not saved, only its length is a setting."""

    def __init__(self, context: int, width: int, options: Sinusoidal) -> None:
        super().__init__()
        self.context = context
        self.width = width
        self.options = options
        self.settle()

    def compute(self, device: torch.device) -> Tensor:
        # in float64, on the CPU because not every device has it: float32 angles are off by 1e-4 at position 2,000
        where = device if device.type == "meta" else torch.device("cpu")
        pairs = self.width // 2
        last = pairs if self.options.spacing == "paper" else max(pairs - 1, 1)
        exponent = torch.arange(pairs, dtype=torch.float64, device=where) / last
        angle = torch.arange(self.context, dtype=torch.float64, device=where)[:, None] * 10_000.0**-exponent
        if self.options.layout == "halves":
            table_nD = torch.cat((angle.sin(), angle.cos()), dim=-1)
        else:
            table_nD = torch.stack((angle.sin(), angle.cos()), dim=-1).flatten(1)
        return table_nD.float().to(device)

    def embed(self, x_BTD: Tensor, at_BT: Tensor) -> Tensor:
        _check(x_BTD, at_BT, self.context)
        return x_BTD + F.embedding(at_BT, self.constant).to(x_BTD.dtype)


class LearnedPositions(Positions):
    tables: ClassVar[Mapping[str, str]] = {"table": "position"}

    def __init__(self, context: int, width: int, offset: int = 0) -> None:
        super().__init__()
        self.context = context
        self.offset = offset
        self.table = nn.Parameter(torch.empty(context + offset, width))

    def embed(self, x_BTD: Tensor, at_BT: Tensor) -> Tensor:
        _check(x_BTD, at_BT, self.context)
        return x_BTD + F.embedding(at_BT + self.offset if self.offset else at_BT, self.table)


def _check(x_BTD: Tensor, at_BT: Tensor, context: int) -> None:
    """Refuse a position that has no row."""
    # beams of one text are so many tokens at one position, expanded
    if x_BTD.shape[1] > context and at_BT.stride(1) != 0:
        raise RequestError(f"{x_BTD.shape[1]} tokens are more than the {context} positions of this model; shorten them")
    # only on the CPU: anywhere else looking at the values would wait for the device
    if at_BT.device.type == "cpu" and not torch.compiler.is_compiling():
        first, last = (int(end) for end in torch.aminmax(at_BT))
        if first < 0 or last >= context:
            wrong = first if first < 0 else last
            raise RequestError(
                f"position {wrong} is not one of the {context} of this model; begin at 0 and end earlier"
            )
