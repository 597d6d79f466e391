"""Dropout as a function: in evaluation, or at rate 0, it costs nothing."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def dropout(x: Tensor, rate: float, training: bool) -> Tensor:
    """`x` with a share of its elements zeroed and the rest scaled up, while training."""
    return F.dropout(x, rate) if training and rate else x


def locked(x_BTD: Tensor, rate: float, training: bool) -> Tensor:
    """The same with one draw for all places of a row: noise that attention cannot average away."""
    if not training or not rate:
        return x_BTD
    return x_BTD * F.dropout(x_BTD.new_ones(len(x_BTD), 1, x_BTD.shape[2]), rate)
