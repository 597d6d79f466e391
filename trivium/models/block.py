"""One layer of a stack: its options, its wiring and its cost."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple, cast

from torch import Tensor, nn

from trivium.models.options import Block, Parallel
from trivium.parts.attention import MultiHeadAttention
from trivium.parts.cache import LayerCache
from trivium.parts.dropout import dropout, locked
from trivium.parts.feedforward import GluFeedForward, MlpFeedForward
from trivium.parts.hooks import has_hooks
from trivium.parts.linear import Linear, lent
from trivium.parts.masks import Resolved
from trivium.parts.positions import Positions
from trivium.parts.residual import Connection, Fork, PostConnection
from trivium.parts.site import NoPart, Site

# Parts that can leave the gradient of their last bias to the norm behind them.
LENDERS = (MultiHeadAttention, MlpFeedForward, GluFeedForward)


class Around(NamedTuple):
    """What a layer finds around it besides the stream: whom it may see, where, and what was seen before."""

    mask: Resolved
    position: Positions
    prepared: Any
    cache: LayerCache | None
    start: int
    source: Tensor | None = None
    source_mask: Resolved | None = None
    fork: Fork | None = None  # of the stream, where nothing is computed again going back


class StandardBlock(nn.Module):
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

    def forward(self, x: Tensor, here: Around) -> Tensor:
        given: tuple[Any, ...] = (here.mask, here.position, here.prepared, here.cache, here.start)
        x = self._join(self.around_attention, self.attention, x, here.fork, *given)
        if self.cross is not None:
            given = (here.source_mask, here.position, None, here.cache)
            x = self._join(self.around_cross, self.cross, x, here.fork, *given, source_BSD=here.source)
        return self._join(self.around_feedforward, self.feedforward, x, here.fork)

    def _join(
        self, around: nn.Module, part: nn.Module, x: Tensor, fork: Fork | None, *given: Any, **named: Any
    ) -> Tensor:
        """The stream behind a part, which is told what was `given`."""
        # a hook may change the part's output: the gradient of the norm's input is not that of the bias then
        writer = part.writer if isinstance(part, LENDERS) and not has_hooks(part) else None
        # in float8 the compiler rounds what is normed, and its gradient, in passing: the kernel would be one more read
        kept = (self.training and self.lock) or (isinstance(writer, Linear) and writer.narrow)
        if fork is None or kept or not isinstance(around, PostConnection) or not around.forks(x):
            plain = cast(Connection, around)
            return plain.leave(x, locked(part(plain.enter(x), *given, **named), self.lock, self.training))
        past, into = fork.ends(x)
        bias = lent(writer)
        if bias is not None:
            named["lend"] = True
        return around.fork(past, part(into, *given, **named), bias, fork)


class ParallelBlock(nn.Module):
    def __init__(self, options: Parallel, site: Site) -> None:
        super().__init__()
        self.attention = options.attention.build(site)
        self.feedforward = options.feedforward.build(site)
        self.norm = options.norm.build(site)
        self.feedforward_norm = options.norm.build(site) if options.norms == "two" else None
        self.dropout = options.dropout

    def forward(self, x: Tensor, here: Around) -> Tensor:
        normed = self.norm(x)
        attended = self.attention(normed, here.mask, here.position, here.prepared, here.cache, here.start)
        fed = self.feedforward(normed if self.feedforward_norm is None else self.feedforward_norm(x))
        return x + dropout(attended, self.dropout, self.training) + dropout(fed, self.dropout, self.training)
