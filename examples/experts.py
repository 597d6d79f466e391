"""A feed-forward network of experts with stacked matrices and a balance loss (Switch, Fedus et al. 2022).

    Block(feedforward=Experts(experts=4))

Every token goes to the expert with the highest probability; all experts are computed, which is simple and slow. The
loss "balance" reaches the training loss, metrics.jsonl and the screen by its name alone.
"""

# B batch, T tokens, D width, F hidden size, E experts

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from trivium.parts.declared import Declared
from trivium.parts.declared import matrix as matrices
from trivium.parts.linear import Linear
from trivium.parts.losses import Loss, WithLosses
from trivium.parts.mixers import Context
from trivium.parts.site import Cost, Site, matrix


@dataclass(frozen=True, kw_only=True, slots=True)
class Experts:
    """The options; `hidden` = 0 means 4 x width in every expert."""

    experts: int = 4
    hidden: int = 0
    balance: float = 0.01  # weight of the balance loss

    def build(self, site: Site) -> nn.Module:
        return ExpertFeedForward(self, site.width, self.hidden or 4 * site.width)

    def cost(self, site: Site) -> Cost:
        size = self.hidden or 4 * site.width
        each = matrix(site.width, size).plus(matrix(size, site.width))
        total = Cost(self.experts * each.parameters, self.experts * each.flops, self.experts * 2 * size + site.width)
        return total.plus(matrix(site.width, self.experts))


class ExpertFeedForward(nn.Module):
    """`p_e(x) * relu(x W_e) V_e` of the expert e with the highest `p(x) = softmax(x R)`, [B, T, D] to [B, T, D]."""

    declares: ClassVar[Mapping[str, Declared]] = {"up_EFD": matrices("up"), "down_EDF": matrices("down")}

    def __init__(self, options: Experts, width: int, hidden: int) -> None:
        super().__init__()
        self.balance = options.balance
        self.router = Linear(width, options.experts, bias=False, role="transform")
        self.up_EFD = nn.Parameter(torch.empty(options.experts, hidden, width))
        self.down_EDF = nn.Parameter(torch.empty(options.experts, width, hidden))

    def forward(self, x_BTD: Tensor, ctx: Context | None = None) -> WithLosses:
        probability_BTE = self.router(x_BTD).float().softmax(-1)
        best_BT1 = probability_BTE.argmax(-1, keepdim=True)
        chosen_BTE = torch.zeros_like(probability_BTE).scatter(-1, best_BT1, 1.0)
        hidden_BTEF = torch.einsum("btd,efd->btef", x_BTD, self.up_EFD).relu()
        gate_BTE = (chosen_BTE * probability_BTE).to(x_BTD.dtype)
        y_BTD = torch.einsum("bte,btef,edf->btd", gate_BTE, hidden_BTEF, self.down_EDF)
        # E * sum_e (share of tokens) * (mean probability): 1 if tokens are spread evenly; padding does not count
        real_BT = None if ctx is None else ctx.real
        real_BT1 = (torch.ones_like(best_BT1[..., 0]) if real_BT is None else real_BT)[..., None].to(x_BTD.dtype)
        share_E, mean_E = (
            (one * real_BT1).sum((0, 1)) / real_BT1.sum().clamp(min=1) for one in (chosen_BTE, probability_BTE)
        )
        value = len(self.up_EFD) * (share_E * mean_E).sum()
        return WithLosses(y_BTD, {"balance": Loss(value * len(x_BTD), "sequences", self.balance)})
