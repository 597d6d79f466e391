"""Attention: one product for queries, keys and values, kernels for trained biases and for decoding."""

# B batch, T queries, S keys, D width, H query heads, G key/value heads, E head size

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Self, final

import torch
import torch.nn.functional as F
from torch import Tensor

from trivium.fast.cache import KernelCache
from trivium.fast.linear import (
    FastLinear,
    bias_of,
    column_major,
    fast_layers,
    fused_linear,
    in_float8,
    linear,
    one_product_pays,
    weight_of,
)
from trivium.fast.masks import FastScoreMask
from trivium.kernels import fp8
from trivium.kernels.hardware import can_launch, working
from trivium.parts.attention import Heads, MultiHeadAttention, split_heads
from trivium.parts.linear import Linear
from trivium.parts.masks import ScoreMask
from trivium.parts.mixers import Context
from trivium.parts.positions import Positions
from trivium.parts.sharded import is_sharded


class FusedQKV(NamedTuple):
    """The matrices of queries, keys and values in one storage, of which the layers' weights are views."""

    weight: Tensor
    bias: Tensor | None
    sizes: list[int]
    pointers: list[int]


@final
class FastAttention(MultiHeadAttention):
    """`MultiHeadAttention` by the fastest way that its input, its children and its mask allow."""

    fused: FusedQKV | None = None

    def forward(self, x_BTD: Tensor, ctx: Context, bias_grad: bool = True) -> Tensor:
        """Without `bias_grad` the bias of the last layer is a constant: a fused block computes its gradient."""
        mixed_BTC, layers = self.mix(x_BTD, ctx), fast_layers(self.out)
        if bias_grad or not layers:
            result: Tensor = self.out(mixed_BTC)
            return result
        return linear(mixed_BTC, weight_of(mixed_BTC, *layers), layers[0].bias.detach(), narrow=layers[0].fp8)

    def mix(self, x_BTD: Tensor, ctx: Context) -> Tensor:
        """The mixed values of all heads side by side, [B, T, H * E]."""
        mixed_BTC = self.attend(*self.heads(x_BTD, ctx), ctx).transpose(1, 2).flatten(2)
        return mixed_BTC.to(working(x_BTD)) if _float32_pays(x_BTD) else mixed_BTC

    def project(self, x_BTD: Tensor, ctx: Context) -> Heads:
        heads = self._project(x_BTD, ctx)
        return _in_float32(*heads) if _float32_pays(x_BTD) else heads

    def _project(self, x_BTD: Tensor, ctx: Context) -> Heads:
        """Queries, keys and values, in one product where that is faster."""
        fused = self.fused_qkv if not torch.is_grad_enabled() else None
        if fused is not None:
            parts = torch.split(linear(x_BTD, fused.weight, fused.bias), fused.sizes, dim=-1)
            sizes = (self.size, self.size, self.value_size)
            query, key, value = (split_heads(part, size) for part, size in zip(parts, sizes, strict=True))
            return query, key, value
        if self._alike and one_product_pays(x_BTD):
            layers = fast_layers(self.query, self.key, self.value)
            if layers:
                return self._one_product(x_BTD, ctx, layers)
        return super().project(x_BTD, ctx)

    def project_source(self, ctx: Context) -> tuple[Tensor, Tensor]:
        assert ctx.source is not None
        key, value = fused_linear(ctx.source, self.key, self.value)
        return key, value

    def attend(self, query_BHTE: Tensor, key_BGSE: Tensor, value_BGSE: Tensor, ctx: Context) -> Tensor:
        cache = ctx.cache
        if self.crossed:
            return super().attend(query_BHTE, key_BGSE, value_BGSE, ctx)
        if isinstance(cache, KernelCache) and cache.applies(query_BHTE):
            return cache.attend(query_BHTE, self.scale)
        with _without_autocast(query_BHTE):
            return super().attend(query_BHTE, key_BGSE, value_BGSE, ctx)

    def sdpa(self, query_BHTE: Tensor, key_BGSE: Tensor, value_BGSE: Tensor, mask: ScoreMask) -> Tensor:
        if not self.crossed or query_BHTE.dtype != torch.bfloat16 or not _float32_pays(query_BHTE):
            return self._sdpa(query_BHTE, key_BGSE, value_BGSE, mask)
        with _without_autocast(query_BHTE):
            return self._sdpa(*_in_float32(query_BHTE, key_BGSE, value_BGSE), mask)

    def _sdpa(self, query_BHTE: Tensor, key_BGSE: Tensor, value_BGSE: Tensor, mask: ScoreMask) -> Tensor:
        dropout = self.dropout if self.training else 0.0
        if not isinstance(mask, FastScoreMask) or not (mask.causal or mask.flash):
            return super().sdpa(query_BHTE, key_BGSE, value_BGSE, mask)
        if not mask.flash:
            return F.scaled_dot_product_attention(
                query_BHTE,
                key_BGSE,
                value_BGSE,
                is_causal=True,
                dropout_p=dropout,
                scale=self.scale,
                enable_gqa=self.grouped,
            )
        if can_launch(query_BHTE) and not dropout:
            from trivium.kernels import flash  # not above: without a GPU there is no Triton

            if flash.able(query_BHTE, value_BGSE):
                bias, real, causal = mask.bias, mask.real, mask.causal
                return flash.attend(query_BHTE, key_BGSE, value_BGSE, bias, real, causal=causal, scale=self.scale)
        return super().sdpa(query_BHTE, key_BGSE, value_BGSE, mask)

    def _one_product(self, x_BTD: Tensor, ctx: Context, layers: Sequence[FastLinear]) -> Heads:
        """Queries, keys and values in one product of these layers.

        It is split into heads before it is split into the three: a kernel that writes the gradients of all three side
        by side, as in `flash`, has then written that of the product, and the compiler copies nothing.
        """
        weight, bias, narrow = weight_of(x_BTD, *layers), bias_of(*layers), layers[0].fp8
        heads = self.query.out_features // self.size
        bare = not isinstance(ctx.mask, FastScoreMask) or not ctx.mask.flash
        bare = bare and type(ctx.position).rotate is Positions.rotate and self.query_norm is None
        if bare and narrow and in_float8(x_BTD, len(weight)):
            return _three(fp8.cut8(x_BTD, weight, bias, heads, working(x_BTD)))
        if bare and bias is not None and bias.requires_grad and not narrow and _split_fits(x_BTD):
            from trivium.kernels import parted  # not above: without a GPU there is no Triton

            return _three(parted.cut(linear(x_BTD, weight, bias.detach()), bias, heads))
        heads_BTHE = linear(x_BTD, weight, bias, narrow=narrow).view(*x_BTD.shape[:2], -1, self.size)
        return _three([part.transpose(1, 2) for part in torch.split(heads_BTHE, heads_BTHE.shape[2] // 3, dim=2)])

    @property
    def _alike(self) -> bool:
        """Whether queries, keys and values are alike: in training one product of unequal parts is no faster."""
        return not self.grouped and not self.crossed and self.size == self.value_size

    @property
    def matmul_groups(self) -> list[tuple[Linear, ...]]:
        """The layers by the products that compute them in training."""
        if self.crossed:
            return [(self.query,), (self.key, self.value), (self.out,)]
        if self._alike:
            return [(self.query, self.key, self.value), (self.out,)]
        return [(self.query,), (self.key,), (self.value,), (self.out,)]

    @property
    def fused_qkv(self) -> FusedQKV | None:
        """The fused storage, unless a layer was wrapped, replaced or hooked, or has other weights since."""
        fused = self.fused
        if fused is None or not fast_layers(self.query, self.key, self.value):
            return None
        if fused.pointers == self._pointers():
            return fused
        self.fused = None  # it keeps the old storage
        return None

    def fuse_qkv(self) -> None:
        """Lay the three matrices side by side in one storage, for decoding; values and names stay the same."""
        layers = (self.query, self.key, self.value)
        if self.fused_qkv is not None or not all(type(layer) is FastLinear for layer in layers):
            return  # done already; or quantised, wrapped or parametrised: there is no matrix of their own to lay out
        if any(is_sharded(layer.weight) for layer in layers):
            return
        if len({layer.in_features for layer in layers}) > 1:
            return  # cross-attention to another width
        sizes = [layer.out_features for layer in layers]
        weight = torch.cat([layer.weight.detach() for layer in layers])
        weight = column_major(weight) if weight.device.type == "cpu" else weight
        for layer, part in zip(layers, torch.split(weight, sizes), strict=True):
            layer.weight.data = part
        bias: Tensor | None = None
        if self.query.bias is not None:
            bias = torch.cat([layer.bias.detach() for layer in layers])
            for layer, part in zip(layers, torch.split(bias, sizes), strict=True):
                layer.bias.data = part
        self.fused = FusedQKV(weight, bias, sizes, self._pointers())

    def _pointers(self) -> list[int]:
        """Where the weights lie: the same storage sees every change in place, another one is not fused."""
        layers = (self.query, self.key, self.value)
        weights = [layer.weight.data_ptr() for layer in layers]
        return weights if self.query.bias is None else weights + [layer.bias.data_ptr() for layer in layers]

    def __getstate__(self) -> dict[str, Any]:
        """Without the fused storage: a copy has other weights."""
        state: dict[str, Any] = super().__getstate__()  # type: ignore[no-untyped-call]
        return {name: value for name, value in state.items() if name != "fused"}

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        self.fused = None
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        return self


def _three(parts: Any) -> Heads:
    query, key, value = parts
    return query, key, value


def _split_fits(x: Tensor) -> bool:
    """Whether one kernel makes the gradients of a product in bfloat16 and of its bias."""
    return can_launch(x) and working(x) == torch.bfloat16


def _float32_pays(x: Tensor) -> bool:
    """Whether attention goes by float32: on the CPU its backward pass takes twice as long in bfloat16."""
    return x.device.type == "cpu" and torch.is_grad_enabled() and working(x) == torch.bfloat16


def _in_float32(query: Tensor, key: Tensor, value: Tensor) -> Heads:
    return query.float(), key.float(), value.float()


def _without_autocast(x: Tensor) -> contextlib.AbstractContextManager[object]:
    return torch.autocast("cpu", enabled=False) if _float32_pays(x) else contextlib.nullcontext()
