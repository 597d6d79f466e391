"""Who may attend to whom, as a description that gives itself as a dense tensor (spec: architecture §1.3).

One convention everywhere: boolean, True = may attend.
"""

# B batch, T queries, S keys

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor


class AnyMask(Protocol):
    """What a stack asks of a mask."""

    def within(self, window: int) -> AnyMask:
        """The same mask for a layer that sees only so far; 0 means no limit."""

    def real(self, queries: int) -> Tensor | None:
        """Which of the last tokens are real, [B, T]; None if all are."""

    def dense(self, queries: int, keys: int, device: torch.device) -> Tensor | None:
        """[1 or B, 1 or H, T, S]: boolean, or a float that is added to the scores; None if everything is seen."""


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
        return replace(self, window=window) if window else self

    def real(self, queries: int) -> Tensor | None:
        """Which of the last tokens are real, [B, T]; None if all are."""
        if self.documents is not None:
            return self.documents[:, -queries:] > 0
        return None if self.padding is None else self.padding[:, -queries:]

    def dense(self, queries: int, keys: int, device: torch.device) -> Tensor | None:
        if not self.causal and not self.window and self.padding is None and self.documents is None:
            return None
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
            same_BTS = (asking_BT1 == self.documents[:, None, :]) & (asking_BT1 > 0)
            allowed_B1TS = allowed_B1TS & same_BTS[:, None]
        return allowed_B1TS


class ScoreMask:
    """A mask for T queries over S keys with the bias of a position scheme: what attention does to its scores.

    A stack makes it once for all layers with the same window and positions.
    """

    def __init__(
        self, mask: AnyMask, queries: int, keys: int, device: torch.device, bias: Tensor | None = None
    ) -> None:
        self.mask, self.bias = mask, bias
        self._dense = masked_bias(bias, mask.dense(queries, keys, device))

    def dense(self) -> Tensor | None:
        """[1 or B, 1 or H, T, S]: boolean, or a float that is added to the scores; None if everything is seen."""
        return self._dense


def masked_bias(bias: Tensor | None, allowed: Tensor | None) -> Tensor | None:
    """What is added to the scores where they are seen, and -inf where they are not."""
    if bias is None or allowed is None:
        return allowed if bias is None else bias
    return bias + allowed if allowed.is_floating_point() else bias.masked_fill(~allowed, float("-inf"))
