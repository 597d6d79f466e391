"""Rotary positions in one pass on a CPU, and T5's biases without atomic additions in compiled steps on a GPU."""

# B batch (1 where all rows agree), T queries, S keys, H heads, E head size, C buckets

from __future__ import annotations

from typing import final

import torch
from torch import Tensor

from trivium.kernels.eager import Turned, use_cpu_kernels
from trivium.parts.positions.relative import BucketPositions
from trivium.parts.positions.rotary import RotaryPositions


@final
class FastRotaryPositions(RotaryPositions):
    """`RotaryPositions` in one autograd function for eager steps on a CPU, in the layout of halves."""

    def _turn(self, x_BHTE: Tensor, prepared: Tensor) -> Tensor:
        if self.layout != "halves" or not use_cpu_kernels(x_BHTE):
            return super()._turn(x_BHTE, prepared)
        cos, sin = prepared.to(x_BHTE.dtype)
        result: Tensor = Turned.apply(x_BHTE, cos, sin)  # type: ignore[no-untyped-call]
        return result


@final
class FastBucketPositions(BucketPositions):
    """`BucketPositions` whose table is read by a sum over its rows where the compiler makes one loop of it."""

    def look_up(self, buckets_BTS: Tensor) -> Tensor:
        if self.table.device.type == "cuda" and torch.is_grad_enabled() and torch.compiler.is_compiling():
            return sum_of_rows(buckets_BTS, self.of_own_heads(self.table, 1))
        return super().look_up(buckets_BTS)


def sum_of_rows(buckets_BTS: Tensor, table_CH: Tensor) -> Tensor:
    """The entries of a small table, [B, H, T, S], by a sum over its rows.

    The compiler makes the gradient of a lookup with atomic additions: millions to 384 places, slow and in another
    order every time.
    """
    rows = torch.arange(len(table_CH), device=table_CH.device)[:, None, None]
    same_B1CTS = (buckets_BTS[:, None] == rows)[:, None]
    return torch.where(same_B1CTS, table_CH.t()[..., None, None], 0.0).sum(2)
