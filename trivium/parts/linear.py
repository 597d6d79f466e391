"""The one linear layer of the package: it knows its role, so that init, decay and adapters need no name patterns."""

from __future__ import annotations

from typing import Literal

from torch import Tensor, nn

Role = Literal["query", "key", "value", "attention-out", "up", "gate", "down", "head"]

# Layers that write into the residual stream: GPT-2 scales their init by depth.
WRITERS: frozenset[Role] = frozenset({"attention-out", "down"})


class Linear(nn.Linear):
    """`nn.Linear` with a role and without a draw of its own: the model's init part fills every weight."""

    def __init__(self, inputs: int, outputs: int, *, bias: bool, role: Role) -> None:
        super().__init__(inputs, outputs, bias=bias)
        self.role: Role = role

    def reset_parameters(self) -> None:
        """Nothing: `init` decides, once, for the whole model."""


def columns(weight: Tensor) -> Tensor:
    """The same matrix; if it has more outputs than inputs, stored column by column.

    A product with a single row, as in decoding, then runs through contiguous memory: on the CPU two to three times
    faster for wide matrices. Training prefers rows.
    """
    outputs, inputs = weight.shape
    return weight.t().contiguous().t() if outputs > inputs else weight.contiguous()
