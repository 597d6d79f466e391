"""How a new model's weights are drawn (spec: architecture §1.2, §3), by the role of each layer and table."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from trivium.config import at_least
from trivium.parts.roles import WRITERS

if TYPE_CHECKING:  # the options are read without torch
    import torch
    from torch import Tensor, nn

    from trivium.parts.linear import Linear


class Init(Protocol):
    """The options of an initialisation: fills every matrix and table of a model in place.

    Matrices are the package's `Linear` layers; tables are what a module names in its attribute `tables`. Whatever else
    a part has (gains, slopes, scalars) keeps the value that its constructor gave it; what has none is refused.
    """

    def apply(self, model: nn.Module, *, width: int, layers: int, generator: torch.Generator) -> None: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Gpt:
    """Every matrix and table from N(0, std), biases zero: GPT-1, BERT, LLaMA."""

    std: float = 0.02

    def __post_init__(self) -> None:
        at_least("std", self.std, 0)

    def apply(self, model: nn.Module, *, width: int, layers: int, generator: torch.Generator) -> None:
        _fill(model, generator, table=lambda kind: self.std, matrix=_normal(lambda layer: self.std))


@dataclass(frozen=True, kw_only=True, slots=True)
class Gpt2:
    """As GPT, but layers that write into the residual stream are scaled by 1/sqrt(2 layers)."""

    std: float = 0.02

    def __post_init__(self) -> None:
        at_least("std", self.std, 0)

    def apply(self, model: nn.Module, *, width: int, layers: int, generator: torch.Generator) -> None:
        scaled = self.std / math.sqrt(2 * layers)
        deviation = _normal(lambda layer: scaled if layer.role in WRITERS else self.std)
        _fill(model, generator, table=lambda kind: self.std, matrix=deviation)


@dataclass(frozen=True, kw_only=True, slots=True)
class FanIn:
    """Matrices from N(0, gain/sqrt(inputs)), writers zero, so that a new stack is the identity."""

    gain: float = 1.0
    table: float = 0.02

    def __post_init__(self) -> None:
        at_least("gain", self.gain, 0)
        at_least("table", self.table, 0)

    def apply(self, model: nn.Module, *, width: int, layers: int, generator: torch.Generator) -> None:
        def deviation(layer: Linear) -> float:
            return 0.0 if layer.role in WRITERS else self.gain / math.sqrt(layer.in_features)

        _fill(model, generator, table=lambda kind: self.table, matrix=_normal(deviation))


@dataclass(frozen=True, kw_only=True, slots=True)
class Xavier:
    """Matrices uniform within sqrt(6 / (inputs + outputs)), tables from N(0, 1/sqrt(width)): Vaswani.

    With embeddings multiplied by sqrt(width) a token then has the size of its sinusoid.
    """

    def apply(self, model: nn.Module, *, width: int, layers: int, generator: torch.Generator) -> None:
        def draw(layer: Linear, generator: torch.Generator) -> None:
            bound = math.sqrt(6 / (layer.in_features + layer.out_features))
            layer.weight.uniform_(-bound, bound, generator=generator)

        _fill(model, generator, table=lambda kind: width**-0.5, matrix=draw)


@dataclass(frozen=True, kw_only=True, slots=True)
class T5:
    """Matrices from N(0, 1/sqrt(inputs)), queries divided by sqrt(head) too, since T5 does not scale its scores.

    Tokens come from N(0, 1), relative biases from N(0, 1/sqrt(width)). An output matrix of its own counts as a
    matrix: drawn as the tokens are, logits would start with a spread of sqrt(width).
    """

    def apply(self, model: nn.Module, *, width: int, layers: int, generator: torch.Generator) -> None:
        def deviation(layer: Linear) -> float:
            return 1 / math.sqrt(layer.in_features * (layer.head or 1))

        def table(kind: str) -> float:
            return 1.0 if kind == "embedding" else width**-0.5

        _fill(model, generator, table=table, matrix=_normal(deviation))


INITS: dict[str, type[Init]] = {"gpt": Gpt, "gpt2": Gpt2, "fan-in": FanIn, "xavier": Xavier, "t5": T5}

_Draw = Callable[["Linear", "torch.Generator"], object]


def _normal(deviation: Callable[[Linear], float]) -> _Draw:
    def draw(layer: Linear, generator: torch.Generator) -> Tensor:
        std = deviation(layer)
        return layer.weight.normal_(0, std, generator=generator) if std else layer.weight.zero_()

    return draw


def _fill(model: nn.Module, generator: torch.Generator, *, table: Callable[[str], float], matrix: _Draw) -> None:
    import torch

    from trivium.parts.linear import Linear

    done: set[int] = set()  # a tied matrix is drawn once, as the embedding it belongs to
    with torch.no_grad():
        for module in model.modules():
            for name, kind in getattr(module, "tables", {}).items():
                weight = getattr(module, name)
                if weight is not None and id(weight) not in done:
                    if not _has_no_values(weight):
                        weight.normal_(0, table(kind), generator=generator)
                    done.add(id(weight))
            if isinstance(module, Linear):
                if id(module.weight) not in done and not _has_no_values(module.weight):
                    matrix(module, generator)
                if module.bias is not None:
                    module.bias.zero_()


def _has_no_values(weight: Tensor) -> bool:
    """Whether it is on the meta device, then counted as filled: to draw nothing torch would import its compiler."""
    if not weight.is_meta:
        return False
    weight.zero_()
    return True
