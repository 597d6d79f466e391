"""Dropout as a function: in evaluation, or at rate 0, it costs nothing."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def dropout(x: Tensor, rate: float, training: bool) -> Tensor:
    """`x` with a share of its elements zeroed and the rest scaled up, while training."""
    return F.dropout(x, rate) if training and rate else x
