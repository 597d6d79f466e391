"""A layer's keys and values with the scratch of the decoding kernel."""

# B batch, H query heads, T new tokens, E head size

from __future__ import annotations

from typing import final

import torch
from torch import Tensor

from trivium.parts.cache import LayerCache, Slots
from trivium.parts.options.attention import Shape


@final
class KernelCache(LayerCache):
    """`LayerCache` of sequences of different lengths, over which a kernel attends without a mask from outside.

    `on` says whether it does: nothing is added to the scores, and the kernel was not found wrong.
    """

    def __init__(
        self,
        rows: int,
        longest: int,
        shape: Shape,
        device: torch.device,
        dtype: torch.dtype,
        slots: Slots | None = None,
        window: int = 0,
    ) -> None:
        super().__init__(rows, longest, shape, device, dtype, slots)
        self.window = window
        self.on = False
        # how many programs of each row and group are done
        self.arrived = torch.zeros(rows, shape.heads, device=device, dtype=torch.int32)

    def applies(self, query_BHTE: Tensor) -> bool:
        """Whether the kernel attends here."""
        if not self.on or self.slots is None:
            return False
        from trivium.kernels.decode import fits  # not above: without a GPU there is no Triton

        return fits(query_BHTE, self.keys, self.values)

    def attend(self, query_BHTE: Tensor, scale: float) -> Tensor:
        """The mixed values [B, H, T, E] of each sequence's newest tokens."""
        from trivium.kernels.decode import attend

        assert self.slots is not None
        held = (self.keys, self.values, self.slots.lengths_B, self.arrived)
        return attend(query_BHTE, *held, scale, self.window)
