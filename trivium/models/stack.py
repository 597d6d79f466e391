"""The blocks of one side, their positions and the final norm."""

# B batch, T tokens, S keys, D width

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from trivium.kernels.hardware import working
from trivium.models.block import Around
from trivium.models.config import ModelConfig, Stack, inner, sharing
from trivium.parts.cache import Cache
from trivium.parts.dropout import locked
from trivium.parts.masks import AnyMask, Mask, Resolved
from trivium.parts.options.attention import Shape
from trivium.parts.positions import Positions
from trivium.parts.residual import Fork


class PlainStack(nn.Module):
    """Blocks one after another; layers that name equal position options share one position module."""

    def __init__(self, options: Stack, config: ModelConfig, *, causal: bool) -> None:
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
        self.lock = options.lock
        self.stream: torch.dtype | None = None  # from block to block in training, where autocast is; None: as it is
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
    ) -> Tensor:
        """The states after the last block and the final norm; `at` is the position of every token, [1 or B, T]."""
        if self.training and self.stream is not None and torch.is_autocast_enabled(x_BTD.device.type):
            x_BTD = x_BTD.to(self.stream)
        start = 0 if cache is None else cache.length
        keys_at = at if cache is None else cache.place(at)
        prepared = [cast(Positions, position).prepare(at, keys_at) for position in self.positions]
        across: Resolved | None = None
        if source is not None:
            across = (source_mask or Mask()).resolve(x_BTD.shape[1], source.shape[1], x_BTD.device)
        fork = None if self.recompute and self.training else Fork()
        resolved: dict[tuple[int, int], Resolved] = {}  # once for all layers with the same window and positions
        for layer, block in enumerate(self.blocks):
            window, index = self.windows[layer], self.position_of[layer]
            position = cast(Positions, self.positions[index])
            if (window, index) not in resolved:
                bias = position.bias(prepared[index])
                sizes = x_BTD.shape[1], start + x_BTD.shape[1], x_BTD.device
                found = mask.within(window).resolve(*sizes, bias, working(x_BTD))
                noisy = self.training and cast(float, getattr(block.attention, "dropout", 0.0)) > 0
                found = found.together(*sizes) if noisy else found  # then by SDPA: once for all layers
                resolved[window, index] = found
            layer_cache = None if cache is None else cache.layers[layer]
            here = Around(resolved[window, index], position, prepared[index], layer_cache, start, source, across, fork)
            if self.recompute and self.training:
                x_BTD = cast(Tensor, checkpoint(block, x_BTD, here, use_reentrant=False))
            else:
                x_BTD = block(x_BTD, here)
        if cache is not None:
            cache.length += x_BTD.shape[1]
        return locked(self.final(x_BTD), self.lock, self.training)
