"""One layer of a stack: how its sub-layers are wired."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor, nn

from trivium.models.options import Block, Parallel
from trivium.parts.dropout import dropout, locked
from trivium.parts.losses import Losses, WithLosses, merge, split, with_losses
from trivium.parts.mixers import Context
from trivium.parts.site import NoPart, Site


class StandardBlock(nn.Module):
    """Attention, cross-attention where there is a source, then the feed-forward network, each joined to the stream."""

    def __init__(self, options: Block, site: Site) -> None:
        super().__init__()
        self.attention = options.attention.build(site)
        self.around_attention = options.residual.build(site, options.norm, options.dropout)
        self.cross: nn.Module | None = None
        if not isinstance(options.cross, NoPart):
            self.cross = options.cross.build(replace(site, source=site.width))
            self.around_cross = options.residual.build(site, options.norm, options.dropout)
        self.feedforward = options.feedforward.build(site)
        self.around_feedforward = options.residual.build(site, options.norm, options.dropout)
        self.lock = options.lock

    def forward(self, x: Tensor, ctx: Context) -> Tensor | WithLosses:
        x, losses = self.join(self.around_attention, self.attention, x, ctx, ctx)
        if self.cross is not None:
            x, more = self.join(self.around_cross, self.cross, x, ctx, ctx)
            losses = merge(losses, more)
        x, more = self.join(self.around_feedforward, self.feedforward, x, ctx)
        return with_losses(x, merge(losses, more))

    def join(
        self, connection: nn.Module, part: nn.Module, x: Tensor, ctx: Context, *given: Context
    ) -> tuple[Tensor, Losses]:
        """The residual stream behind a part, which reads what is `given`; its output gets variational dropout."""

        def sublayer(y: Tensor) -> Tensor | WithLosses:
            output, losses = split(part(y, *given))
            return with_losses(locked(output, self.lock, self.training), losses)

        return split(connection(x, sublayer))


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
        fed, more = split(self.feedforward(normed if self.feedforward_norm is None else self.feedforward_norm(x)))
        x = x + dropout(attended, self.dropout, self.training) + dropout(fed, self.dropout, self.training)
        return with_losses(x, merge(losses, more))
