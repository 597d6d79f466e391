"""Activations by name, as in the papers."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor


def gelu_tanh(x: Tensor) -> Tensor:
    """GELU by its tanh approximation (GPT-1/2, T5 v1.1); it differs from the erf form by up to 4.7e-4."""
    return F.gelu(x, approximate="tanh")


def squared_relu(x: Tensor) -> Tensor:
    """`relu(x)²` (Primer)."""
    return F.relu(x).square()


def identity(x: Tensor) -> Tensor:
    """As a gate: bilinear, LiGLU."""
    return x


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "gelu": F.gelu,  # erf: BERT, RoBERTa, BART
    "gelu-tanh": gelu_tanh,
    "silu": F.silu,
    "relu2": squared_relu,
    "elu": F.elu,
    "selu": F.selu,
    "sigmoid": torch.sigmoid,  # as a gate: the original GLU
    "tanh": torch.tanh,
    "softplus": F.softplus,
    "identity": identity,
}
