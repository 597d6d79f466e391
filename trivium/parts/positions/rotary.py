"""Rotary positions, whole and partial, in both layouts (spec: architecture §2.6)."""

# B batch (1 where all rows agree), T tokens, H heads, E head size, e pairs that are turned

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from trivium.parts.positions.base import Computed


class RotaryPositions(Computed):
    """Pairs of features of query and key turned by angles `position * frequency` (Su et al. 2021)."""

    def __init__(
        self, frequencies: Sequence[float], head: int, layout: Literal["halves", "interleaved"], strength: float = 1.0
    ) -> None:
        super().__init__()
        self.frequencies = tuple(frequencies)
        self.sizes = [2 * len(self.frequencies), head - 2 * len(self.frequencies)]  # what is turned, what is not
        self.layout = layout
        self.strength = strength
        self.settle()

    def compute(self, device: torch.device) -> Tensor:
        return torch.tensor(self.frequencies, dtype=torch.float32, device=device)

    def prepare(self, at_BT: Tensor, keys_at_BS: Tensor) -> Tensor:
        # angles in float32: bfloat16 positions are wrong past 256
        angles_BTe = at_BT[..., None].float() * self.constant
        turn = torch.stack((angles_BTe.cos(), angles_BTe.sin()))[:, :, None]  # [2, B, 1, T, e]
        return turn if self.strength == 1 else turn * self.strength

    def rotate(self, x_BHTE: Tensor, prepared: Any) -> Tensor:
        if not self.sizes[1]:
            return self._turn(x_BHTE, prepared)
        first, rest = torch.split(x_BHTE, self.sizes, dim=-1)  # refuses a head of another size
        return torch.cat((self._turn(first, prepared), rest), dim=-1)

    def _turn(self, x_BHTE: Tensor, prepared: Tensor) -> Tensor:
        cos, sin = prepared.to(x_BHTE.dtype)
        if self.layout == "halves":
            # [B, T, H, E] while it is written: attention then answers in the layout in which its heads can be joined
            first, second = x_BHTE.transpose(1, 2).chunk(2, dim=-1)
            cos, sin = cos.transpose(1, 2), sin.transpose(1, 2)
            return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).transpose(1, 2)
        first, second = x_BHTE[..., 0::2], x_BHTE[..., 1::2]
        return torch.stack((first * cos - second * sin, second * cos + first * sin), dim=-1).flatten(-2)
