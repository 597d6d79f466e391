"""Who may attend to whom, as a description that can give itself in several forms (spec: architecture §1.3).

One convention everywhere: boolean, True = may attend.
"""

# B batch, T queries, S keys

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor


class Resolved(NamedTuple):
    """A mask in the form that scaled dot-product attention takes: a dense tensor, or the causal flag, or neither."""

    dense: Tensor | None
    is_causal: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Mask:
    """The conditions on a pair (query, key); all given ones must hold.

    With a cache there are more keys than queries: the queries are the *last* T of the S positions.
    """

    causal: bool = False
    padding: Tensor | None = None  # [B, S] True = a real token
    documents: Tensor | None = None  # [B, S] document number; 0 = padding, attends to nothing

    def resolve(self, queries: int, keys: int, device: torch.device) -> Resolved:
        """The cheapest form for T queries over S keys."""
        if self.padding is None and self.documents is None:
            if not self.causal or queries == 1:  # one query is the last position: it may see every key
                return Resolved(None, False)
            if queries == keys:
                return Resolved(None, True)
        return Resolved(self.dense(queries, keys, device), False)

    def dense(self, queries: int, keys: int, device: torch.device) -> Tensor:
        """The boolean tensor, [1 or B, 1, T, S]."""
        query_T1 = torch.arange(keys - queries, keys, device=device)[:, None]
        key_1S = torch.arange(keys, device=device)[None, :]
        # bottom-right triangle: SDPA's own `is_causal` would align it top-left
        allowed = (key_1S <= query_T1) if self.causal else torch.ones_like(key_1S <= query_T1)
        allowed_B1TS = allowed[None, None]
        if self.padding is not None:
            allowed_B1TS = allowed_B1TS & self.padding[:, None, None, :]
        if self.documents is not None:
            asking = self.documents[:, keys - queries :, None]
            same = (asking == self.documents[:, None, :]) & (asking > 0)
            allowed_B1TS = allowed_B1TS & same[:, None]
        return allowed_B1TS
