"""Two schemes at once: one that is added to the embeddings and one that acts on the scores, as in MPNet."""

# B batch (1 where all rows agree), T new tokens, S keys (cached and new), D width, H query heads, E head size

from __future__ import annotations

from typing import Any

from torch import Tensor

from trivium.parts.positions.base import Positions


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
