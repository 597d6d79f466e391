"""Keys and values of the tokens seen so far, one preallocated pair of tensors per layer."""

# B batch, G key/value heads, T new tokens, S longest length, E head size

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from trivium.parts.mixers import MixerState
from trivium.parts.options.attention import Shape


class Slots:
    """The lengths of sequences that share a cache, each its own, known to the device only.

    New tokens are written behind each sequence's length; the engine adds to the lengths after a step.
    """

    def __init__(self, rows: int, longest: int, device: torch.device) -> None:
        self.lengths_B = torch.zeros(rows, device=device, dtype=torch.long)
        self.rows_B1 = torch.arange(rows, device=device)[:, None]
        self.at_1S = torch.arange(longest, device=device)[None]

    def places(self, new: int) -> Tensor:
        """Where the next `new` tokens of every row stand, [B, T]; a row that is full goes on in its last place."""
        return (self.lengths_B[:, None] + self.at_1S[:, :new]).clamp(max=self.at_1S.shape[1] - 1)


@dataclass(frozen=True, kw_only=True, slots=True)
class SlotMask:
    """A causal mask over sequences of different lengths: each sees what it holds and its new tokens before its own."""

    slots: Slots
    window: int = 0

    def within(self, window: int) -> SlotMask:
        return SlotMask(slots=self.slots, window=window) if window else self

    def real(self, queries: int) -> Tensor | None:
        return None

    def dense(self, queries: int, keys: int, device: torch.device) -> Tensor:
        places_BT1, at_11S = self.slots.places(queries)[:, :, None], self.slots.at_1S[:, None]
        allowed_BTS = at_11S <= places_BT1
        if self.window:
            allowed_BTS = allowed_BTS & (at_11S > places_BT1 - self.window)
        return allowed_BTS[:, None]


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
    ) -> None:
        self.keys = torch.zeros(rows, shape.heads, longest, shape.key, device=device, dtype=dtype)
        self.values = torch.zeros(rows, shape.heads, longest, shape.value, device=device, dtype=dtype)
        self.across: tuple[Tensor, Tensor] | None = None
        self.slots = slots

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

    def keep(self, rows: Tensor) -> None:
        """Keep (and reorder to) these sequences only."""
        self.keys, self.values = self.keys[rows], self.values[rows]
        if self.across is not None:
            self.across = (self.across[0][rows], self.across[1][rows])


class StateCache:
    """The state of a layer whose mixer keeps something else than keys and values.

    `across` is for a cross-attention beside it.
    """

    def __init__(self, state: MixerState) -> None:
        self.state = state
        self.across: tuple[Tensor, Tensor] | None = None

    def keep(self, rows: Tensor) -> None:
        """Keep (and reorder to) these sequences only."""
        self.state.keep_rows(rows)
        if self.across is not None:
            self.across = (self.across[0][rows], self.across[1][rows])


class Cache:
    """The state of a generation: every layer's cache, how many tokens they hold, and what came from the source.

    With `slots` each sequence has a length of its own.
    """

    def __init__(
        self,
        layers: Sequence[LayerCache | StateCache],
        rows: int,
        longest: int,
        device: torch.device,
        slots: Slots | None = None,
    ) -> None:
        self.layers = list(layers)
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

    def roll_back(self, length: int) -> None:
        """Forget all but the first tokens."""
        if length < self.length:
            self.length = length
            for layer in self.layers:
                if isinstance(layer, StateCache):  # keys and values behind the length are written over
                    layer.state.roll_back(length)

    def keep(self, rows: Tensor) -> None:
        """Keep (and reorder to) these rows only: finished rows leave the batch."""
        for layer in self.layers:
            layer.keep(rows)
        self.positions = self.positions[rows]
        self.memory = None if self.memory is None else self.memory[rows]
        self.memory_padding = None if self.memory_padding is None else self.memory_padding[rows]
        self.rows = len(rows)
