"""The blocks of one side, their positions and the final norm."""

# B batch, T tokens, S keys, D width

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from trivium.models.config import BlockStack, ModelConfig, inner, sharing
from trivium.parts.cache import Cache, LayerCache, Slots, StateCache
from trivium.parts.dropout import dropout
from trivium.parts.losses import Losses, WithLosses, merge, split, with_losses
from trivium.parts.masks import AnyMask, Mask, ScoreMask
from trivium.parts.mixers import Context, MixerState
from trivium.parts.options.attention import Shape
from trivium.parts.positions import Positions


class PlainStack(nn.Module):
    """Blocks one after another; layers that name equal position options share one position module."""

    context: type[Context] = Context  # what a layer gets beside the residual stream

    def __init__(self, options: BlockStack, config: ModelConfig, *, causal: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList()
        self.positions = nn.ModuleList()
        self.cache_shapes: list[Shape] = []
        self.windows: list[int] = []
        shared = sharing(options, config.site())
        own = sorted(set(shared))
        self.position_of = [own.index(layer) for layer in shared]
        for layer, block in enumerate(options.blocks()):
            site = config.site(layer=layer, depth=options.layers, causal=causal)
            self.blocks.append(block.build(site))
            self.cache_shapes.append(block.attention.cache_shape(site))
            self.windows.append(block.attention.window)
            if layer in own:
                self.positions.append(block.position.build(inner(block, site)))
        self.final = options.block.final(config.site(depth=options.layers))
        self.variational_dropout = options.variational_dropout
        # of the residual stream in training, in a fast stack; None: as the embedding gives it
        self.residual_dtype: torch.dtype | None = None
        self.recompute = False  # whether training forgets what is inside a block and computes it again going back

    def embed(self, x_BTD: Tensor, at: Tensor) -> Tensor:
        """The input of the first block: each position scheme adds what it has to add."""
        for position in self.positions:
            x_BTD = cast(Positions, position).embed(x_BTD, at)
        return x_BTD

    def forward(
        self,
        x_BTD: Tensor,
        at: Tensor,
        mask: AnyMask,
        cache: Cache | None = None,
        source: Tensor | None = None,
        source_mask: AnyMask | None = None,
    ) -> Tensor | WithLosses:
        """The states after the last block and the final norm; `at` is the position of every token, [1 or B, T]."""
        losses: Losses = {}
        for block, ctx in zip(self.blocks, self.contexts(x_BTD, at, mask, cache, source, source_mask), strict=True):
            if self.recompute and self.training:
                x_BTD, more = split(checkpoint(block, x_BTD, ctx, use_reentrant=False))
            else:
                x_BTD, more = split(block(x_BTD, ctx))
            losses = merge(losses, more) if more else losses
        if cache is not None:
            cache.length += x_BTD.shape[1]
        return with_losses(dropout(self.final(x_BTD), 0.0, self.training, variational=self.variational_dropout), losses)

    def contexts(
        self,
        x_BTD: Tensor,
        at: Tensor,
        mask: AnyMask,
        cache: Cache | None,
        source: Tensor | None,
        source_mask: AnyMask | None,
    ) -> list[Context]:
        """The context of every layer; what positions and masks compute is shared by the layers that agree on it."""
        start = 0 if cache is None else cache.length
        keys_at = at if cache is None else cache.place(at)
        prepared = [cast(Positions, position).prepare(at, keys_at) for position in self.positions]
        across = None if source is None else self.score_mask(source_mask or Mask(), x_BTD, source.shape[1])
        masks: dict[tuple[int, int], ScoreMask] = {}
        found: list[Context] = []
        for layer, (window, index) in enumerate(zip(self.windows, self.position_of, strict=True)):
            position = cast(Positions, self.positions[index])
            if (window, index) not in masks:
                bias = position.bias(prepared[index])
                masks[window, index] = self.score_mask(mask.within(window), x_BTD, start + x_BTD.shape[1], bias)
            found.append(
                self.context(
                    mask=masks[window, index],
                    position=position,
                    prepared=prepared[index],
                    at=at,
                    cache=None if cache is None else cache.layers[layer],
                    start=start,
                    source=source,
                    source_mask=across,
                )
            )
        return found

    def score_mask(self, mask: AnyMask, x_BTD: Tensor, keys: int, bias: Tensor | None = None) -> ScoreMask:
        """The mask of the queries `x` over so many keys."""
        return ScoreMask(mask, x_BTD.shape[1], keys, x_BTD.device, bias)

    def cache(self, rows: int, longest: int, like: Tensor, slots: Slots | None = None) -> Cache:
        """An empty cache for `rows` sequences of at most `longest` tokens, where `like` is and in its precision."""
        layers: list[LayerCache | StateCache] = []
        for block, shape in zip(self.blocks, self.cache_shapes, strict=True):
            new_state = own_state(block)
            if new_state is None:
                layers.append(LayerCache(rows, longest, shape, like.device, like.dtype, slots))
            else:
                layers.append(StateCache(new_state(rows, longest, like)))
        return Cache(layers, rows, longest, like.device, slots)


def own_state(block: nn.Module) -> Callable[[int, int, Tensor], MixerState] | None:
    """What makes the state of a layer whose mixer, or which itself, keeps something else than keys and values."""
    mixer = block if hasattr(block, "new_state") else getattr(block, "attention", None)
    return cast("Callable[[int, int, Tensor], MixerState] | None", getattr(mixer, "new_state", None))
