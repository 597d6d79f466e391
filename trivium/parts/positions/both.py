"""Two schemes at once: one that is added to the embeddings and one that acts on the scores, as in MPNet."""

# B batch (1 where all rows agree), T new tokens, S keys (cached and new), D width, H query heads, E head size

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from trivium.config import place
from trivium.parts.positions.absolute import Learned, Sinusoidal
from trivium.parts.positions.base import Position, Positions, Scope
from trivium.parts.positions.relative import Alibi, Buckets
from trivium.parts.positions.rotary import Rotary
from trivium.parts.site import Cost, Site

ABSOLUTE: dict[str, type[Position]] = {"learned": Learned, "sinusoidal": Sinusoidal}
# none with a table for each layer: the absolute positions would be added once per layer too
RELATIVE: dict[str, type[Position]] = {"t5": Buckets, "alibi": Alibi, "rotary": Rotary}


@dataclass(frozen=True, kw_only=True, slots=True)
class Both:
    """Absolute positions in the embeddings and relative ones in attention; MPNet has a table and T5's buckets."""

    absolute: Position = place(ABSOLUTE, Learned())
    relative: Position = place(RELATIVE, Buckets())

    @property
    def scope(self) -> Scope:
        return self.relative.scope

    def build(self, site: Site) -> Positions:
        return BothPositions(self.absolute.build(site), self.relative.build(site))

    def cost(self, site: Site) -> Cost:
        return self.absolute.cost(site).plus(self.relative.cost(site))


class BothPositions(Positions):
    def __init__(self, absolute: Positions, relative: Positions) -> None:
        super().__init__()
        self.absolute, self.relative = absolute, relative

    def embed(self, x_BTD: Tensor, at_BT: Tensor) -> Tensor:
        return self.absolute.embed(x_BTD, at_BT)

    def prepare(self, at_BT: Tensor, keys_at_BS: Tensor) -> Any:
        return self.relative.prepare(at_BT, keys_at_BS)

    def rotate(self, x_BHTE: Tensor, prepared: Any) -> Tensor:
        return self.relative.rotate(x_BHTE, prepared)

    def bias(self, prepared: Any) -> Tensor | None:
        return self.relative.bias(prepared)
