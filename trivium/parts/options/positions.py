"""The settings of positions."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

from trivium.config import at_least, place
from trivium.errors import ConfigError
from trivium.parts.options.scaling import SCALINGS, NoScaling, Scaling
from trivium.parts.site import MOST, Cost, Site

if TYPE_CHECKING:
    from trivium.parts.positions.base import Positions


Scope = Literal["stack", "heads", "layer"]  # all of them, those whose heads are alike too, each its own


class Position(Protocol):
    """The options of a position scheme."""

    @property
    def scope(self) -> Scope:
        """Which layers of a stack that name equal options are served by one module."""
        ...

    def build(self, site: Site) -> Positions: ...
    def cost(self, site: Site) -> Cost: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class NoPositionOptions:
    """No signal at all: a causal decoder can still count, an encoder sees a bag."""

    @property
    def scope(self) -> Scope:
        return "stack"

    def build(self, site: Site) -> Positions:
        from trivium.parts.positions.base import Positions

        return Positions()

    def cost(self, site: Site) -> Cost:
        return Cost()


@dataclass(frozen=True, kw_only=True, slots=True)
class SinusoidalOptions:
    """Sines and cosines of the position at wavelengths from 2π to 20,000π; nothing is trained."""

    layout: Literal["interleaved", "halves"] = "interleaved"  # the paper and XLM; tensor2tensor and Marian use halves
    spacing: Literal["paper", "tensor2tensor"] = "paper"  # exponents i/(D/2), or i/(D/2-1) so that the last one is 1

    @property
    def scope(self) -> Scope:
        return "stack"

    def build(self, site: Site) -> Positions:
        self.cost(site)
        from trivium.parts.positions.absolute import SinusoidalPositions

        return SinusoidalPositions(site.context, site.width, self)

    def cost(self, site: Site) -> Cost:
        if site.width % 2:
            raise ConfigError(f"sinusoidal positions come in pairs, so a width of {site.width} cannot be odd")
        return Cost()


@dataclass(frozen=True, kw_only=True, slots=True)
class LearnedOptions:
    """A table of one vector per position, added to the embeddings; it ends where the context ends."""

    offset: int = 0  # unused rows before position 0: 2 in RoBERTa, BART and OPT

    def __post_init__(self) -> None:
        at_least("offset", self.offset, 0, MOST)

    @property
    def scope(self) -> Scope:
        return "stack"

    def build(self, site: Site) -> Positions:
        from trivium.parts.positions.absolute import LearnedPositions

        return LearnedPositions(site.context, site.width, self.offset)

    def cost(self, site: Site) -> Cost:
        return Cost((site.context + self.offset) * site.width)


@dataclass(frozen=True, kw_only=True, slots=True)
class ShawOptions:
    """A trained vector per distance up to `distance` either way, added to each key and value; a table per layer."""

    distance: int = 16  # what lies further counts as this far
    values: Literal["add", "none"] = "add"  # none: keys only
    tables: Literal["shared", "per-head"] = "shared"  # among the heads of a layer

    def __post_init__(self) -> None:
        at_least("distance", self.distance, 1, MOST)

    @property
    def scope(self) -> Scope:
        return "layer"

    def build(self, site: Site) -> Positions:
        self.cost(site)
        from trivium.parts.positions.relative import ShawPositions

        return ShawPositions(self, site)

    def cost(self, site: Site) -> Cost:
        _needs_heads("shaw", site)
        rows, copies = 2 * self.distance + 1, site.heads if self.tables == "per-head" else 1
        sizes = site.head + (site.value if self.values == "add" else 0)
        # scores, weights and what the tables add to them
        return Cost(copies * rows * sizes, 2 * site.heads * rows * sizes, kept=3 * site.heads * site.context)


@dataclass(frozen=True, kw_only=True, slots=True)
class BucketOptions:
    """T5: a trained number per head and bucket of distances; near ones have a bucket each, far ones share.

    Where the future is visible half of the buckets are for it, else all are for the past.
    """

    buckets: int = 32
    distance: int = 128  # from here on all share the last bucket

    def __post_init__(self) -> None:
        at_least("buckets", self.buckets, 2, MOST)
        at_least("distance", self.distance, 1, MOST)

    @property
    def scope(self) -> Scope:
        return "heads"

    def build(self, site: Site) -> Positions:
        self.cost(site)
        from trivium.parts.positions.relative import BucketPositions

        return BucketPositions(self, site.heads, site.causal, site.context)

    def cost(self, site: Site) -> Cost:
        _needs_heads("t5", site)
        if not site.causal and (self.buckets % 2 or self.buckets < 4):
            raise ConfigError(f"buckets: {self.buckets} cannot be halved between past and future; try 32")
        exact = self.buckets // (2 if site.causal else 4)
        if self.distance <= exact:
            raise ConfigError(f"distance: {self.distance} is not beyond the {exact} that have a bucket each; try 128")
        return Cost(self.buckets * site.heads, kept=site.heads * site.context)  # the weights


@dataclass(frozen=True, kw_only=True, slots=True)
class AlibiOptions:
    """Scores fall by a fixed slope per head with the distance, -m|i-j|: also into the future where it is visible."""

    @property
    def scope(self) -> Scope:
        return "heads"

    def build(self, site: Site) -> Positions:
        self.cost(site)
        from trivium.parts.positions.relative import AlibiPositions

        return AlibiPositions(site.heads)

    def cost(self, site: Site) -> Cost:
        _needs_heads("alibi", site)
        return Cost()


def _needs_heads(kind: str, site: Site) -> None:
    if site.heads < 1 or site.head < 1:
        raise ConfigError(f"{kind} positions act on the scores of attention heads, and this attention has none")


@dataclass(frozen=True, kw_only=True, slots=True)
class RotaryOptions:
    """Pairs of each head's dimensions turned by an angle that grows with the position."""

    theta: float = 10_000.0
    layout: Literal["halves", "interleaved"] = "halves"  # HF LLaMA pairs (i, i+E/2); Meta and RoFormer (2i, 2i+1)
    share: float = 1.0  # of each head that is turned, its first dimensions; the rest has no position
    scaling: Scaling = place(SCALINGS, NoScaling())

    def __post_init__(self) -> None:
        if not 0 < self.theta < math.inf:
            raise ConfigError(f"theta: {self.theta} is not positive; try 10000")
        if not 0 < self.share <= 1:
            raise ConfigError(f"share: {self.share} is not in (0, 1]; try 1")

    @property
    def scope(self) -> Scope:
        return "heads"

    def build(self, site: Site) -> Positions:
        self.cost(site)
        from trivium.parts.positions.rotary import RotaryPositions

        return RotaryPositions(self._frequencies(site), site.head, self.layout, self.scaling.strength)

    def cost(self, site: Site) -> Cost:
        self._frequencies(site)
        return Cost()

    def _frequencies(self, site: Site) -> list[float]:
        size = int(site.head * self.share)
        if size % 2 or not size:
            whole = f"a head of size {site.head}" if self.share == 1 else f"{self.share} of a head of size {site.head}"
            raise ConfigError(f"rotary positions turn pairs, so {whole} cannot be {'odd' if size else 'empty'}")
        return self.scaling.frequencies(self.theta, size)


