"""Which weights are decayed, and which are matrices that Muon may orthogonalise: by role, never by name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Literal, NamedTuple

from torch import nn

from trivium.errors import ConfigError
from trivium.parts.linear import Linear
from trivium.parts.quantized import bits_in

Kind = Literal["matrix", "head", "embedding", "vector", "other"]

# What a module says of its tables -> what they are to an optimizer: a bias is not decayed, whatever its shape.
TABLES: dict[str, Kind] = {"embedding": "embedding", "position": "embedding", "bias": "vector"}


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
    if bits := bits_in(model):
        raise ConfigError(
            f"model: its weights have {bits} bits, which cannot be trained; begin with the model that it was made from"
        )
    kinds = dict(_kinds(model))
    weights = [
        Weight(name, parameter, "vector" if parameter.ndim < 2 else kinds.get(id(parameter), "other"))
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    ]
    if not weights:
        raise ConfigError("model: every weight is frozen, so there is nothing to train; leave one that is not")
    return weights


def _kinds(model: nn.Module) -> Iterator[tuple[int, Kind]]:
    for module in model.modules():
        if isinstance(module, Linear):
            yield id(module.weight), "head" if module.role == "head" else "matrix"
    for module in model.modules():  # after the linear layers: a tied matrix counts as the embedding it is
        tables: Mapping[str, str] = getattr(module, "tables", {})
        for name, what in tables.items():
            yield id(getattr(module, name)), TABLES[what]  # an absent table is None, and so no weight
