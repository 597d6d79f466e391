"""Dropout as a function: in evaluation, or at rate 0, it costs nothing."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def dropout(x: Tensor, rate: float, training: bool, *, variational: float = 0.0) -> Tensor:
    """`x` with a share of its elements zeroed and the rest scaled up, while training.

    Before that `variational` dropout of [B, T, D], with one mask [B, 1, D] for all tokens of a sequence (Gal and
    Ghahramani 2016; "locked" in AWD-LSTM).
    """
    if training and variational:
        x = x * F.dropout(x.new_ones(len(x), 1, x.shape[2]), variational)
    return F.dropout(x, rate) if training and rate else x
