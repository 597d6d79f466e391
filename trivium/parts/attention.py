"""Scaled dot-product attention: multi-head, grouped and multi-query, self and cross (spec: architecture §1)."""

# B batch, T queries, S keys, D width, H query heads, G key/value heads, E head size

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trivium.parts.cache import StateCache
from trivium.parts.linear import Linear
from trivium.parts.masks import ScoreMask, masked_bias
from trivium.parts.mixers import Context, Decoding
from trivium.parts.norms import RMSNorm
from trivium.parts.options.attention import MultiHeadOptions
from trivium.parts.site import Site

Heads = tuple[Tensor, Tensor, Tensor]  # query [B, H, T, E], key [B, G, S, E], value [B, G, S, E]


class MultiHeadAttention(nn.Module):
    """`softmax(Q Kᵀ / sqrt(E) + bias) V` in H heads, then one matrix, [B, T, D] to [B, T, D] (Vaswani et al. 2017).

    With fewer key/value heads than query heads, G < H, each is shared by H / G of them (Shazeer 2019, Ainslie et al.
    2023). In cross-attention keys and values come from the source.
    """

    decoding: Decoding = "mask"
    can_roll_back = True

    def __init__(self, options: MultiHeadOptions, site: Site) -> None:
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
        self.query_norm = RMSNorm(size, 1e-6) if options.norm == "rms" else None
        self.key_norm = RMSNorm(size, 1e-6) if options.norm == "rms" else None

    def forward(self, x_BTD: Tensor, ctx: Context) -> Tensor:
        mixed_BHTE = self.attend(*self.heads(x_BTD, ctx), ctx)
        result: Tensor = self.out(mixed_BHTE.transpose(1, 2).flatten(2))
        return result

    def heads(self, x_BTD: Tensor, ctx: Context) -> Heads:
        """Queries of the tokens, keys and values of what they attend to: the source, or themselves and the cache."""
        if self.crossed:  # without positions: two texts have none in common
            return _normed(split_heads(self.query(x_BTD), self.size), self.query_norm), *self.source_heads(ctx)
        query_BHTE, key_BGSE, value_BGSE = self.project(x_BTD, ctx)
        query_BHTE = ctx.position.rotate(_normed(query_BHTE, self.query_norm), ctx.prepared)
        key_BGSE = ctx.position.rotate(_normed(key_BGSE, self.key_norm), ctx.prepared)
        if ctx.cache is not None and not isinstance(ctx.cache, StateCache):
            key_BGSE, value_BGSE = ctx.cache.append(key_BGSE, value_BGSE, ctx.start)
        return query_BHTE, key_BGSE, value_BGSE

    def project(self, x_BTD: Tensor, ctx: Context) -> Heads:
        """Queries, keys and values by heads."""
        return (
            split_heads(self.query(x_BTD), self.size),
            split_heads(self.key(x_BTD), self.size),
            split_heads(self.value(x_BTD), self.value_size),
        )

    def source_heads(self, ctx: Context) -> tuple[Tensor, Tensor]:
        """Keys and values of the source by heads; with a cache they are computed once."""
        if ctx.cache is not None and ctx.cache.across is not None:
            return ctx.cache.across
        key, value = self.project_source(ctx)
        heads = _normed(split_heads(key, self.size), self.key_norm), split_heads(value, self.value_size)
        if ctx.cache is not None:
            ctx.cache.across = heads
        return heads

    def project_source(self, ctx: Context) -> tuple[Tensor, Tensor]:
        """Keys and values of the source."""
        return self.key(ctx.source), self.value(ctx.source)

    def attend(self, query_BHTE: Tensor, key_BGSE: Tensor, value_BGSE: Tensor, ctx: Context) -> Tensor:
        """The mixed values; a position scheme may add to the scores of each query, and to the values themselves."""
        if self.crossed:
            assert ctx.source_mask is not None
            return self.sdpa(query_BHTE, key_BGSE, value_BGSE, ctx.source_mask)
        position, prepared, mask = ctx.position, ctx.prepared, ctx.mask
        score_BHTS = position.score(query_BHTE, prepared)
        if score_BHTS is not None:
            mask = AddedScores(mask, score_BHTS * self.scale)
        if not position.values:
            return self.sdpa(query_BHTE, key_BGSE, value_BGSE, mask)
        weights_BHTS = self.weights(query_BHTE, key_BGSE, mask)
        weights_BHTS = F.dropout(weights_BHTS, self.dropout, training=self.training)
        mixed_BHTE = weights_BHTS @ self.per_query_head(value_BGSE, query_BHTE)
        extra_BHTE = position.value(weights_BHTS, prepared)
        return mixed_BHTE if extra_BHTE is None else mixed_BHTE + extra_BHTE

    def sdpa(self, query_BHTE: Tensor, key_BGSE: Tensor, value_BGSE: Tensor, mask: ScoreMask) -> Tensor:
        """`softmax(query keyᵀ * scale + mask) value`."""
        dense = mask.dense()
        return F.scaled_dot_product_attention(
            query_BHTE,
            key_BGSE,
            value_BGSE,
            attn_mask=dense.to(query_BHTE.dtype) if dense is not None and dense.is_floating_point() else dense,
            dropout_p=self.dropout if self.training else 0.0,
            scale=self.scale,
            enable_gqa=self.grouped,
        )

    def weights(self, query_BHTE: Tensor, key_BGSE: Tensor, mask: ScoreMask) -> Tensor:
        """Who attends to whom, [B, H, T, S]; zeros for a query that may see nothing."""
        dense = mask.dense()
        products_BHTS = query_BHTE @ self.per_query_head(key_BGSE, query_BHTE).mT
        # softmax in float32: half precision loses the tails
        scores_BHTS = products_BHTS.to(torch.promote_types(query_BHTE.dtype, torch.float32)) * self.scale
        if dense is not None and dense.is_floating_point():
            scores_BHTS, dense = scores_BHTS + dense, dense > float("-inf")
        if dense is None:
            return scores_BHTS.softmax(-1).to(query_BHTE.dtype)
        lowest = torch.finfo(scores_BHTS.dtype).min  # not -inf: a row of those would make a gradient of NaN
        weights_BHTS = scores_BHTS.masked_fill(~dense, lowest).softmax(-1).masked_fill(~dense, 0.0)
        return weights_BHTS.to(query_BHTE.dtype)

    def per_query_head(self, x_BGSE: Tensor, query_BHTE: Tensor) -> Tensor:
        """Keys or values repeated for every query head that shares them, [B, H, S, E]."""
        return x_BGSE.repeat_interleave(query_BHTE.shape[1] // x_BGSE.shape[1], dim=1) if self.grouped else x_BGSE


class AddedScores(ScoreMask):
    """A mask with something more added to the scores of each query, [B, H, T, S]."""

    def __init__(self, mask: ScoreMask, scores_BHTS: Tensor) -> None:
        self.mask, self.bias, self._dense = mask.mask, scores_BHTS, masked_bias(scores_BHTS, mask.dense())


def _normed(x: Tensor, norm: nn.Module | None) -> Tensor:
    return x if norm is None else norm(x)


def split_heads(x_BTC: Tensor, size: int) -> Tensor:
    """[B, T, heads * E] to [B, heads, T, E]."""
    rows, length, _ = x_BTC.shape
    return x_BTC.view(rows, length, -1, size).transpose(1, 2)
