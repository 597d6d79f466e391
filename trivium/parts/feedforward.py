"""The position-wise network of a block (spec: architecture §4)."""

# B batch, T tokens, D width, F hidden size

from __future__ import annotations

from torch import Tensor, nn

from trivium.parts.activations import ACTIVATIONS
from trivium.parts.dropout import dropout, locked
from trivium.parts.linear import Linear
from trivium.parts.options.feedforward import Glu, Mlp
from trivium.parts.site import Site


class MlpFeedForward(nn.Module):
    """`act(x W_up + b) W_down + b`, [B, T, D] to [B, T, D] (Vaswani et al. 2017, §3.3)."""

    def __init__(self, options: Mlp, site: Site) -> None:
        super().__init__()
        size = options.size(site)
        self.up = Linear(site.width, size, bias=options.bias, role="up")
        self.down = Linear(size, site.width, bias=options.bias, role="down")
        self.activation = ACTIVATIONS[options.activation]
        self.dropout, self.lock = options.dropout, options.lock

    def forward(self, x_BTD: Tensor) -> Tensor:
        result: Tensor = self.down(self.drop(self.hidden(x_BTD)))
        return result

    def hidden(self, x_BTD: Tensor) -> Tensor:
        """The hidden layer, [B, T, F]."""
        return self.activation(self.up(x_BTD))

    def drop(self, hidden_BTF: Tensor) -> Tensor:
        """The hidden layer with variational dropout, then dropout, while training."""
        return dropout(locked(hidden_BTF, self.lock, self.training), self.dropout, self.training)


class GluFeedForward(nn.Module):
    """`(act(x W_gate + b) ⊙ (x W_up + b)) W_down + b`, [B, T, D] to [B, T, D] (Shazeer 2020)."""

    def __init__(self, options: Glu, site: Site) -> None:
        super().__init__()
        size = options.size(site)
        self.gate = Linear(site.width, size, bias=options.bias, role="gate")
        self.up = Linear(site.width, size, bias=options.bias, role="up")
        self.down = Linear(size, site.width, bias=options.bias, role="down")
        self.activation = ACTIVATIONS[options.activation]
        self.dropout, self.lock = options.dropout, options.lock

    def forward(self, x_BTD: Tensor) -> Tensor:
        result: Tensor = self.down(self.drop(self.hidden(x_BTD)))
        return result

    def hidden(self, x_BTD: Tensor) -> Tensor:
        """The gated hidden layer, [B, T, F]."""
        result: Tensor = self.activation(self.gate(x_BTD)) * self.up(x_BTD)
        return result

    def drop(self, hidden_BTF: Tensor) -> Tensor:
        """The hidden layer with variational dropout, then dropout, while training."""
        return dropout(locked(hidden_BTF, self.lock, self.training), self.dropout, self.training)
