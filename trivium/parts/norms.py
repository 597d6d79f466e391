"""Normalisation of the residual stream (spec: architecture §3)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trivium.parts.declared import VECTOR, Declared


class LayerNorm(nn.Module):
    """`(x - mean(x)) / sqrt(var(x) + eps) * weight + bias` over the last dimension (Ba et al. 2016)."""

    declares: ClassVar[Mapping[str, Declared]] = {"weight": VECTOR, "bias": VECTOR}

    def __init__(self, width: int, eps: float, bias: bool) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(width))
        self.bias = nn.Parameter(torch.zeros(width)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)


class RMSNorm(nn.Module):
    """`x / sqrt(mean(x²) + eps) * weight` over the last dimension (Zhang and Sennrich 2019)."""

    declares: ClassVar[Mapping[str, Declared]] = {"weight": VECTOR}

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        # Statistics in at least float32, cast back before the scale: the order of the published LLaMA checkpoints.
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        return F.rms_norm(wide, self.weight.shape, None, self.eps).to(x.dtype) * self.weight
