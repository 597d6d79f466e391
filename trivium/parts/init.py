"""How a new model's weights are drawn (spec: architecture §1.2, §3), by the role of each layer."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import nn

from trivium.config import at_least
from trivium.parts.embeddings import TokenEmbedding
from trivium.parts.linear import WRITERS, Linear
from trivium.parts.positions import LearnedPositions


class Init(Protocol):
    """The options of an initialisation: fills every weight of a model in place."""

    def apply(self, model: nn.Module, *, layers: int, generator: torch.Generator) -> None: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Gpt:
    """Every matrix and table from N(0, std), biases zero: GPT-1, LLaMA."""

    std: float = 0.02

    def __post_init__(self) -> None:
        at_least("std", self.std, 0)

    def apply(self, model: nn.Module, *, layers: int, generator: torch.Generator) -> None:
        _fill(model, generator, table=self.std, matrix=lambda layer: self.std)


@dataclass(frozen=True, kw_only=True, slots=True)
class Gpt2:
    """As GPT, but layers that write into the residual stream are scaled by 1/sqrt(2 layers)."""

    std: float = 0.02

    def __post_init__(self) -> None:
        at_least("std", self.std, 0)

    def apply(self, model: nn.Module, *, layers: int, generator: torch.Generator) -> None:
        scaled = self.std / math.sqrt(2 * layers)
        _fill(model, generator, table=self.std, matrix=lambda layer: scaled if layer.role in WRITERS else self.std)


@dataclass(frozen=True, kw_only=True, slots=True)
class FanIn:
    """Matrices from N(0, gain/sqrt(inputs)), writers zero, so that a new stack is the identity."""

    gain: float = 1.0
    table: float = 0.02

    def __post_init__(self) -> None:
        at_least("gain", self.gain, 0)
        at_least("table", self.table, 0)

    def apply(self, model: nn.Module, *, layers: int, generator: torch.Generator) -> None:
        def deviation(layer: Linear) -> float:
            return 0.0 if layer.role in WRITERS else self.gain / math.sqrt(layer.in_features)

        _fill(model, generator, table=self.table, matrix=deviation)


INITS: dict[str, type[Init]] = {"gpt": Gpt, "gpt2": Gpt2, "fan-in": FanIn}


class _Deviation(Protocol):
    def __call__(self, layer: Linear) -> float: ...


def _fill(model: nn.Module, generator: torch.Generator, *, table: float, matrix: _Deviation) -> None:
    done: set[int] = set()  # a tied matrix is drawn once, as the embedding it belongs to
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, TokenEmbedding):
                module.weight.normal_(0, table, generator=generator)
                done.add(id(module.weight))
            elif isinstance(module, LearnedPositions):
                module.table.normal_(0, table, generator=generator)
            elif isinstance(module, Linear):
                if id(module.weight) not in done:
                    std = matrix(module)
                    if std:
                        module.weight.normal_(0, std, generator=generator)
                    else:
                        module.weight.zero_()
                if module.bias is not None:
                    module.bias.zero_()
