"""How a model knows the order of its tokens (spec: architecture §2)."""

# B batch (1 where all rows agree), T tokens, D model width, H heads, E head size

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trivium.errors import ConfigError, RequestError
from trivium.parts.kernels.eager import Turned, wanted
from trivium.parts.site import Cost, Site


class Position(Protocol):
    """The options of a position scheme; one module serves all layers of a stack that name equal options."""

    def build(self, site: Site) -> Positions: ...
    def cost(self, site: Site) -> Cost: ...


class Positions(nn.Module):
    """What a scheme may offer; this one offers nothing. `at` holds the position of every token, [B, T]."""

    def embed(self, x_BTD: Tensor, at: Tensor) -> Tensor:
        """The input with its positions added."""
        return x_BTD

    def prepare(self, at: Tensor) -> Tensor | None:
        """What `rotate` needs, computed once per forward and shared by all layers."""
        return None

    def rotate(self, x_BHTE: Tensor, prepared: Tensor | None) -> Tensor:
        """A query or key turned by its position."""
        return x_BHTE


@dataclass(frozen=True, kw_only=True, slots=True)
class NoPositions:
    """No signal at all: a causal decoder can still count, an encoder sees a bag."""

    def build(self, site: Site) -> Positions:
        return Positions()

    def cost(self, site: Site) -> Cost:
        return Cost()


@dataclass(frozen=True, kw_only=True, slots=True)
class Learned:
    """A table of one vector per position, added to the embeddings; it ends where the context ends."""

    def build(self, site: Site) -> Positions:
        return LearnedPositions(site.context, site.width)

    def cost(self, site: Site) -> Cost:
        return Cost(site.context * site.width)


@dataclass(frozen=True, kw_only=True, slots=True)
class Rotary:
    """Pairs of each head's dimensions turned by an angle that grows with the position."""

    theta: float = 10_000.0
    layout: Literal["halves", "interleaved"] = "halves"  # HF LLaMA pairs (i, i+E/2); Meta and RoFormer (2i, 2i+1)

    def __post_init__(self) -> None:
        if not self.theta > 0:
            raise ConfigError(f"theta: {self.theta} is not positive; try 10000")

    def build(self, site: Site) -> Positions:
        self.cost(site)
        return RotaryPositions(site.head, self.theta, self.layout)

    def cost(self, site: Site) -> Cost:
        if site.head % 2:
            raise ConfigError(f"rotary positions turn pairs, so a head of size {site.head} cannot be odd; change heads")
        return Cost()


POSITIONS: dict[str, type[Position]] = {"none": NoPositions, "learned": Learned, "rotary": Rotary}


class LearnedPositions(Positions):
    def __init__(self, context: int, width: int) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.empty(context, width))

    def embed(self, x_BTD: Tensor, at: Tensor) -> Tensor:
        if x_BTD.shape[1] > self.table.shape[0]:
            raise RequestError(f"{x_BTD.shape[1]} tokens are more than the {self.table.shape[0]} learned positions")
        return x_BTD + F.embedding(at, self.table)


class RotaryPositions(Positions):
    frequencies: Tensor

    def __init__(self, head: int, theta: float, layout: Literal["halves", "interleaved"]) -> None:
        super().__init__()
        self.layout = layout
        self.exact = [theta ** -(index / head) for index in range(0, head, 2)]
        self.register_buffer("frequencies", torch.tensor(self.exact, dtype=torch.float32), persistent=False)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> RotaryPositions:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        # `model.to(bfloat16)` would round the frequencies, which is off by a radian within a few hundred positions
        self.frequencies = torch.tensor(self.exact, dtype=torch.float32, device=self.frequencies.device)
        return self

    def prepare(self, at: Tensor) -> Tensor:
        # angles in float32: bfloat16 positions are wrong past 256
        angles_BTe = at[..., None].float() * self.frequencies
        return torch.stack((angles_BTe.cos(), angles_BTe.sin()))[:, :, None]  # [2, B, 1, T, E/2]

    def rotate(self, x_BHTE: Tensor, prepared: Tensor | None) -> Tensor:
        assert prepared is not None
        cos, sin = prepared.to(x_BHTE.dtype)
        if self.layout == "halves":
            if wanted(x_BHTE):
                fast: Tensor = Turned.apply(x_BHTE, cos, sin)  # type: ignore[no-untyped-call]
                return fast
            first, second = x_BHTE.chunk(2, dim=-1)
            return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
        first, second = x_BHTE[..., 0::2], x_BHTE[..., 1::2]
        return torch.stack((first * cos - second * sin, second * cos + first * sin), dim=-1).flatten(-2)
