"""How a sub-layer joins the residual stream (spec: architecture §3)."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

from trivium.parts.dropout import dropout
from trivium.parts.losses import WithLosses, split, with_losses

Sublayer = Callable[[Tensor], "Tensor | WithLosses"]  # attention, cross-attention or feed-forward of one layer


class PreConnection(nn.Module):
    """`x + dropout(sublayer(norm(x)))`: GPT-2, T5, LLaMA (Xiong et al. 2020)."""

    def __init__(self, norm: nn.Module, rate: float, variational: float = 0.0) -> None:
        super().__init__()
        self.norm = norm
        self.dropout, self.variational_dropout = rate, variational

    def forward(self, x: Tensor, sublayer: Sublayer) -> Tensor | WithLosses:
        y, losses = split(sublayer(self.norm(x)))
        return with_losses(x + dropout(y, self.dropout, self.training, variational=self.variational_dropout), losses)


class PostConnection(nn.Module):
    """`norm(x + dropout(sublayer(x)))`: Vaswani, GPT-1, BERT."""

    def __init__(self, norm: nn.Module, rate: float, variational: float = 0.0) -> None:
        super().__init__()
        self.norm = norm
        self.dropout, self.variational_dropout = rate, variational

    def forward(self, x: Tensor, sublayer: Sublayer) -> Tensor | WithLosses:
        y, losses = split(sublayer(x))
        normed: Tensor = self.norm(x + dropout(y, self.dropout, self.training, variational=self.variational_dropout))
        return with_losses(normed.to(x.dtype), losses)  # autocast makes every norm float32


class SandwichConnection(nn.Module):
    """`x + after(dropout(sublayer(norm(x))))`, two norms: CogView, Gemma 2."""

    def __init__(self, before: nn.Module, after: nn.Module, rate: float, variational: float = 0.0) -> None:
        super().__init__()
        self.norm = before
        self.after = after
        self.dropout, self.variational_dropout = rate, variational

    def forward(self, x: Tensor, sublayer: Sublayer) -> Tensor | WithLosses:
        y, losses = split(sublayer(self.norm(x)))
        after: Tensor = self.after(dropout(y, self.dropout, self.training, variational=self.variational_dropout))
        return with_losses(x + after.to(x.dtype), losses)
