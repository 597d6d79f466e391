"""A stack that repeats one block: the depth of many layers with the parameters of one (Dehghani et al. 2019).

ModelConfig(decoder=Repeated(layers=6, block=Block()))
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from torch import nn

from trivium.models.config import ModelConfig, Place, Stack, without_parameters
from trivium.models.options import AnyBlock, Block
from trivium.models.stack import PlainStack


@dataclass(frozen=True, kw_only=True, slots=True)
class Repeated:
    """The options: how often one block is computed, each time with a cache of its own."""

    layers: int = 4
    block: AnyBlock = field(default_factory=Block)

    @property
    def reads_source(self) -> bool:
        return self._plain().reads_source

    def build(self, config: ModelConfig, *, causal: bool, encoder: nn.Module | None) -> nn.Module:
        stack = PlainStack(self._plain(), config, causal=causal)
        stack.blocks = nn.ModuleList([stack.blocks[0]] * self.layers)
        stack.positions, stack.position_of = stack.positions[:1], [0] * self.layers
        return stack

    def costs(self, config: ModelConfig, *, causal: bool) -> Iterator[Place]:
        once = list(Stack(layers=1, block=self.block).costs(config, causal=causal))
        yield from once  # its last entry is the norm of the whole stack
        for _ in range(self.layers - 1):
            yield from ((name, without_parameters(cost)) for name, cost in once[:-1])

    def _plain(self) -> Stack:
        return Stack(layers=self.layers, block=self.block)