ABSOLUTE: dict[str, type[Position]] = {"learned": LearnedOptions, "sinusoidal": SinusoidalOptions}


# none with a table for each layer: the absolute positions would be added once per layer too
RELATIVE: dict[str, type[Position]] = {"t5": BucketOptions, "alibi": AlibiOptions, "rotary": RotaryOptions}


@dataclass(frozen=True, kw_only=True, slots=True)
class BothOptions:
    """Absolute positions in the embeddings and relative ones in attention; MPNet has a table and T5's buckets."""

    absolute: Position = place(ABSOLUTE, LearnedOptions())
    relative: Position = place(RELATIVE, BucketOptions())

    @property
    def scope(self) -> Scope:
        return self.relative.scope

    def build(self, site: Site) -> Positions:
        from trivium.parts.positions.both import BothPositions

        return BothPositions(self.absolute.build(site), self.relative.build(site))

    def cost(self, site: Site) -> Cost:
        return self.absolute.cost(site).plus(self.relative.cost(site))


POSITIONS: dict[str, type[Position]] = {
    "none": NoPositionOptions,
    "sinusoidal": SinusoidalOptions,
    "learned": LearnedOptions,
    "shaw": ShawOptions,
    "t5": BucketOptions,
    "rotary": RotaryOptions,
    "alibi": AlibiOptions,
    "both": BothOptions,
}
