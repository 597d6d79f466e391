"""Keys and values of the tokens seen so far, one preallocated pair of tensors per layer."""

# B batch, G key/value heads, T new tokens, S longest length, E head size

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class Shape(NamedTuple):
    """What one layer keeps per token: G heads of E_k for keys, of E_v for values."""

    heads: int
    key: int
    value: int


class LayerCache:
    """One layer's keys and values; `append` writes in place and returns everything so far as views.

    `across` holds those of the source, computed once per source by the layer's cross-attention.
    """

    def __init__(self, rows: int, longest: int, shape: Shape, device: torch.device, dtype: torch.dtype) -> None:
        self.keys = torch.zeros(rows, shape.heads, longest, shape.key, device=device, dtype=dtype)
        self.values = torch.zeros(rows, shape.heads, longest, shape.value, device=device, dtype=dtype)
        self.across: tuple[Tensor, Tensor] | None = None

    def append(self, key_BGTE: Tensor, value_BGTE: Tensor, start: int) -> tuple[Tensor, Tensor]:
        new = key_BGTE.shape[2]
        self.keys.narrow(2, start, new).copy_(key_BGTE)  # not by index: that costs twice the time, once per token
        self.values.narrow(2, start, new).copy_(value_BGTE)
        return self.keys.narrow(2, 0, start + new), self.values.narrow(2, 0, start + new)


class Cache:
    """The state of a generation: every layer's cache, how many tokens they hold, and what came from the source."""

    def __init__(
        self, rows: int, longest: int, shapes: Sequence[Shape], device: torch.device, dtype: torch.dtype
    ) -> None:
        self.layers = [LayerCache(rows, longest, shape, device, dtype) for shape in shapes]
        self.positions = torch.zeros(rows, longest, device=device, dtype=torch.long)  # of the tokens seen so far
        self.rows = rows
        self.length = 0
        self.memory: Tensor | None = None  # [B, S, D] the encoder's output, of which `across` is made
        self.memory_padding: Tensor | None = None

    def place(self, at_BT: Tensor) -> Tensor:
        """Note the positions of new tokens; all positions so far, [B, S]."""
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
