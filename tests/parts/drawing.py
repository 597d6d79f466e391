"""Random tensors and parts with random weights, for tests."""

from __future__ import annotations

from typing import TypeVar

import torch
from torch import Tensor, nn

Part = TypeVar("Part", bound=nn.Module)


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def drawn(part: Part, seed: int = 0) -> Part:
    """The part with every weight drawn: fresh ones have zeros and ones where a mistake would not show."""
    with torch.no_grad():
        for index, parameter in enumerate(part.parameters()):
            parameter.copy_(random(*parameter.shape, seed=seed + index))
    return part.eval()
