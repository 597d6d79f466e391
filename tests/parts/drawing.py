"""Random tensors and parts with random weights, and what tests of several kernels go through."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Part = TypeVar("Part", bound=nn.Module)

FORMULAS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu-tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
    "relu2": lambda x: F.relu(x).square(),
}
# How heads may lie in memory, [B, H, T, E].
LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "by tokens": lambda x_BHTE: x_BHTE.transpose(1, 2).contiguous().transpose(1, 2),
    "by heads": lambda x_BHTE: x_BHTE.contiguous(),
    "apart": lambda x_BHTE: F.pad(x_BHTE, (0, 16))[..., : x_BHTE.shape[-1]],
    "turned": lambda x_BHTE: x_BHTE.mT.contiguous().mT,
    "of one number": lambda x_BHTE: x_BHTE[:1, :1, :1, :1].expand_as(x_BHTE),
}


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def drawn(part: Part, seed: int = 0) -> Part:
    """The part with every weight drawn: fresh ones have zeros and ones where a mistake would not show."""
    with torch.no_grad():
        for index, parameter in enumerate(part.parameters()):
            parameter.copy_(random(*parameter.shape, seed=seed + index))
    return part.eval()
