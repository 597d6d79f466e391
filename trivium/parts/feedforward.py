"""The position-wise network of a block (spec: architecture §4)."""

# B batch, T tokens, D width, F hidden size

from __future__ import annotations

from torch import Tensor, nn

from trivium.parts.activations import ACTIVATIONS
from trivium.parts.dropout import dropout
from trivium.parts.linear import Linear
from trivium.parts.mixers import Context
from trivium.parts.options.feedforward import GluOptions, MlpOptions
from trivium.parts.site import Site


class MlpFeedForward(nn.Module):
    """`act(x W_up + b) W_down + b`, [B, T, D] to [B, T, D] (Vaswani et al. 2017, §3.3)."""

    def __init__(self, options: MlpOptions, site: Site) -> None:
        super().__init__()
        size = options.size(site)
        self.up = Linear(site.width, size, bias=options.bias, role="up")
        self.down = Linear(size, site.width, bias=options.bias, role="down")
        self.activation = ACTIVATIONS[options.activation]
        self.dropout, self.variational_dropout = options.dropout, options.variational_dropout

    def forward(self, x_BTD: Tensor, ctx: Context | None = None) -> Tensor:
        hidden_BTF = self.activation(self.up(x_BTD))
        hidden_BTF = dropout(hidden_BTF, self.dropout, self.training, variational=self.variational_dropout)
        result: Tensor = self.down(hidden_BTF)
        return result


class GluFeedForward(nn.Module):
    """`(act(x W_gate + b) ⊙ (x W_up + b)) W_down + b`, [B, T, D] to [B, T, D] (Shazeer 2020)."""

    def __init__(self, options: GluOptions, site: Site) -> None:
        super().__init__()
        size = options.size(site)
        self.gate = Linear(site.width, size, bias=options.bias, role="gate")
        self.up = Linear(site.width, size, bias=options.bias, role="up")
        self.down = Linear(size, site.width, bias=options.bias, role="down")
        self.activation = ACTIVATIONS[options.activation]
        self.dropout, self.variational_dropout = options.dropout, options.variational_dropout

    def forward(self, x_BTD: Tensor, ctx: Context | None = None) -> Tensor:
        hidden_BTF = self.activation(self.gate(x_BTD)) * self.up(x_BTD)
        hidden_BTF = dropout(hidden_BTF, self.dropout, self.training, variational=self.variational_dropout)
        result: Tensor = self.down(hidden_BTF)
        return result
