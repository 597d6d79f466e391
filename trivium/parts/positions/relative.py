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

from trivium.parts.declared import BIAS_TABLE, POSITION, Declared
from trivium.parts.options.positions import BucketOptions, ShawOptions
from trivium.parts.positions.base import Computed, Positions, distances
from trivium.parts.site import Site


class ShawPositions(Positions):
    """A trained vector per clipped distance, added to keys and, by option, values (Shaw et al. 2018)."""

    declares: ClassVar[Mapping[str, Declared]] = {"key_table": POSITION, "value_table": POSITION}

    def __init__(self, options: ShawOptions, site: Site) -> None:
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
        products_BHTC = query_BHTE @ self._table(self.key_table).to(query_BHTE.dtype).transpose(-1, -2)
        return products_BHTC.gather(-1, prepared.expand(*products_BHTC.shape[:2], -1, -1))

    def value(self, weights_BHTS: Tensor, prepared: Any) -> Tensor | None:
        if self.value_table is None:
            return None
        # the weight of each row first, by the same reasoning
        sums_BHTC = weights_BHTS.new_zeros(*weights_BHTS.shape[:3], 2 * self.distance + 1)
        sums_BHTC = sums_BHTC.scatter_add(-1, prepared.expand_as(weights_BHTS), weights_BHTS)
        return sums_BHTC @ self._table(self.value_table).to(weights_BHTS.dtype)

    def _table(self, table: Tensor) -> Tensor:
        """All of it where the heads share one, [C, E], else that of the own heads, [H, C, E]."""
        return table if table.ndim == 2 else self.of_own_heads(table, 0)


class BucketPositions(Computed):
    """A trained bias per head and bucket of distances, added to the scores (T5, Raffel et al. 2020)."""

    declares: ClassVar[Mapping[str, Declared]] = {"table": BIAS_TABLE}

    def __init__(self, options: BucketOptions, heads: int, causal: bool, context: int) -> None:
        super().__init__()
        self.options = options
        self.causal = causal
        self.far = min(options.distance, context)  # no two tokens are further apart
        self.table = nn.Parameter(torch.empty(options.buckets, heads))
        self.settle()

    def compute(self, device: torch.device) -> Tensor:
        """The bucket of every distance in a text: a lookup gives the same on every device."""
        far = self.far
        result = torch.empty(2 * far + 1, dtype=torch.int64, device=device)
        if result.is_meta:
            return result
        buckets = self.options.buckets // (1 if self.causal else 2)
        # where each bucket begins: a stranger's file may ask for more distances than can be counted one by one
        begins = [bisect_left(range(self.options.distance), bucket, key=self._bucket) for bucket in range(1, buckets)]
        past = torch.bucketize(torch.arange(far + 1), torch.tensor(begins, dtype=torch.int64), right=True)
        future = torch.zeros_like(past) if self.causal else past + buckets
        return result.copy_(torch.cat((past.flip(0), future[1:])))

    def _bucket(self, away: int) -> int:
        """The bucket among those of its direction of a key so many tokens away."""
        buckets = self.options.buckets // (1 if self.causal else 2)
        exact = buckets // 2
        if away < exact:
            return away
        spread = math.log(away / exact) / math.log(self.options.distance / exact) * (buckets - exact)
        return min(exact + int(spread), buckets - 1)

    def prepare(self, at_BT: Tensor, keys_at_BS: Tensor) -> Tensor:
        far = self.far
        bias_BHTS = self.look_up(self.constant[distances(at_BT, keys_at_BS).clamp_(-far, far).add_(far)])
        return bias_BHTS.to(torch.promote_types(bias_BHTS.dtype, torch.float32))

    def look_up(self, buckets_BTS: Tensor) -> Tensor:
        """The bias of every bucket, [1 or B, H, T, S]."""
        # an embedding, not an index: its backward pass repeats bit for bit on a GPU too
        return F.embedding(buckets_BTS, self.of_own_heads(self.table, 1)).permute(0, 3, 1, 2).contiguous()

    def bias(self, prepared: Any) -> Tensor:
        bias_BHTS: Tensor = prepared
        return bias_BHTS


class AlibiPositions(Computed):
    """A bias of `-slope * distance`, one fixed slope per head (Press et al. 2022)."""

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.settle()

    def compute(self, device: torch.device) -> Tensor:
        return torch.tensor(slopes(self.heads), dtype=torch.float32, device=device)[:, None, None]

    def prepare(self, at_BT: Tensor, keys_at_BS: Tensor) -> Tensor:
        away_BTS = distances(at_BT, keys_at_BS).abs_()
        return away_BTS[:, None] * -self.of_own_heads(self.constant, 0)

    def bias(self, prepared: Any) -> Tensor:
        bias_BHTS: Tensor = prepared
        return bias_BHTS


def slopes(heads: int) -> list[float]:
    """ALiBi's slopes: a geometric sequence from 2^(-8/h), filled up from that of twice as many heads."""
    power = 1 << (heads.bit_length() - 1)
    own = [2 ** (-8 * index / power) for index in range(1, power + 1)]
    return own + [2 ** (-4 * index / power) for index in range(1, 2 * (heads - power), 2)]
