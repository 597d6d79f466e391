"""The blocks of one side, their shared positions and the final norm."""

# B batch, T tokens, S keys, D width

from __future__ import annotations

from dataclasses import replace
from typing import cast

from torch import Tensor, nn

from trivium.models.block import StandardBlock
from trivium.models.config import ModelConfig, Stack
from trivium.parts.cache import Cache, Shape
from trivium.parts.masks import Mask, Resolved
from trivium.parts.positions import Position, Positions


class PlainStack(nn.Module):
    """Blocks one after another; layers that name equal position options share one position module."""

    def __init__(self, options: Stack, config: ModelConfig, *, causal: bool, crossed: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList()
        self.positions = nn.ModuleList()
        self.position_of: list[int] = []
        self.cache_shapes: list[Shape] = []
        known: list[Position] = []
        for layer, block in enumerate(options.blocks()):
            site = config.site(layer=layer, depth=options.layers, causal=causal)
            self.blocks.append(StandardBlock(block, site, replace(site, source=site.width) if crossed else None))
            self.cache_shapes.append(block.attention.cache_shape(site))
            if block.position not in known:
                known.append(block.position)
                self.positions.append(block.position.build(block.inner(site)))
            self.position_of.append(known.index(block.position))
        self.final = options.block.residual.final(config.site(depth=options.layers), options.block.norm)

    def embed(self, x_BTD: Tensor, at: Tensor) -> Tensor:
        """The input of the first block: each position scheme adds what it has to add."""
        for position in self.positions:
            x_BTD = cast(Positions, position).embed(x_BTD, at)
        return x_BTD

    def forward(
        self,
        x_BTD: Tensor,
        at: Tensor,
        mask: Mask,
        cache: Cache | None = None,
        source: Tensor | None = None,
        source_mask: Mask | None = None,
    ) -> Tensor:
        """The states after the last block and the final norm; `at` is the position of every token, [1 or B, T]."""
        start = 0 if cache is None else cache.length
        queries, device = x_BTD.shape[1], x_BTD.device
        resolved = mask.resolve(queries, start + queries, device)
        across: Resolved | None = None
        if source is not None:
            across = (source_mask or Mask()).resolve(queries, source.shape[1], device)
        prepared = [cast(Positions, position).prepare(at) for position in self.positions]
        for layer, block in enumerate(self.blocks):
            index = self.position_of[layer]
            layer_cache = None if cache is None else cache.layers[layer]
            x_BTD = block(x_BTD, resolved, self.positions[index], prepared[index], layer_cache, start, source, across)
        if cache is not None:
            cache.length += queries
        result: Tensor = self.final(x_BTD)
        return result
