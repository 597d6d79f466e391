"""Attention over SDPA: multi-head, grouped and multi-query, self and cross (spec: architecture §1)."""

# B batch, T queries, S keys, D width, H query heads, G key/value heads, E head size

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trivium.config import at_least, fraction
from trivium.errors import ConfigError
from trivium.parts.cache import LayerCache, Shape
from trivium.parts.linear import Linear, columns, product
from trivium.parts.masks import Resolved
from trivium.parts.norms import RMSNormed
from trivium.parts.positions import Positions
from trivium.parts.site import Cost, Site, matrix


class Attention(Protocol):
    """The options of an attention part."""

    def build(self, site: Site) -> nn.Module: ...
    def cost(self, site: Site) -> Cost: ...
    def head_size(self, site: Site) -> int: ...
    def cache_shape(self, site: Site) -> Shape: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class MultiHead:
    """Scaled dot-product attention in `heads` heads; fewer `groups` than heads share keys and values."""

    heads: int = 4
    groups: int = 0  # key/value heads; 0 means as many as heads, 1 is multi-query
    head: int = 0  # size of one head; 0 means width / heads
    bias: Literal["all", "none"] = "none"
    norm: Literal["none", "rms"] = "none"  # on queries and keys, before rotation (QK-norm)
    dropout: float = 0.0  # of the attention weights

    def __post_init__(self) -> None:
        if self.heads < 1:
            raise ConfigError(f"heads: {self.heads} is less than 1")
        at_least("head", self.head, 0)
        at_least("groups", self.groups, 0)
        if self.groups and self.heads % self.groups:
            raise ConfigError(f"groups: {self.heads} heads cannot share {self.groups} groups evenly")
        fraction("dropout", self.dropout)

    def head_size(self, site: Site) -> int:
        if self.head:
            return self.head
        if site.width % self.heads:
            good = [heads for heads in range(1, site.width + 1) if site.width % heads == 0]
            nearest = min(good, key=lambda heads: abs(heads - self.heads))
            raise ConfigError(f"heads: width {site.width} is not divisible by {self.heads}; try {nearest}")
        return site.width // self.heads

    def cache_shape(self, site: Site) -> Shape:
        size = self.head_size(site)
        return Shape(self.groups or self.heads, size, size)

    def build(self, site: Site) -> nn.Module:
        return MultiHeadAttention(self, site)

    def cost(self, site: Site) -> Cost:
        size, groups, source = self.head_size(site), self.groups or self.heads, site.source or site.width
        bias = self.bias == "all"
        total = matrix(site.width, self.heads * size, bias=bias).plus(matrix(self.heads * size, site.width, bias=bias))
        total = total.plus(matrix(source, groups * size, bias=bias)).plus(matrix(source, groups * size, bias=bias))
        products = 2 * site.context * self.heads * (size + size)  # not halved for causality
        return total.plus(Cost(2 * size if self.norm == "rms" else 0, products))


ATTENTIONS: dict[str, type[Attention]] = {"multi-head": MultiHead}


class Packed(NamedTuple):
    """Queries, keys and values as one linear layer, the weights being views of the three."""

    weight: Tensor
    bias: Tensor | None
    heads: list[int]
    places: list[int]


