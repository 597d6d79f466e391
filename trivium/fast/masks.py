"""Masks in the form that the fastest attention takes: a causal flag, a bias for our kernel, or a dense tensor."""

# B batch, T queries, S keys, H query heads

from __future__ import annotations

import math
from typing import final

import torch
import torch.nn.functional as F
from torch import Tensor

from trivium.kernels.hardware import can_launch, working
from trivium.parts.masks import AnyMask, Mask, ScoreMask, masked_bias

# Keys from which on our kernel for a trained bias pays, forward and backward; fewer were not measured.
_FLASH = 64


@final
class FastScoreMask(ScoreMask):
    """One of four forms: nothing to hide, the causal flag, a dense tensor, or `flash`.

    `flash` is for kernels/flash.py: the bias [1, H, T, S] and the real keys [B, S] beside the causal flag; its dense
    form is made when something else asks for it.
    """

    def __init__(
        self, mask: AnyMask, x_BTD: Tensor, keys: int, bias: Tensor | None = None, *, dropout: bool = False
    ) -> None:
        """The form for the queries `x`; with `dropout` of the attention weights the kernel does not apply."""
        queries, device = x_BTD.shape[1], x_BTD.device
        self.mask, self.causal, self.flash = mask, False, False
        self.real: Tensor | None = None
        self._sizes, self._dense = (queries, keys, device), None
        if bias is not None and device.type == "cuda":
            bias = bias.to(working(x_BTD))  # once for all layers
        self.bias = bias
        if not isinstance(mask, Mask):
            # as a sum: attention would make one of a boolean mask, in every layer again
            self._dense = _added(bias, mask.dense(*self._sizes), working(x_BTD))
            return
        causal = mask.causal if queries > 1 else False  # one query is the last position: it may see every key
        if mask.documents is None and not 0 < mask.window < keys and not (causal and mask.prefix is not None):
            if mask.padding is None and bias is None and (not causal or queries == keys):
                self.causal = causal
                return
            if bias is not None and not dropout and _flash_fits(bias, keys):
                self.causal, self.real, self.flash = causal, mask.padding, True
                return
            if mask.padding is None and not causal:
                self._dense = bias
                return
        self._dense = self._masked()

    def dense(self) -> Tensor | None:
        if self.flash:
            return self._masked() if self.causal or self.real is not None else self.bias
        if self.causal:
            return self.mask.dense(*self._sizes)
        return self._dense

    def _masked(self) -> Tensor | None:
        dense = masked_bias(self.bias, self.mask.dense(*self._sizes))
        if dense is not None and self.bias is not None and dense.device.type == "cuda" and dense.shape[-1] % 16:
            # else the kernels of torch do so once per layer
            dense = F.pad(dense, (0, -dense.shape[-1] % 16))[..., : dense.shape[-1]]
        return dense


def _flash_fits(bias: Tensor, keys: int) -> bool:
    """Whether our kernel pays: a trained bias of all rows alike, in training on a GPU."""
    return can_launch(bias) and torch.is_grad_enabled() and keys >= _FLASH and len(bias) == 1 and bias.requires_grad


def _added(bias: Tensor | None, allowed: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """The bias where keys are seen and -inf elsewhere."""
    if allowed is None or allowed.is_floating_point():
        return masked_bias(bias, allowed)
    bias = torch.zeros((), dtype=dtype, device=allowed.device) if bias is None else bias.to(dtype)
    return torch.where(allowed, bias, -math.inf)
