"""The settings of a layer: which parts it has and how they are wired."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, Protocol

from trivium.config import accept, fraction, place
from trivium.parts.options.attention import ATTENTIONS, Attention, MultiHeadOptions
from trivium.parts.options.feedforward import FEEDFORWARDS, FeedForward, MlpOptions
from trivium.parts.options.norms import NORMS, LayerNormOptions, Norm
from trivium.parts.options.positions import POSITIONS, LearnedOptions, Position
from trivium.parts.options.residual import RESIDUALS, PreOptions, Residual
from trivium.parts.site import Cost, NoPart, Site

if TYPE_CHECKING:
    from torch import nn


class AnyBlock(Protocol):
    """The options of one layer, whatever its wiring."""

    @property
    def attention(self) -> Attention: ...
    @property
    def cross(self) -> Attention | NoPart: ...
    @property
    def position(self) -> Position: ...
    def costs(self, site: Site) -> Iterator[tuple[str, Callable[[], Cost]]]:
        """Each part's name and a function that gives its cost here, or refuses."""

    def build(self, site: Site) -> nn.Module: ...
    def final(self, site: Site) -> nn.Module:
        """The norm after the last of such layers."""

    def final_cost(self, site: Site) -> Cost: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Block:
    """One layer: self-attention, cross-attention where there is a source, and a feed-forward network."""

    attention: Attention = place(ATTENTIONS, MultiHeadOptions())
    cross: Attention | NoPart = place({"none": NoPart, **ATTENTIONS}, NoPart())
    feedforward: FeedForward = place(FEEDFORWARDS, MlpOptions())
    norm: Norm = place(NORMS, LayerNormOptions())
    residual: Residual = place(RESIDUALS, PreOptions())
    position: Position = place(POSITIONS, LearnedOptions())
    dropout: float = 0.0  # of each sub-layer's output
    # of each sub-layer's output, with one mask for all tokens of a sequence (Gal and Ghahramani 2016)
    variational_dropout: float = 0.0

    def __post_init__(self) -> None:
        accept(self)
        fraction("dropout", self.dropout)
        fraction("variational_dropout", self.variational_dropout)

    def costs(self, site: Site) -> Iterator[tuple[str, Callable[[], Cost]]]:
        yield "attention", lambda: self.attention.cost(site)
        cross = self.cross
        if not isinstance(cross, NoPart):
            yield "cross", lambda: cross.cost(replace(site, source=site.width))
        yield "feedforward", lambda: self.feedforward.cost(site)
        norms = 2 if isinstance(cross, NoPart) else 3
        for _ in range(norms):
            yield "norm", lambda: self.residual.cost(site, self.norm)

    def build(self, site: Site) -> nn.Module:
        from trivium.models.block import StandardBlock

        return StandardBlock(self, site)

    def final(self, site: Site) -> nn.Module:
        return self.residual.final(site, self.norm)

    def final_cost(self, site: Site) -> Cost:
        return self.residual.final_cost(site, self.norm)


@dataclass(frozen=True, kw_only=True, slots=True)
class Parallel:
    """A pre-norm layer except that attention and feed-forward read the same stream and are added together."""

    attention: Attention = place(ATTENTIONS, MultiHeadOptions())
    feedforward: FeedForward = place(FEEDFORWARDS, MlpOptions())
    norm: Norm = place(NORMS, LayerNormOptions())
    norms: Literal["one", "two"] = "one"  # shared by both (GPT-J, PaLM), or one for each (GPT-NeoX)
    position: Position = place(POSITIONS, LearnedOptions())
    dropout: float = 0.0  # of each sub-layer's output

    def __post_init__(self) -> None:
        accept(self)
        fraction("dropout", self.dropout)

    @property
    def cross(self) -> NoPart:
        """Nobody has published where a source would join."""
        return NoPart()

    def costs(self, site: Site) -> Iterator[tuple[str, Callable[[], Cost]]]:
        yield "attention", lambda: self.attention.cost(site)
        yield "feedforward", lambda: self.feedforward.cost(site)
        for _ in range(2 if self.norms == "two" else 1):
            yield "norm", lambda: self.norm.cost(site)

    def build(self, site: Site) -> nn.Module:
        from trivium.models.block import ParallelBlock

        return ParallelBlock(self, site)

    def final(self, site: Site) -> nn.Module:
        return self.norm.build(site)

    def final_cost(self, site: Site) -> Cost:
        return self.norm.cost(site)


BLOCKS: dict[str, type[AnyBlock]] = {"standard": Block, "parallel": Parallel}
