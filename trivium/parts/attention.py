"""Attention over SDPA: multi-head, grouped and multi-query, self and cross (spec: architecture §1)."""

# B batch, T queries, S keys, D width, H query heads, G key/value heads, E head size

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trivium.kernels import fp8
from trivium.kernels.hardware import working
from trivium.parts.cache import LayerCache
from trivium.parts.linear import Linear, columns, in_float8, is_plain, lending, matrix_of, product, together
from trivium.parts.masks import Resolved
from trivium.parts.mixers import Decoding
from trivium.parts.norms import RMSNormed
from trivium.parts.options.attention import MultiHead
from trivium.parts.positions import Positions
from trivium.parts.site import Site

TRITON = find_spec("triton") is not None  # it comes with torch for CUDA, on Linux
PARTED = True  # one kernel for the gradients of the one product of queries, keys and values and of its bias


class Packed(NamedTuple):
    """Queries, keys and values as one linear layer, the weights being views of the three."""

    weight: Tensor
    bias: Tensor | None
    sizes: list[int]
    places: list[int]


class MultiHeadAttention(nn.Module):
    decoding: Decoding = "mask"
    can_roll_back = True

    def __init__(self, options: MultiHead, site: Site) -> None:
        super().__init__()
        groups, size, value = options.cache_shape(site)
        source, bias = site.source or site.width, options.bias != "none"
        self.size, self.value_size = size, value
        self.dropout = options.dropout
        self.groups, self.grouped = groups, groups != options.heads
        self.crossed = bool(site.source)
        self.scale = 1 / math.sqrt(size) if options.scale == "root" else 1.0
        self.query = Linear(site.width, options.heads * size, bias=bias, role="query", head=size)
        self.key = Linear(source, groups * size, bias=bias, role="key")
        self.value = Linear(source, groups * value, bias=bias, role="value")
        self.out = Linear(options.heads * value, site.width, bias=options.bias == "all", role="attention-out")
        self.query_norm = RMSNormed(size, 1e-6) if options.norm == "rms" else None
        self.key_norm = RMSNormed(size, 1e-6) if options.norm == "rms" else None
        self.packed: Packed | None = None

    def forward(
        self,
        x_BTD: Tensor,
        mask: Resolved,
        position: Positions,
        prepared: Any,
        cache: LayerCache | None = None,
        start: int = 0,
        source_BSD: Tensor | None = None,
        lend: bool = False,
    ) -> Tensor:
        """Attend from `x` to itself and the cache up to `start`, or to `source` if one is given.

        With `lend` the bias of the last layer is a constant.
        """
        mixed_BTC = (
            self._within(x_BTD, mask, position, prepared, cache, start)
            if source_BSD is None
            else self._across(x_BTD, source_BSD, mask, cache)
        )
        result: Tensor = lending(self.out, mixed_BTC) if lend else self.out(mixed_BTC)
        return result

    def _within(
        self,
        x_BTD: Tensor,
        mask: Resolved,
        position: Positions,
        prepared: Any,
        cache: LayerCache | None,
        start: int,
    ) -> Tensor:
        """The mixed values of all heads, from `x` itself and the cache."""
        bare = mask.mask is None and type(position).rotate is Positions.rotate
        query_BHTE, key_BGSE, value_BGSE = self._project(x_BTD, bare)
        dtype, plain = query_BHTE.dtype, _slow(query_BHTE)
        if plain:
            query_BHTE, key_BGSE, value_BGSE = query_BHTE.float(), key_BGSE.float(), value_BGSE.float()
        query_BHTE = position.rotate(self._normed(query_BHTE, self.query_norm), prepared)
        key_BGSE = position.rotate(self._normed(key_BGSE, self.key_norm), prepared)
        mixed_BHTE: Tensor | None = None
        if cache is not None:
            key_BGSE, value_BGSE = cache.append(key_BGSE, value_BGSE, start)
            mixed_BHTE = cache.attend(query_BHTE, self.scale)
        if mixed_BHTE is None:
            with torch.autocast("cpu", enabled=False) if plain else contextlib.nullcontext():
                mixed_BHTE = self._attend(query_BHTE, key_BGSE, value_BGSE, mask, position, prepared)
        return mixed_BHTE.to(dtype).transpose(1, 2).flatten(2)

    def _across(self, x_BTD: Tensor, source_BSD: Tensor, mask: Resolved, cache: LayerCache | None) -> Tensor:
        """The same from a source, without positions; with a cache its keys and values are computed once."""
        query_BHTE = self._normed(self._split(self.query(x_BTD), self.size), self.query_norm)
        if cache is not None and cache.across is not None:
            key_BGSE, value_BGSE = cache.across
        else:
            key, value = together(source_BSD, self.key, self.value)
            key_BGSE = self._normed(self._split(key, self.size), self.key_norm)
            value_BGSE = self._split(value, self.value_size)
            if cache is not None:
                cache.across = (key_BGSE, value_BGSE)
        dtype, plain = query_BHTE.dtype, _slow(query_BHTE)
        if plain:
            query_BHTE, key_BGSE, value_BGSE = query_BHTE.float(), key_BGSE.float(), value_BGSE.float()
        with torch.autocast("cpu", enabled=False) if plain else contextlib.nullcontext():
            mixed_BHTE = self._sdpa(query_BHTE, key_BGSE, value_BGSE, mask)
        return mixed_BHTE.to(dtype).transpose(1, 2).flatten(2)

    def _attend(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Resolved, position: Positions, prepared: Any
    ) -> Tensor:
        """The mixed values; a position scheme may add to the scores of each query, and to the values themselves."""
        score_BHTS = position.score(query, prepared)
        if score_BHTS is not None or position.values:
            mask = mask.together(query.shape[2], key.shape[2], query.device)
        if score_BHTS is not None:
            mask = _added(mask, score_BHTS * self.scale)
        if not position.values:
            return self._sdpa(query, key, value, mask)
        weights_BHTS = F.dropout(
            self._weights(query, key, mask), self.dropout if self.training else 0.0, training=self.training
        )
        if self.grouped:
            value = value.repeat_interleave(query.shape[1] // self.groups, dim=1)
        mixed_BHTE = weights_BHTS @ value
        extra_BHTE = position.value(weights_BHTS, prepared)
        return mixed_BHTE if extra_BHTE is None else mixed_BHTE + extra_BHTE

    def _sdpa(self, query: Tensor, key: Tensor, value: Tensor, mask: Resolved) -> Tensor:
        fast = self._fast(query, key, value, mask)
        if fast is not None:
            return fast
        mask = mask.together(query.shape[2], key.shape[2], query.device)
        dense = mask.dense
        return F.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=dense.to(query.dtype) if dense is not None and dense.is_floating_point() else dense,
            is_causal=mask.is_causal,
            dropout_p=self.dropout if self.training else 0.0,
            scale=self.scale,
            enable_gqa=self.grouped,
        )

    def _fast(self, query: Tensor, key: Tensor, value: Tensor, mask: Resolved) -> Tensor | None:
        """By a kernel for what SDPA is slow at, on a GPU in training; None where that is not asked for or not able."""
        if mask.mask is None or not TRITON or (self.dropout and self.training):
            return None
        from trivium.kernels import flash

        if not flash.able(query, value):
            return None
        return flash.attend(query, key, value, mask.bias, mask.seen, causal=mask.is_causal, scale=self.scale)

    def _weights(self, query: Tensor, key: Tensor, mask: Resolved) -> Tensor:
        """Who looks at whom, [B, H, T, S]; zeros for a query that may see nothing."""
        if self.grouped:
            key = key.repeat_interleave(query.shape[1] // self.groups, dim=1)
        dense = mask.dense
        if mask.is_causal:
            dense = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool, device=query.device).tril()
        # softmax in float32: half precision loses the tails
        scores_BHTS = (query @ key.mT).to(torch.promote_types(query.dtype, torch.float32)) * self.scale
        if dense is not None and dense.is_floating_point():
            scores_BHTS, dense = scores_BHTS + dense, dense > float("-inf")
        if dense is None:
            return scores_BHTS.softmax(-1).to(query.dtype)
        lowest = torch.finfo(scores_BHTS.dtype).min  # not -inf: a row of those would make a gradient of NaN
        weights_BHTS = scores_BHTS.masked_fill(~dense, lowest).softmax(-1).masked_fill(~dense, 0.0)
        return weights_BHTS.to(query.dtype)

    def _project(self, x_BTD: Tensor, bare: bool = False) -> Sequence[Tensor]:
        """Queries, keys and values by heads, in one product where that is faster.

        They are `bare` if scaled dot-product attention takes them as they are, and makes their gradients apart.
        """
        one = self.side_by_side if not torch.is_grad_enabled() else None
        if one is not None:
            parts: Sequence[Tensor] = torch.split(product(x_BTD, one.weight, one.bias), one.sizes, dim=-1)
        elif self._one(x_BTD):
            return self._whole(x_BTD, bare)
        else:
            parts = (self.query(x_BTD), self.key(x_BTD), self.value(x_BTD))
        sizes = (self.size, self.size, self.value_size)
        return [self._split(part, size) for part, size in zip(parts, sizes, strict=True)]

    def _one(self, x: Tensor) -> bool:
        """Whether one product is faster than three: on a GPU in training, where the three are alike.

        Of unequal parts it is no faster: an H200 took 1.6 % longer for TinyLlama's.
        """
        return x.device.type == "cuda" and torch.is_grad_enabled() and self._alike and self._plain

    @property
    def _plain(self) -> bool:
        """Whether the weights of queries, keys and values say all about their layers."""
        return is_plain(self.query) and is_plain(self.key) and is_plain(self.value)

    @property
    def _alike(self) -> bool:
        return not self.grouped and self.size == self.value_size

    @property
    def writer(self) -> nn.Module:
        """The last layer, behind which nothing is done to its output."""
        return self.out

    @property
    def products(self) -> list[tuple[Linear, ...]]:
        """The layers whose outputs are made by one product in training, and those that have one of their own."""
        if self.crossed:
            return [(self.query,), (self.key, self.value), (self.out,)]
        if self._alike:
            return [(self.query, self.key, self.value), (self.out,)]
        return [(self.query,), (self.key,), (self.value,), (self.out,)]

    def _whole(self, x_BTD: Tensor, bare: bool = False) -> Sequence[Tensor]:
        """Queries, keys and values by heads in one product.

        Cut into heads before it is parted: a kernel that makes the gradients of all three side by side, as in `flash`,
        has then made that of the product, and the compiler copies nothing.
        """
        layers = (self.query, self.key, self.value)
        biases: list[Tensor] = [layer.bias for layer in layers if layer.bias is not None]
        weight, bias = matrix_of(x_BTD, *layers), torch.cat(biases) if biases else None
        heads, apart = self.query.out_features // self.size, PARTED and bare and self.query_norm is None
        if apart and self.query.narrow and in_float8(x_BTD, len(weight)):
            return fp8.cut8(x_BTD, weight, bias, heads, working(x_BTD))
        if apart and bias is not None and bias.requires_grad and self._parted(x_BTD):
            from trivium.kernels import parted  # not above: without a GPU there is no Triton

            return parted.cut(product(x_BTD, weight, bias.detach()), bias, heads)
        heads_BTHE = product(x_BTD, weight, bias, narrow=self.query.narrow).view(*x_BTD.shape[:2], -1, self.size)
        return [part.transpose(1, 2) for part in torch.split(heads_BTHE, heads_BTHE.shape[2] // 3, dim=2)]

    def _parted(self, x: Tensor) -> bool:
        """Whether one kernel makes the gradients of a product in bfloat16 and of its bias."""
        return TRITON and not self.query.narrow and working(x) == torch.bfloat16

    @property
    def side_by_side(self) -> Packed | None:
        """The packed matrix, unless a layer was wrapped, replaced or hooked, or has other weights since."""
        packed = self.packed
        return packed if packed is not None and self._plain and packed.places == self._places() else None

    def pack(self) -> None:
        """Lay the three matrices side by side in one storage, for decoding; values and names stay the same."""
        layers = (self.query, self.key, self.value)
        if not all(type(layer) is Linear for layer in layers):
            return  # quantised, wrapped or parametrised: there is no matrix of their own to lay out
        if len({layer.in_features for layer in layers}) > 1:
            return  # cross-attention to another width
        sizes = [layer.out_features for layer in layers]
        weight = torch.cat([layer.weight.detach() for layer in layers])
        weight = columns(weight) if weight.device.type == "cpu" else weight
        for layer, part in zip(layers, torch.split(weight, sizes), strict=True):
            layer.weight.data = part
        bias: Tensor | None = None
        if self.query.bias is not None:
            bias = torch.cat([layer.bias.detach() for layer in layers])
            for layer, part in zip(layers, torch.split(bias, sizes), strict=True):
                layer.bias.data = part
        self.packed = Packed(weight, bias, sizes, self._places())

    def _places(self) -> list[int]:
        """Where the weights lie: the same storage sees every change in place, another one is not packed."""
        layers = (self.query, self.key, self.value)
        weights = [layer.weight.data_ptr() for layer in layers]
        return weights if self.query.bias is None else weights + [layer.bias.data_ptr() for layer in layers]

    def _normed(self, x: Tensor, norm: nn.Module | None) -> Tensor:
        return x if norm is None else norm(x)

    def _split(self, x: Tensor, size: int) -> Tensor:
        rows, length, _ = x.shape
        return x.view(rows, length, -1, size).transpose(1, 2)


def _slow(x: Tensor) -> bool:
    """Whether float32 is the faster way: on the CPU attention's backward pass takes twice as long in bfloat16."""
    return x.dtype == torch.bfloat16 and x.device.type == "cpu" and torch.is_grad_enabled()


def _added(mask: Resolved, scores_BHTS: Tensor) -> Resolved:
    """The mask with something added to the scores of what may be seen."""
    dense = mask.dense
    if mask.is_causal:
        dense = torch.ones(scores_BHTS.shape[-2:], dtype=torch.bool, device=scores_BHTS.device).tril()
    if dense is None:
        return Resolved(scores_BHTS, False)
    added = scores_BHTS + dense if dense.is_floating_point() else scores_BHTS.masked_fill(~dense, float("-inf"))
    return Resolved(added, False)
