"""Keys and values of the tokens seen so far, one preallocated pair of tensors per layer."""

# B batch, H query heads, G key/value heads, T new tokens, S longest length, E head size

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from trivium.parts.options.attention import Shape


class Slots:
    """How far the rows of a cache have come, each at a length of its own, known to the device only.

    New tokens are written behind each row's length; whoever steps moves the lengths on. `direct` says that nothing is
    added to the scores, so that attention needs no mask from outside; `kernel` that it goes by the kernel where that
    fits.
    """

    def __init__(self, rows: int, longest: int, device: torch.device, *, direct: bool, kernel: bool = False) -> None:
        self.lengths_B = torch.zeros(rows, device=device, dtype=torch.long)
        self.rows_B1 = torch.arange(rows, device=device)[:, None]
        self.at_1S = torch.arange(longest, device=device)[None]
        self.direct = direct
        self.kernel = kernel

    def places(self, new: int) -> Tensor:
        """Where the next `new` tokens of every row stand, [B, T]; a row that is full goes on in its last place."""
        return (self.lengths_B[:, None] + self.at_1S[:, :new]).clamp(max=self.at_1S.shape[1] - 1)


class LayerCache:
    """One layer's keys and values; `append` writes in place and returns everything so far as views.

    `across` holds those of the source, computed once per source by the layer's cross-attention.
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
        self.keys = torch.zeros(rows, shape.heads, longest, shape.key, device=device, dtype=dtype)
        self.values = torch.zeros(rows, shape.heads, longest, shape.value, device=device, dtype=dtype)
        self.across: tuple[Tensor, Tensor] | None = None
        self.slots = slots
        self.window = window
        # scratch of the kernel: how many programs of each row and group are done
        self.arrived = None if slots is None else torch.zeros(rows, shape.heads, device=device, dtype=torch.int32)

    def append(self, key_BGTE: Tensor, value_BGTE: Tensor, start: int) -> tuple[Tensor, Tensor]:
        new = key_BGTE.shape[2]
        if self.slots is not None:
            rows_B1, at_BT = self.slots.rows_B1, self.slots.places(new)
            self.keys.transpose(1, 2)[rows_B1, at_BT] = key_BGTE.transpose(1, 2).to(self.keys.dtype)  # autocast
            self.values.transpose(1, 2)[rows_B1, at_BT] = value_BGTE.transpose(1, 2).to(self.values.dtype)
            return self.keys, self.values
        self.keys.narrow(2, start, new).copy_(key_BGTE)  # not by index: that costs twice the time, once per token
        self.values.narrow(2, start, new).copy_(value_BGTE)
        return self.keys.narrow(2, 0, start + new), self.values.narrow(2, 0, start + new)

    def attend(self, query_BHTE: Tensor, scale: float) -> Tensor | None:
        """The mixed values [B, H, T, E] if the cache knows itself what may be seen, else None: the mask is needed."""
        if self.slots is None or not self.slots.direct:
            return None
        if self.slots.kernel and self.arrived is not None:
            from trivium.kernels.decode import attend, fits  # triton is not everywhere

            if fits(query_BHTE, self.keys, self.values):
                held = (self.keys, self.values, self.slots.lengths_B, self.arrived)
                return attend(query_BHTE, *held, scale, self.window)
        return plainly(query_BHTE, self.keys, self.values, self.slots, scale, self.window)


class Cache:
    """The state of a generation: every layer's cache, how many tokens they hold, and what came from the source.

    With `slots` each row has a length of its own; `windows` are then those of the layers.
    """

    def __init__(
        self,
        rows: int,
        longest: int,
        shapes: Sequence[Shape],
        device: torch.device,
        dtype: torch.dtype,
        slots: Slots | None = None,
        windows: Sequence[int] = (),
    ) -> None:
        self.layers = [
            LayerCache(rows, longest, shape, device, dtype, slots, window)
            for shape, window in zip(shapes, windows or [0] * len(shapes), strict=True)
        ]
        self.positions = torch.zeros(rows, longest, device=device, dtype=torch.long)  # of the tokens seen so far
        self.rows = rows
        self.length = 0
        self.slots = slots
        self.memory: Tensor | None = None  # [B, S, D] the encoder's output, of which `across` is made
        self.memory_padding: Tensor | None = None

    def place(self, at_BT: Tensor) -> Tensor:
        """Note the positions of new tokens; all positions so far, [B, S]."""
        if self.slots is not None:
            return self.slots.at_1S
        new = at_BT.shape[1]
        self.positions.narrow(1, self.length, new).copy_(at_BT.expand(self.rows, new))
        return self.positions.narrow(1, 0, self.length + new)

    def keep(self, rows: Tensor) -> None:
        """Keep (and reorder to) these rows only: finished rows leave the batch."""
        for layer in self.layers:
            layer.keys = layer.keys[rows]
            layer.values = layer.values[rows]
            if layer.across is not None:
                layer.across = (layer.across[0][rows], layer.across[1][rows])
        self.positions = self.positions[rows]
        self.memory = None if self.memory is None else self.memory[rows]
        self.memory_padding = None if self.memory_padding is None else self.memory_padding[rows]
        self.rows = len(rows)


def plainly(
    query_BHTE: Tensor, keys_BGSE: Tensor, values_BGSE: Tensor, slots: Slots, scale: float, window: int
) -> Tensor:
    """Attention of each row's newest T tokens to what it holds: the plain version of the kernel."""
    places_BT1 = slots.places(query_BHTE.shape[2])[:, :, None]
    seen_BTS = slots.at_1S[:, None] <= places_BT1
    if window:
        seen_BTS = seen_BTS & (slots.at_1S[:, None] > places_BT1 - window)
    grouped = query_BHTE.shape[1] != keys_BGSE.shape[1]
    return F.scaled_dot_product_attention(
        query_BHTE, keys_BGSE, values_BGSE, attn_mask=seen_BTS[:, None], scale=scale, enable_gqa=grouped
    )