class MultiHeadAttention(nn.Module):
    def __init__(self, options: MultiHead, site: Site) -> None:
        super().__init__()
        size, groups = options.head_size(site), options.groups or options.heads
        source, bias = site.source or site.width, options.bias == "all"
        self.size = size
        self.dropout = options.dropout
        self.grouped = groups != options.heads
        self.scale = 1 / math.sqrt(size)
        self.query = Linear(site.width, options.heads * size, bias=bias, role="query")
        self.key = Linear(source, groups * size, bias=bias, role="key")
        self.value = Linear(source, groups * size, bias=bias, role="value")
        self.out = Linear(options.heads * size, site.width, bias=bias, role="attention-out")
        self.query_norm = RMSNormed(size, 1e-6) if options.norm == "rms" else None
        self.key_norm = RMSNormed(size, 1e-6) if options.norm == "rms" else None
        self.packed: Packed | None = None

    def forward(
        self,
        x_BTD: Tensor,
        mask: Resolved,
        position: Positions,
        prepared: Tensor | None,
        cache: LayerCache | None = None,
        start: int = 0,
        source_BSD: Tensor | None = None,
    ) -> Tensor:
        """Attend from `x` to itself (and the cache up to `start`), or to `source` if one is given."""
        query_BHTE, key_BGSE, value_BGSE = self._project(x_BTD, source_BSD)
        dtype = query_BHTE.dtype
        plain = dtype == torch.bfloat16 and query_BHTE.device.type == "cpu" and torch.is_grad_enabled()
        if plain:  # on the CPU the backward pass of attention takes twice as long in bfloat16
            query_BHTE, key_BGSE, value_BGSE = query_BHTE.float(), key_BGSE.float(), value_BGSE.float()
        if self.query_norm is not None and self.key_norm is not None:
            query_BHTE, key_BGSE = self.query_norm(query_BHTE), self.key_norm(key_BGSE)
        if source_BSD is None:
            query_BHTE = position.rotate(query_BHTE, prepared)
            key_BGSE = position.rotate(key_BGSE, prepared)
        if cache is not None:
            key_BGSE, value_BGSE = cache.append(key_BGSE, value_BGSE, start)
        with torch.autocast("cpu", enabled=False) if plain else contextlib.nullcontext():
            mixed_BHTE = F.scaled_dot_product_attention(
                query_BHTE,
                key_BGSE,
                value_BGSE,
                attn_mask=mask.dense,
                is_causal=mask.is_causal,
                dropout_p=self.dropout if self.training else 0.0,
                scale=self.scale,
                enable_gqa=self.grouped,
            )
        result: Tensor = self.out(mixed_BHTE.to(dtype).transpose(1, 2).flatten(2))
        return result

    def _project(self, x_BTD: Tensor, source_BSD: Tensor | None) -> Sequence[Tensor]:
        """Queries, keys and values by heads, in one product where the weights lie packed and no gradient is wanted."""
        one = self.packed if source_BSD is None and not torch.is_grad_enabled() else None
        if one is not None and one.places == self._places():  # else somebody has put other weights in their place
            return torch.split(self._split(product(x_BTD, one.weight, one.bias)), one.heads, dim=1)
        memory = x_BTD if source_BSD is None else source_BSD
        return self._split(self.query(x_BTD)), self._split(self.key(memory)), self._split(self.value(memory))

    def pack(self) -> None:
        """Lay the three matrices side by side in one storage, for decoding; values and names stay the same."""
        layers = (self.query, self.key, self.value)
        if len({layer.in_features for layer in layers}) > 1:
            return  # cross-attention to another width
        sizes = [layer.out_features for layer in layers]
        weight = columns(torch.cat([layer.weight.detach() for layer in layers]))
        for layer, part in zip(layers, torch.split(weight, sizes), strict=True):
            layer.weight.data = part
        bias: Tensor | None = None
        if self.query.bias is not None:
            bias = torch.cat([layer.bias.detach() for layer in layers])
            for layer, part in zip(layers, torch.split(bias, sizes), strict=True):
                layer.bias.data = part
        self.packed = Packed(weight, bias, [size // self.size for size in sizes], self._places())

    def _places(self) -> list[int]:
        """Where the weights lie: the same storage sees every change in place, another one is not packed."""
        layers = (self.query, self.key, self.value)
        weights = [layer.weight.data_ptr() for layer in layers]
        return weights if self.query.bias is None else weights + [layer.bias.data_ptr() for layer in layers]

    def _split(self, x: Tensor) -> Tensor:
        rows, length, _ = x.shape
        return x.view(rows, length, -1, self.size).transpose(1, 2)
