"""Rotary positions, whole and partial, in both layouts (spec: architecture §2.6)."""

# B batch (1 where all rows agree), T tokens, H heads, E head size, e pairs that are turned

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from trivium.config import place
from trivium.errors import ConfigError
from trivium.parts.kernels.eager import Turned, wanted
from trivium.parts.positions.base import Computed, Positions, Scope
from trivium.parts.positions.scaling import SCALINGS, NoScaling, Scaling
from trivium.parts.site import Cost, Site


@dataclass(frozen=True, kw_only=True, slots=True)
class Rotary:
    """Pairs of each head's dimensions turned by an angle that grows with the position."""

    theta: float = 10_000.0
    layout: Literal["halves", "interleaved"] = "halves"  # HF LLaMA pairs (i, i+E/2); Meta and RoFormer (2i, 2i+1)
    share: float = 1.0  # of each head that is turned, its first dimensions; the rest has no position
    scaling: Scaling = place(SCALINGS, NoScaling())

    def __post_init__(self) -> None:
        if not 0 < self.theta < math.inf:
            raise ConfigError(f"theta: {self.theta} is not positive; try 10000")
        if not 0 < self.share <= 1:
            raise ConfigError(f"share: {self.share} is not in (0, 1]; try 1")

    @property
    def scope(self) -> Scope:
        return "heads"

    def build(self, site: Site) -> Positions:
        self.cost(site)
        return RotaryPositions(self._frequencies(site), site.head, self.layout, self.scaling.strength)

    def cost(self, site: Site) -> Cost:
        self._frequencies(site)
        return Cost()

    def _frequencies(self, site: Site) -> list[float]:
        size = int(site.head * self.share)
        if size % 2 or not size:
            whole = f"a head of size {site.head}" if self.share == 1 else f"{self.share} of a head of size {site.head}"
            raise ConfigError(f"rotary positions turn pairs, so {whole} cannot be {'odd' if size else 'empty'}")
        return self.scaling.frequencies(self.theta, size)


class RotaryPositions(Computed):
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
            if wanted(x_BHTE):
                fast: Tensor = Turned.apply(x_BHTE, cos, sin)  # type: ignore[no-untyped-call]
                return fast
            # [B, T, H, E] while it is written: attention then answers in the layout in which its heads can be joined
            first, second = x_BHTE.transpose(1, 2).chunk(2, dim=-1)
            cos, sin = cos.transpose(1, 2), sin.transpose(1, 2)
            return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).transpose(1, 2)
        first, second = x_BHTE[..., 0::2], x_BHTE[..., 1::2]
        return torch.stack((first * cos - second * sin, second * cos + first * sin), dim=-1).flatten(-2)
