"""A stack whose masks, contexts and caches are in the form that fast attention takes."""

from __future__ import annotations

from typing import final

import torch
from torch import Tensor

from trivium.fast.block import FastContext, TwoReaders, is_known
from trivium.fast.cache import KernelCache
from trivium.fast.hooks import any_hooks
from trivium.fast.masks import FastScoreMask
from trivium.kernels.hardware import can_launch
from trivium.models.stack import PlainStack
from trivium.parts.attention import MultiHeadAttention
from trivium.parts.cache import Cache, Slots
from trivium.parts.losses import WithLosses
from trivium.parts.masks import AnyMask
from trivium.parts.mixers import Context


@final
class FastStack(PlainStack):
    """`PlainStack` with a narrow residual stream, and masks, contexts and caches for fast attention."""

    context = FastContext

    def forward(
        self,
        x_BTD: Tensor,
        at: Tensor,
        mask: AnyMask,
        cache: Cache | None = None,
        source: Tensor | None = None,
        source_mask: AnyMask | None = None,
    ) -> Tensor | WithLosses:
        if self.training and self.residual_dtype is not None and torch.is_autocast_enabled(x_BTD.device.type):
            x_BTD = x_BTD.to(self.residual_dtype)
        return super().forward(x_BTD, at, mask, cache, source, source_mask)

    def contexts(
        self,
        x_BTD: Tensor,
        at: Tensor,
        mask: AnyMask,
        cache: Cache | None,
        source: Tensor | None,
        source_mask: AnyMask | None,
    ) -> list[Context]:
        contexts = super().contexts(x_BTD, at, mask, cache, source, source_mask)
        if can_launch(x_BTD) and torch.is_grad_enabled() and self._is_one_graph():
            readers = TwoReaders()
            for ctx in contexts:
                assert isinstance(ctx, FastContext)
                ctx.readers = readers
        return contexts

    def _is_one_graph(self) -> bool:
        """Whether the compiler sees all layers as one graph: known parts, no hooks, nothing computed again going back.

        Across a break of the graph torch 2.11 loses the gradient of one of two views.
        """
        if self.recompute and self.training:
            return False
        return all(is_known(block) for block in self.blocks) and not any_hooks(self)

    def score_mask(self, mask: AnyMask, x_BTD: Tensor, keys: int, bias: Tensor | None = None) -> FastScoreMask:
        return FastScoreMask(mask, x_BTD, keys, bias, dropout=self.training and self._has_dropout())

    def cache(self, rows: int, longest: int, like: Tensor, slots: Slots | None = None) -> Cache:
        if slots is None:
            return super().cache(rows, longest, like)
        sizes = zip(self.cache_shapes, self.windows, strict=True)
        layers = [KernelCache(rows, longest, shape, like.device, like.dtype, slots, window) for shape, window in sizes]
        return Cache(layers, rows, longest, like.device, slots)

    def _has_dropout(self) -> bool:
        """Whether a layer drops attention weights, which our kernel does not."""
        mixers = (getattr(block, "attention", None) for block in self.blocks)
        return any(isinstance(mixer, MultiHeadAttention) and mixer.dropout > 0 for mixer in mixers)
