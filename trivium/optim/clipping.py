"""The global norm of gradients, whole or sharded, and the factor that clips them to a limit."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def global_norm(gradients: Sequence[Tensor]) -> Tensor:
    """The norm over all gradients; of sharded ones (DTensor) that of the whole, the same on every rank."""
    return whole(torch.nn.utils.get_total_norm(gradients))


def clip_factor(norm: Tensor, limit: float) -> Tensor:
    """What gradients of this norm are multiplied by, so that it is at most `limit`."""
    # a norm that is not finite makes the gradients useless, but then the guard allows no update
    return (limit / (norm + 1e-6)).clamp(max=1.0)


def whole(tensor: Tensor) -> Tensor:
    """A tensor with all its shards, which every rank then has; others as they are."""
    full: Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return full
