"""Who may attend to whom, as a description that can give itself in several forms (spec: architecture §1.3).

One convention everywhere: boolean, True = may attend.
"""

# B batch, T queries, S keys

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

# Keys from which on our kernel for a trained bias pays, forward and backward of 64 rows on an H200: 512 took 1.05 ms
# instead of 2.2; 114, causal, 0.140 where torch's memory-efficient kernel and the making of its mask took 0.189. Fewer
# were not measured.
FLASH = 64


class Resolved(NamedTuple):
    """A mask in the form that attention takes.

    For scaled dot-product attention: a dense tensor, or the causal flag, or neither. The dense tensor is boolean, or a
    float that is added to the scores: -inf where a key may not be seen. On a GPU in training there is one more form:
    `bias` [1, H, T, S] and `seen` [B, S] beside the causal flag for the kernel in `kernels/flash.py`. Of these
    `together` makes the first, from the `mask` that they are of.
    """

    dense: Tensor | None
    is_causal: bool
    bias: Tensor | None = None
    seen: Tensor | None = None
    mask: Mask | None = None

    def together(self, queries: int, keys: int, device: torch.device) -> Resolved:
        """The same for scaled dot-product attention."""
        if self.mask is None:
            return self
        everything = self.seen is None and not self.is_causal
        return Resolved(_joined(self.bias, None if everything else self.mask.dense(queries, keys, device)), False)


class AnyMask(Protocol):
    """What a stack asks of a mask."""

    def within(self, window: int) -> AnyMask: ...
    def resolve(
        self,
        queries: int,
        keys: int,
        device: torch.device,
        bias: Tensor | None = None,
        dtype: torch.dtype | None = None,
    ) -> Resolved: ...


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

    def resolve(
        self,
        queries: int,
        keys: int,
        device: torch.device,
        bias: Tensor | None = None,
        dtype: torch.dtype | None = None,
    ) -> Resolved:
        """The cheapest form for T queries over S keys, with a position scheme's `bias` [1 or B, H, T, S] added in.

        A GPU wants the bias in the `dtype` of the queries.
        """
        fast = device.type == "cuda" and torch.is_grad_enabled()
        if bias is not None and dtype is not None and device.type == "cuda":
            bias = bias.to(dtype)
        causal = self.causal if queries > 1 else False  # one query is the last position: it may see every key
        if self.documents is None and not 0 < self.window < keys and not (causal and self.prefix is not None):
            if self.padding is None and bias is None and (not causal or queries == keys):
                return Resolved(None, causal)
            if fast and keys >= FLASH and bias is not None and len(bias) == 1 and bias.requires_grad:
                return Resolved(None, causal, bias=bias, seen=self.padding, mask=self)
            if self.padding is None and not causal:
                return Resolved(bias, False)
        return Resolved(_joined(bias, self.dense(queries, keys, device)), False)

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


def _joined(bias: Tensor | None, allowed: Tensor | None) -> Tensor | None:
    """The dense form of both."""
    if bias is None or allowed is None:
        return allowed if bias is None else bias
    dense = bias.masked_fill(~allowed, float("-inf"))
    if dense.device.type == "cuda" and dense.shape[-1] % 16:  # else the kernels of torch do so once per layer
        dense = F.pad(dense, (0, -dense.shape[-1] % 16))[..., : dense.shape[-1]]
    return dense
