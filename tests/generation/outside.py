"""Token mixers that the package does not know: what a user may put in the place of attention."""

# B batch, H heads, T new tokens, S tokens so far, E head size

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.oracle.copying import enliven
from trivium.models.config import ModelConfig, NoStack, Stack
from trivium.models.options import Block
from trivium.models.transformer import Transformer, build
from trivium.parts.cache import LayerCache
from trivium.parts.declared import VECTOR
from trivium.parts.linear import Linear
from trivium.parts.mixers import Context
from trivium.parts.options.attention import Attention, MultiHeadOptions, Shape
from trivium.parts.options.positions import LearnedOptions, NoPositionOptions
from trivium.parts.site import Cost, NoPart, Site, matrix


@dataclass(frozen=True, kw_only=True, slots=True)
class _Mixer:
    heads: int = 4
    window: int = 0

    def head_size(self, site: Site) -> int:
        return site.width // self.heads

    def cache_shape(self, site: Site) -> Shape:
        return Shape(self.heads, self.head_size(site), self.head_size(site))

    def cost(self, site: Site) -> Cost:
        return matrix(site.width, site.width).plus(matrix(site.width, site.width))


@dataclass(frozen=True, kw_only=True, slots=True)
class LightConv(_Mixer):
    """Lightweight convolution (Wu et al. 2019): it looks at its cache and at no mask, and declares nothing."""

    kernel: int = 3

    def build(self, site: Site) -> nn.Module:
        return Convolution(self.heads, self.kernel, site)

    def cost(self, site: Site) -> Cost:
        return matrix(site.width, site.width).plus(matrix(site.width, site.width)).plus(Cost(self.heads * self.kernel))


class Convolution(nn.Module):
    declares: ClassVar = {"mix": VECTOR}

    def __init__(self, heads: int, kernel: int, site: Site) -> None:
        super().__init__()
        self.value = Linear(site.width, site.width, bias=False, role="value")
        self.out = Linear(site.width, site.width, bias=False, role="attention-out")
        self.mix = nn.Parameter(torch.zeros(heads, kernel))
        self.heads, self.kernel, self.causal = heads, kernel, site.causal

    def forward(self, x: Tensor, ctx: Context) -> Tensor:
        value = self.value(x).view(*x.shape[:2], self.heads, -1).transpose(1, 2)
        new = value.shape[2]
        if ctx.cache is not None:
            value, _ = cast(LayerCache, ctx.cache).append(value, value, ctx.start)
        before = self.kernel - 1 if self.causal else self.kernel // 2
        value = F.pad(value, (0, 0, before, self.kernel - 1 - before))
        weights = self.mix.softmax(-1)[:, :, None, None]
        size = value.shape[2] - self.kernel + 1
        mixed = sum(weights[:, at] * value[:, :, at : at + size] for at in range(self.kernel))
        assert isinstance(mixed, Tensor)
        result: Tensor = self.out(mixed[:, :, -new:].transpose(1, 2).flatten(2))
        return result


@dataclass(frozen=True, kw_only=True, slots=True)
class Mean(_Mixer):
    """The mean of all tokens that the mask shows: it obeys any mask, and says so."""

    def build(self, site: Site) -> nn.Module:
        return MeanOfSeen(self.heads, site)


class MeanOfSeen(nn.Module):
    decoding = "mask"
    can_roll_back = True

    def __init__(self, heads: int, site: Site) -> None:
        super().__init__()
        self.value = Linear(site.width, site.width, bias=False, role="value")
        self.out = Linear(site.width, site.width, bias=False, role="attention-out")
        self.heads = heads

    def forward(self, x: Tensor, ctx: Context) -> Tensor:
        value = self.value(x).view(*x.shape[:2], self.heads, -1).transpose(1, 2)
        new = value.shape[2]
        if ctx.cache is not None:
            value, _ = cast(LayerCache, ctx.cache).append(value, value, ctx.start)
        dense, seen = ctx.mask.dense(), x.new_ones(())
        if dense is not None:
            seen = (dense > float("-inf") if dense.is_floating_point() else dense).to(x.dtype)
        seen = seen.expand(len(x), 1, new, value.shape[2])
        mixed = seen @ value / seen.sum(-1, keepdim=True).clamp(min=1)
        result: Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return result


@dataclass(frozen=True, kw_only=True, slots=True)
class Whole(_Mixer):
    """As the mean, except that it declares that it needs a whole text."""

    def build(self, site: Site) -> nn.Module:
        made = MeanOfSeen(self.heads, site)
        made.decoding = "none"
        return made


def made(
    decoder: Attention | None, *, encoder: Attention | None = None, vocab: int = 12, context: int = 24, seed: int = 1
) -> Transformer:
    """A decoder with this mixer; with an encoder's mixer too an encoder-decoder; an encoder if that is all."""
    both = decoder is not None and encoder is not None
    # a convolution knows the order of tokens, a mean does not
    position = NoPositionOptions() if isinstance(decoder or encoder, LightConv) else LearnedOptions()
    cross = MultiHeadOptions(heads=2) if both else NoPart()
    model = build(
        ModelConfig(
            width=16,
            context=context,
            vocab=vocab,
            encoder=NoStack()
            if encoder is None
            else Stack(layers=2, block=Block(attention=encoder, position=position)),
            decoder=NoStack()
            if decoder is None
            else Stack(layers=2, block=Block(attention=decoder, position=position, cross=cross)),
        )
    )
    enliven(model, seed=seed, spread=0.5)
    return model.eval()
