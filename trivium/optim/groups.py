"""Which weights are decayed, and which are matrices that Muon may orthogonalise: by role, never by name."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, NamedTuple

from torch import nn

from trivium.errors import ConfigError
from trivium.parts.declared import declared
from trivium.parts.quantized import bits_in

Kind = Literal["matrix", "head", "embedding", "vector", "other"]

# What a module declares -> what it is to an optimizer: a bias is not decayed, whatever its shape.
KINDS: dict[str, Kind] = {"embedding": "embedding", "position": "embedding", "bias": "vector", "vector": "vector"}


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
    found = list(declared(model))
    for _, _, parameter, what in found:
        if what.kind == "matrix":
            yield id(parameter), "head" if what.role == "head" else "matrix"
    for _, _, parameter, what in found:  # after the matrices: a tied one counts as the embedding it is
        if what.kind != "matrix":
            yield id(parameter), KINDS[what.kind]
