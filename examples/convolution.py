"""A token mixer that is not attention: a causal depthwise convolution with a state of its own.

It trains, decodes token by token, in batches and in beams, without an edit anywhere else:

    Stack(block=Block(attention=Convolution(kernel=4), position=NoPositionOptions()))
"""

# B batch, T tokens, K taps of the kernel, D width

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from trivium.parts.cache import StateCache
from trivium.parts.declared import VECTOR, Declared
from trivium.parts.linear import Linear
from trivium.parts.mixers import Context, Decoding
from trivium.parts.options.attention import Shape
from trivium.parts.site import Cost, Site, matrix


@dataclass(frozen=True, kw_only=True, slots=True)
class Convolution:
    """The options: how many tokens each output reads, itself counted."""

    kernel: int = 4

    @property
    def heads(self) -> int:
        return 1

    @property
    def window(self) -> int:
        return 0

    def head_size(self, site: Site) -> int:
        return site.width

    def cache_shape(self, site: Site) -> Shape:
        return Shape(1, site.width, site.width)

    def build(self, site: Site) -> nn.Module:
        return CausalConvolution(self.kernel, site.width)

    def cost(self, site: Site) -> Cost:
        taps = Cost(self.kernel * site.width, 2 * self.kernel * site.width, 2 * site.width)
        return matrix(site.width, site.width).plus(taps)


class CausalConvolution(nn.Module):
    """`out(sum_k taps[k] * x[t - K + 1 + k])`, [B, T, D] to [B, T, D]."""

    decoding: Decoding = "state"  # it continues from its state, whatever a mask says
    can_roll_back = False
    declares: ClassVar[Mapping[str, Declared]] = {"taps": VECTOR}  # its constructor fills it

    def __init__(self, kernel: int, width: int) -> None:
        super().__init__()
        self.taps = nn.Parameter(torch.full((kernel, width), 1 / kernel))
        self.out = Linear(width, width, bias=False, role="attention-out")

    def forward(self, x_BTD: Tensor, ctx: Context) -> Tensor:
        kernel, width = self.taps.shape
        before_BKD = x_BTD.new_zeros(len(x_BTD), kernel - 1, width)
        if isinstance(ctx.cache, StateCache):
            assert isinstance(ctx.cache.state, LastTokens)
            before_BKD = ctx.cache.state.exchange(x_BTD)
        whole_BSD = torch.cat((before_BKD, x_BTD), 1)
        mixed_BTD = sum(self.taps[k] * whole_BSD[:, k : k + x_BTD.shape[1]] for k in range(kernel))
        result: Tensor = self.out(mixed_BTD)
        return result

    def new_state(self, rows: int, longest: int, like: Tensor) -> LastTokens:
        """The state of as many sequences."""
        return LastTokens(like.new_zeros(rows, len(self.taps) - 1, self.taps.shape[1]))


class LastTokens:
    """The last inputs of every sequence, [B, K - 1, D]."""

    def __init__(self, last_BKD: Tensor) -> None:
        self.last_BKD = last_BKD

    def exchange(self, x_BTD: Tensor) -> Tensor:
        """The inputs before these; from now on the last of these are kept."""
        before_BKD = self.last_BKD
        self.last_BKD = torch.cat((before_BKD, x_BTD), 1)[:, x_BTD.shape[1] :]
        return before_BKD

    def keep_rows(self, rows: Tensor) -> None:
        self.last_BKD = self.last_BKD[rows]

    def roll_back(self, length: int) -> None:
        raise AssertionError("can_roll_back is False, so no decoder asks for it")

    def nbytes(self) -> int:
        return self.last_BKD.nbytes
