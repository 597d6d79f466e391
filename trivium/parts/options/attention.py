"""The settings of attention."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol

from trivium.config import at_least, fraction
from trivium.errors import ConfigError
from trivium.parts.site import MOST, Cost, Site, matrix

if TYPE_CHECKING:
    from torch import nn


class Shape(NamedTuple):
    """What one layer keeps per token: G heads of E_k for keys, of E_v for values."""

    heads: int
    key: int
    value: int


class Attention(Protocol):
    """The options of an attention part; positions inside it ask for its heads, masks for its window.

    The module that it builds declares `decoding` and `can_roll_back` (`mixers.py`).
    """

    @property
    def heads(self) -> int: ...
    @property
    def window(self) -> int: ...
    def build(self, site: Site) -> nn.Module: ...
    def cost(self, site: Site) -> Cost: ...
    def head_size(self, site: Site) -> int: ...
    def cache_shape(self, site: Site) -> Shape: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class MultiHeadOptions:
    """Scaled dot-product attention in `heads` heads; fewer `groups` than heads share keys and values."""

    heads: int = 4
    groups: int = 0  # key/value heads; 0 means as many as heads, 1 is multi-query
    head: int = 0  # size of a query or key in one head; 0 means width / heads
    value: int = 0  # size of a value in one head; 0 means as a key
    bias: Literal["all", "inputs", "none"] = "none"  # inputs: of queries, keys and values but not of the output
    norm: Literal["none", "rms"] = "none"  # on queries and keys, before rotation (QK-norm)
    scale: Literal["root", "none"] = "root"  # of the scores: 1 / sqrt(head), or 1 as in T5
    window: int = 0  # only the last so many tokens are seen, itself counted; 0 means all
    dropout: float = 0.0  # of the attention weights

    def __post_init__(self) -> None:
        at_least("heads", self.heads, 1, MOST)
        for name in ("head", "value", "groups", "window"):
            at_least(name, getattr(self, name), 0, MOST)
        if self.groups and self.heads % self.groups:
            raise ConfigError(f"groups: {self.heads} heads cannot share {self.groups} groups evenly")
        fraction("dropout", self.dropout)

    def head_size(self, site: Site) -> int:
        if self.head:
            return self.head
        if site.width % self.heads:
            small = [size for size in range(1, math.isqrt(site.width) + 1) if site.width % size == 0]
            able = {*small, *(site.width // size for size in small)}
            nearest = min(able, key=lambda heads: (abs(heads - self.heads), heads))
            raise ConfigError(f"heads: width {site.width} is not divisible by {self.heads}; try {nearest}")
        return site.width // self.heads

    def cache_shape(self, site: Site) -> Shape:
        size = self.head_size(site)
        return Shape(self.groups or self.heads, size, self.value or size)

    def build(self, site: Site) -> nn.Module:
        from trivium.parts.attention import MultiHeadAttention

        return MultiHeadAttention(self, site)

    def cost(self, site: Site) -> Cost:
        groups, size, value = self.cache_shape(site)
        source, inputs = site.source or site.width, self.bias != "none"
        if site.source and self.window:
            raise ConfigError(f"window: {self.window} has no meaning across two texts; set it to 0")
        total = matrix(site.width, self.heads * size, bias=inputs)
        total = total.plus(matrix(source, groups * size, bias=inputs)).plus(matrix(source, groups * value, bias=inputs))
        total = total.plus(matrix(self.heads * value, site.width, bias=self.bias == "all"))
        seen = min(site.context, self.window or site.context)
        products = 2 * seen * self.heads * (size + value)  # not halved for causality
        kept = site.width + self.heads * (size + value) + groups * (size + value)  # input, q, k, v and what they mix
        if self.dropout:  # weights, mask and their product; a GPU's kernels draw the mask again instead
            kept += 3 * self.heads * seen
        return total.plus(Cost(2 * size if self.norm == "rms" else 0, products, kept))


ATTENTIONS: dict[str, type[Attention]] = {"multi-head": MultiHeadOptions}
