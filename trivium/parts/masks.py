"""Who may attend to whom, as a description that can give itself in several forms (spec: architecture §1.3).

One convention everywhere: boolean, True = may attend.
"""

# B batch, T queries, S keys

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor


class Resolved(NamedTuple):
    """A mask in the form that scaled dot-product attention takes: a dense tensor, or the causal flag, or neither.

    The dense tensor is boolean, or a float that is added to the scores: -inf where a key may not be seen.
    """

    dense: Tensor | None
    is_causal: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Mask:
    """The conditions on a pair (query, key); all given ones must hold.

    With a cache there are more keys than queries: the queries are the *last* T of the S positions.
    """

    causal: bool = False
    window: int = 0  # only keys less than so many positions away, the token itself counted; 0 means no limit
    prefix: Tensor | None = None  # [B] the first so many keys are seen by all, causal or not
    padding: Tensor | None = None  # [B, S] True = a real token
    documents: Tensor | None = None  # [B, S] document number; 0 = padding, attends to nothing
    asking: Tensor | None = None  # [B, at least T] the queries' document numbers, if they are of another text

    def within(self, window: int) -> Mask:
        """The same mask for a layer that sees only so far; 0 means no limit."""
        return replace(self, window=window) if window else self

    def resolve(self, queries: int, keys: int, device: torch.device, bias: Tensor | None = None) -> Resolved:
        """The cheapest form for T queries over S keys, with a position scheme's `bias` [1 or B, H, T, S] added in."""
        limited = 0 < self.window < keys
        if self.padding is None and self.documents is None and not limited:
            if not self.causal or queries == 1:  # one query is the last position: it may see every key
                return Resolved(bias, False)
            if queries == keys and self.prefix is None and bias is None:
                return Resolved(None, True)
        allowed = self.dense(queries, keys, device)
        return Resolved(allowed if bias is None else bias.masked_fill(~allowed, float("-inf")), False)

    def dense(self, queries: int, keys: int, device: torch.device) -> Tensor:
        """The boolean tensor, [1 or B, 1, T, S]."""
        query_T1 = torch.arange(keys - queries, keys, device=device)[:, None]
        key_1S = torch.arange(keys, device=device)[None, :]
        # bottom-right triangle: SDPA's own `is_causal` would align it top-left
        allowed = (key_1S <= query_T1) if self.causal else torch.ones_like(key_1S <= query_T1)
        allowed_B1TS = allowed[None, None]
        if self.causal and self.prefix is not None:
            allowed_B1TS = allowed_B1TS | (key_1S < self.prefix[:, None, None, None])
        if self.window:
            allowed_B1TS = allowed_B1TS & ((query_T1 - key_1S).abs() < self.window)
        if self.padding is not None:
            allowed_B1TS = allowed_B1TS & self.padding[:, None, None, :]
        if self.documents is not None:
            asking = self.documents if self.asking is None else self.asking
            asking_BT1 = asking[:, asking.shape[1] - queries :, None]
            same = (asking_BT1 == self.documents[:, None, :]) & (asking_BT1 > 0)
            allowed_B1TS = allowed_B1TS & same[:, None]
        return allowed_B1TS
