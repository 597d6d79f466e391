"""Positions that are added to the embeddings: none, a sinusoid, a trained table (spec: architecture §2.1-2.3)."""

# B batch (1 where all rows agree), T tokens, D width, n positions

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trivium.errors import RequestError
from trivium.parts.declared import POSITION, Declared
from trivium.parts.options.positions import SinusoidalOptions
from trivium.parts.positions.base import Computed, Positions


class SinusoidalPositions(Computed):
    """`sin` and `cos` of `position / 10000^(2i / D)`, added to the embeddings (Vaswani et al. 2017).

    A longer context needs no training: the table is not saved, only its length is a setting.
    """

    def __init__(self, context: int, width: int, options: SinusoidalOptions) -> None:
        super().__init__()
        self.context = context
        self.width = width
        self.options = options
        self.settle()

    def compute(self, device: torch.device) -> Tensor:
        # in float64, on the CPU because not every device has it: float32 angles are off by 1e-4 at position 2,000
        where = device if torch.empty(0, device=device).is_meta else torch.device("cpu")
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
        return x_BTD + _rows(self.constant, x_BTD, at_BT).to(x_BTD.dtype)


class LearnedPositions(Positions):
    """A trained vector for each position, added to the embeddings (GPT, BERT)."""

    declares: ClassVar[Mapping[str, Declared]] = {"table": POSITION}

    def __init__(self, context: int, width: int, offset: int = 0) -> None:
        super().__init__()
        self.context = context
        self.offset = offset
        self.table = nn.Parameter(torch.empty(context + offset, width))

    def embed(self, x_BTD: Tensor, at_BT: Tensor) -> Tensor:
        return x_BTD + _rows(self.table[self.offset :] if self.offset else self.table, x_BTD, at_BT)


def _rows(table_SD: Tensor, x_BTD: Tensor, at_BT: Tensor) -> Tensor:
    """The rows of these positions, [1 or B, T, D]; one that has no row is refused."""
    context = len(table_SD)
    # beams of one text are so many tokens at one position, expanded
    if x_BTD.shape[1] > context and at_BT.stride(1) != 0:
        raise RequestError(f"{x_BTD.shape[1]} tokens are more than the {context} positions of this model; shorten them")
    try:
        return F.embedding(at_BT, table_SD)
    except IndexError:  # a GPU asserts instead: looking at the values would wait for it
        first, last = (int(end) for end in torch.aminmax(at_BT))
        wrong = first if first < 0 else last
        raise RequestError(
            f"position {wrong} is not one of the {context} of this model; begin at 0 and end earlier"
        ) from None
