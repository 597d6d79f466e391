"""Which weights are decayed, and which are matrices that Muon may orthogonalise: by role, never by name."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, NamedTuple

from torch import nn

from trivium.parts.embeddings import TokenEmbedding
from trivium.parts.linear import Linear
from trivium.parts.positions import LearnedPositions

Kind = Literal["matrix", "head", "embedding", "vector", "other"]


class Weight(NamedTuple):
    """A distinct trainable tensor: its name, itself, and what it is to an optimizer."""

    name: str
    parameter: nn.Parameter
    kind: Kind

    @property
    def decayed(self) -> bool:
        """Matrices and embeddings shrink; biases, norm gains and other vectors do not."""
        return self.kind != "vector"


def trainable(model: nn.Module) -> list[Weight]:
    """Every distinct trainable tensor of a model with its kind; tied tensors once, under their first name."""
    kinds = dict(_kinds(model))
    return [
        Weight(name, parameter, "vector" if parameter.ndim < 2 else kinds.get(id(parameter), "other"))
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    ]


def _kinds(model: nn.Module) -> Iterator[tuple[int, Kind]]:
    for module in model.modules():
        if isinstance(module, Linear):
            yield id(module.weight), "head" if module.role == "head" else "matrix"
    for module in model.modules():  # after the linear layers: a tied matrix counts as the embedding it is
        if isinstance(module, TokenEmbedding):
            yield id(module.weight), "embedding"
        elif isinstance(module, LearnedPositions):
            yield id(module.table), "embedding"
