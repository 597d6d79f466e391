"""Positions that act on the scores by distance: Shaw's vectors, T5's buckets, ALiBi (spec: architecture §2.4-2.7)."""

# B batch (1 where all rows agree), T queries, S keys, H query heads, E head size, C clipped distances

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trivium.parts.options.positions import Buckets, Shaw
from trivium.parts.positions.base import Computed, Positions, distances
from trivium.parts.site import Site


class ShawPositions(Positions):
    tables: ClassVar[Mapping[str, str]] = {"key_table": "position", "value_table": "position"}

    def __init__(self, options: Shaw, site: Site) -> None:
        super().__init__()
        self.distance = options.distance
        self.values = options.values == "add"
        rows = 2 * options.distance + 1
        shape = (site.heads, rows) if options.tables == "per-head" else (rows,)
        self.key_table = nn.Parameter(torch.empty(*shape, site.head))
        self.value_table = nn.Parameter(torch.empty(*shape, site.value)) if self.values else None

    def prepare(self, at_BT: Tensor, keys_at_BS: Tensor) -> Tensor:
        """The row of each pair, [1 or B, 1, T, S]."""
        clipped = distances(at_BT, keys_at_BS).clamp(-self.distance, self.distance)
        return clipped.add_(self.distance)[:, None]

    def score(self, query_BHTE: Tensor, prepared: Any) -> Tensor:
        # one product with each of the C rows, then a lookup: never the [T, S, E] of the formula
        products_BHTC = query_BHTE @ self.key_table.to(query_BHTE.dtype).transpose(-1, -2)
        return products_BHTC.gather(-1, prepared.expand(*products_BHTC.shape[:2], -1, -1))

    def value(self, weights_BHTS: Tensor, prepared: Any) -> Tensor | None:
        if self.value_table is None:
            return None
        # the weight of each row first, by the same reasoning
        sums_BHTC = weights_BHTS.new_zeros(*weights_BHTS.shape[:3], 2 * self.distance + 1)
        sums_BHTC = sums_BHTC.scatter_add(-1, prepared.expand_as(weights_BHTS), weights_BHTS)
        return sums_BHTC @ self.value_table.to(weights_BHTS.dtype)


class BucketPositions(Computed):
    tables: ClassVar[Mapping[str, str]] = {"table": "bias"}

    def __init__(self, options: Buckets, heads: int, causal: bool) -> None:
        super().__init__()
        self.options = options
        self.causal = causal
        self.table = nn.Parameter(torch.empty(options.buckets, heads))
        self.settle()

    def compute(self, device: torch.device) -> Tensor:
        """The bucket of every distance up to the last one: a lookup gives the same on every device."""
        far = self.options.distance
        if device.type == "meta":
            return torch.empty(2 * far + 1, dtype=torch.int64, device=device)
        buckets = self.options.buckets // (1 if self.causal else 2)
        # where each bucket begins: a stranger's file may ask for more distances than can be counted one by one
        begins = [bisect_left(range(far), bucket, key=self._bucket) for bucket in range(1, buckets)]
        past = torch.bucketize(torch.arange(far + 1), torch.tensor(begins, dtype=torch.int64), right=True)
        future = torch.zeros_like(past) if self.causal else past + buckets
        return torch.cat((past.flip(0), future[1:])).to(device)

    def _bucket(self, away: int) -> int:
        """The bucket among those of its direction of a key so many tokens away."""
        buckets = self.options.buckets // (1 if self.causal else 2)
        exact = buckets // 2
        if away < exact:
            return away
        spread = math.log(away / exact) / math.log(self.options.distance / exact) * (buckets - exact)
        return min(exact + int(spread), buckets - 1)

    def prepare(self, at_BT: Tensor, keys_at_BS: Tensor) -> Tensor:
        far = self.options.distance
        buckets_BTS = self.constant[distances(at_BT, keys_at_BS).clamp_(-far, far).add_(far)]
        if self.table.device.type == "cuda" and torch.is_grad_enabled() and torch.compiler.is_compiling():
            bias_BHTS = spread(buckets_BTS, self.table)
        else:  # an embedding, not an index: its backward pass repeats bit for bit on a GPU too
            bias_BHTS = F.embedding(buckets_BTS, self.table).permute(0, 3, 1, 2).contiguous()
        return bias_BHTS.to(torch.promote_types(bias_BHTS.dtype, torch.float32))

    def bias(self, prepared: Any) -> Tensor:
        bias_BHTS: Tensor = prepared
        return bias_BHTS


class AlibiPositions(Computed):
    def __init__(self, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.settle()

    def compute(self, device: torch.device) -> Tensor:
        return torch.tensor(slopes(self.heads), dtype=torch.float32, device=device)[:, None, None]

    def prepare(self, at_BT: Tensor, keys_at_BS: Tensor) -> Tensor:
        away_BTS = distances(at_BT, keys_at_BS).abs_()
        return away_BTS[:, None] * -self.constant

    def bias(self, prepared: Any) -> Tensor:
        bias_BHTS: Tensor = prepared
        return bias_BHTS


def spread(buckets_BTS: Tensor, table_CH: Tensor) -> Tensor:
    """The entries of a small table, [B, H, T, S], by a sum over its rows: for a compiler, which makes one loop of it.

    It would make the gradient of a lookup with atomic additions: here millions to 384 places, which took an H200 2.2 ms
    for 512 x 512 and 12 heads, in another order every time.
    """
    rows = torch.arange(len(table_CH), device=table_CH.device)[:, None, None]
    same_B1CTS = (buckets_BTS[:, None] == rows)[:, None]
    return torch.where(same_B1CTS, table_CH.t()[..., None, None], 0.0).sum(2)


def slopes(heads: int) -> list[float]:
    """ALiBi's slopes: a geometric sequence from 2^(-8/h), filled up from that of twice as many heads."""
    power = 1 << (heads.bit_length() - 1)
    own = [2 ** (-8 * index / power) for index in range(1, power + 1)]
    return own + [2 ** (-4 * index / power) for index in range(1, 2 * (heads - power), 2)]
