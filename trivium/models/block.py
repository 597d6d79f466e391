"""One layer of a stack."""

from __future__ import annotations

from typing import cast

from torch import Tensor, nn

from trivium.models.config import Block, NoPart
from trivium.parts.cache import LayerCache
from trivium.parts.masks import Resolved
from trivium.parts.positions import Positions
from trivium.parts.residual import Connection
from trivium.parts.site import Site


class StandardBlock(nn.Module):
    """Self-attention, then cross-attention if there is a source, then feed-forward, each joined to the stream."""

    def __init__(self, options: Block, site: Site, cross_site: Site | None) -> None:
        super().__init__()
        self.attention = options.attention.build(site)
        self.around_attention = options.residual.build(site, options.norm, options.dropout)
        self.cross: nn.Module | None = None
        if cross_site is not None and not isinstance(options.cross, NoPart):
            self.cross = options.cross.build(cross_site)
            self.around_cross = options.residual.build(site, options.norm, options.dropout)
        self.feedforward = options.feedforward.build(site)
        self.around_feedforward = options.residual.build(site, options.norm, options.dropout)

    def forward(
        self,
        x: Tensor,
        mask: Resolved,
        position: Positions,
        prepared: Tensor | None,
        cache: LayerCache | None,
        start: int,
        source: Tensor | None,
        source_mask: Resolved | None,
    ) -> Tensor:
        around = cast(Connection, self.around_attention)
        x = around.leave(x, self.attention(around.enter(x), mask, position, prepared, cache, start))
        if self.cross is not None:
            around = cast(Connection, self.around_cross)
            y = self.cross(around.enter(x), source_mask, position, None, source_BSD=source)
            x = around.leave(x, y)
        around = cast(Connection, self.around_feedforward)
        return around.leave(x, self.feedforward(around.enter(x)))
