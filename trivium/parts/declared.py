"""What every parameter is: the initialisation and the optimizers read only this.

A module names its own parameters in `declares`, a mapping or a property; an entry whose parameter is None is skipped.
A parameter that nobody declares is refused when a model is built.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Literal, NamedTuple

from torch import nn

from trivium.parts.roles import Role

# matrix [outputs, inputs] or a stack of them [..., outputs, inputs]; tables of vectors by id, or by position; a table
# of biases; a vector or scalar (gain, bias, slope), which is not decayed
Kind = Literal["matrix", "embedding", "position", "bias", "vector"]


class Declared(NamedTuple):
    """One parameter: its kind, the role of a matrix, and the constant that fills a vector.

    The init draws matrices and tables. A vector is filled with `fill`; None leaves what its constructor wrote.
    """

    kind: Kind
    role: Role | Literal[""] = ""
    head: int = 0  # the size of one head where the outputs of a matrix are queries
    fill: float | None = None


class Found(NamedTuple):
    """A declared parameter of a model."""

    module: nn.Module
    name: str  # inside the module
    parameter: nn.Parameter
    declared: Declared


def matrix(role: Role, head: int = 0) -> Declared:
    """A matrix [outputs, inputs], or a stack of them such as those of experts, [experts, outputs, inputs]."""
    return Declared("matrix", role, head)


EMBEDDING, POSITION, BIAS_TABLE = Declared("embedding"), Declared("position"), Declared("bias")
VECTOR, ZEROS = Declared("vector"), Declared("vector", fill=0.0)
# Layers of torch inside a part from outside, which cannot declare anything themselves.
TORCH: dict[type[nn.Module], Mapping[str, Declared]] = {
    nn.Linear: {"weight": Declared("matrix"), "bias": ZEROS},
    nn.Embedding: {"weight": EMBEDDING},
    nn.LayerNorm: {"weight": VECTOR, "bias": VECTOR},
    nn.RMSNorm: {"weight": VECTOR},
}


def declared(model: nn.Module) -> Iterator[Found]:
    """All declared parameters, module by module; a tied one is there once for every module that declares it."""
    for module in model.modules():
        declares: Mapping[str, Declared] = getattr(module, "declares", None) or TORCH.get(type(module), {})
        for name, what in declares.items():
            parameter = getattr(module, name, None)
            if isinstance(parameter, nn.Parameter):
                yield Found(module, name, parameter, what)


def undeclared(model: nn.Module) -> list[str]:
    """The names of the parameters that nobody declares."""
    known = {id(found.parameter) for found in declared(model)}
    return [name for name, parameter in model.named_parameters() if id(parameter) not in known]
