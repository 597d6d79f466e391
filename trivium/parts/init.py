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

    from trivium.parts.declared import Declared


class Init(Protocol):
    """The options of an initialisation: fills every declared matrix and table of a model in place (`declared.py`).

    Vectors keep the value that their constructor gave them, biases of linear layers are zero.
    """

    def apply(self, model: nn.Module, *, width: int, layers: int, generator: torch.Generator) -> None: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Gpt:
    """Every matrix and table from N(0, std), biases zero: GPT-1, BERT, LLaMA."""

    std: float = 0.02

    def __post_init__(self) -> None:
        at_least("std", self.std, 0)

    def apply(self, model: nn.Module, *, width: int, layers: int, generator: torch.Generator) -> None:
        _fill(model, generator, table=lambda kind: self.std, matrix=_normal(lambda what, inputs: self.std))


@dataclass(frozen=True, kw_only=True, slots=True)
class Gpt2:
    """As GPT, but layers that write into the residual stream are scaled by 1/sqrt(2 layers)."""

    std: float = 0.02

    def __post_init__(self) -> None:
        at_least("std", self.std, 0)

    def apply(self, model: nn.Module, *, width: int, layers: int, generator: torch.Generator) -> None:
        scaled = self.std / math.sqrt(2 * layers)
        deviation = _normal(lambda what, inputs: scaled if what.role in WRITERS else self.std)
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
        def deviation(what: Declared, inputs: int) -> float:
            return 0.0 if what.role in WRITERS else self.gain / math.sqrt(inputs)

        _fill(model, generator, table=lambda kind: self.table, matrix=_normal(deviation))


@dataclass(frozen=True, kw_only=True, slots=True)
class Xavier:
    """Matrices uniform within sqrt(6 / (inputs + outputs)), tables from N(0, 1/sqrt(width)): Vaswani.

    With embeddings multiplied by sqrt(width) a token then has the size of its sinusoid.
    """

    def apply(self, model: nn.Module, *, width: int, layers: int, generator: torch.Generator) -> None:
        def draw(weight: Tensor, what: Declared, generator: torch.Generator) -> None:
            outputs, inputs = weight.shape[-2:]
            bound = math.sqrt(6 / (inputs + outputs))
            weight.uniform_(-bound, bound, generator=generator)

        _fill(model, generator, table=lambda kind: width**-0.5, matrix=draw)


@dataclass(frozen=True, kw_only=True, slots=True)
class T5:
    """Matrices from N(0, 1/sqrt(inputs)), queries divided by sqrt(head) too, since T5 does not scale its scores.

    Tokens come from N(0, 1), relative biases from N(0, 1/sqrt(width)). An output matrix of its own counts as a
    matrix: drawn as the tokens are, logits would start with a spread of sqrt(width).
    """

    def apply(self, model: nn.Module, *, width: int, layers: int, generator: torch.Generator) -> None:
        def deviation(what: Declared, inputs: int) -> float:
            return 1 / math.sqrt(inputs * (what.head or 1))

        def table(kind: str) -> float:
            return 1.0 if kind == "embedding" else width**-0.5

        _fill(model, generator, table=table, matrix=_normal(deviation))


INITS: dict[str, type[Init]] = {"gpt": Gpt, "gpt2": Gpt2, "fan-in": FanIn, "xavier": Xavier, "t5": T5}

_Draw = Callable[["Tensor", "Declared", "torch.Generator"], object]


def _normal(deviation: Callable[[Declared, int], float]) -> _Draw:
    """Draws from N(0, deviation), which depends on what a matrix is and on its inputs."""

    def draw(weight: Tensor, what: Declared, generator: torch.Generator) -> Tensor:
        std = deviation(what, weight.shape[-1])
        return weight.normal_(0, std, generator=generator) if std else weight.zero_()

    return draw


def _fill(model: nn.Module, generator: torch.Generator, *, table: Callable[[str], float], matrix: _Draw) -> None:
    import torch

    from trivium.parts.declared import declared

    done: set[int] = set()  # a tied matrix is drawn once, as the embedding it belongs to
    with torch.no_grad():
        for _, _, weight, what in declared(model):
            if id(weight) in done:
                continue
            done.add(id(weight))
            if what.kind == "vector":
                if what.fill is not None:
                    weight.fill_(what.fill)
            elif not _has_no_values(weight):
                if what.kind == "matrix":
                    matrix(weight, what, generator)
                else:
                    weight.normal_(0, table(what.kind), generator=generator)


def _has_no_values(weight: Tensor) -> bool:
    """Whether it is on the meta device, then counted as filled: to draw nothing torch would import its compiler."""
    if not weight.is_meta:
        return False
    weight.zero_()
    return True
