"""One layer of a stack: how its sub-layers are wired."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor, nn

from trivium.models.options import Block, Parallel
from trivium.parts.dropout import dropout
from trivium.parts.losses import WithLosses, merge, split, with_losses
from trivium.parts.mixers import Context
from trivium.parts.site import NoPart, Site


class StandardBlock(nn.Module):
    """Attention, cross-attention where there is a source, then the feed-forward network, each joined to the stream."""

    def __init__(self, options: Block, site: Site) -> None:
        super().__init__()

        def connection() -> nn.Module:
            return options.residual.build(site, options.norm, options.dropout, options.variational_dropout)

        self.attention = options.attention.build(site)
        self.around_attention = connection()
        self.cross: nn.Module | None = None
        if not isinstance(options.cross, NoPart):
            self.cross = options.cross.build(replace(site, source=site.width))
            self.around_cross = connection()
        self.feedforward = options.feedforward.build(site)
        self.around_feedforward = connection()

    def forward(self, x: Tensor, ctx: Context) -> Tensor | WithLosses:
        x, losses = split(self.around_attention(x, lambda y: self.attention(y, ctx)))
        cross = self.cross
        if cross is not None:
            x, more = split(self.around_cross(x, lambda y: cross(y, ctx)))
            losses = merge(losses, more)
        x, more = split(self.around_feedforward(x, lambda y: self.feedforward(y, ctx)))
        return with_losses(x, merge(losses, more))


class ParallelBlock(nn.Module):
    """A pre-norm block except that attention and feed-forward read the same stream (GPT-J, PaLM, GPT-NeoX)."""

    def __init__(self, options: Parallel, site: Site) -> None:
        super().__init__()
        self.attention = options.attention.build(site)
        self.feedforward = options.feedforward.build(site)
        self.norm = options.norm.build(site)
        self.feedforward_norm = options.norm.build(site) if options.norms == "two" else None
        self.dropout = options.dropout

    def forward(self, x: Tensor, ctx: Context) -> Tensor | WithLosses:
        normed = self.norm(x)
        attended, losses = split(self.attention(normed, ctx))
        fed, more = split(self.feedforward(normed if self.feedforward_norm is None else self.feedforward_norm(x), ctx))
        x = x + dropout(attended, self.dropout, self.training) + dropout(fed, self.dropout, self.training)
        return with_losses(x, merge(losses, more))
