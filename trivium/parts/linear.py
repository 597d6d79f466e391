"""The one linear layer of the package: it knows its role, so that init, decay and adapters need no name patterns."""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Role = Literal["query", "key", "value", "attention-out", "up", "gate", "down", "transform", "pooler", "head"]

# Layers that write into the residual stream: GPT-2 scales their init by depth.
WRITERS: frozenset[Role] = frozenset({"attention-out", "down"})


class Linear(nn.Linear):
    """`nn.Linear` with a role and without a draw of its own: the model's init part fills every weight."""

    def __init__(self, inputs: int, outputs: int, *, bias: bool, role: Role, head: int = 0) -> None:
        super().__init__(inputs, outputs, bias=bias)
        self.role: Role = role
        self.head = head  # the size of one head where the outputs are queries: T5 folds its scale into their init

    def reset_parameters(self) -> None:
        """Nothing: `init` decides, once, for the whole model."""

    def forward(self, input: Tensor) -> Tensor:
        return product(input, self.weight, self.bias)


def product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`F.linear`, except that the product with a single row, as in decoding, is shared by the threads of the CPU.

    The library behind torch gives such a product to one thread, which reads memory at half the speed of two.
    """
    outputs, inputs = weight.shape
    if x.numel() != inputs or x.device.type != "cpu" or torch.is_grad_enabled() or torch.compiler.is_compiling():
        return F.linear(x, weight, bias)
    threads = torch.get_num_threads()
    if threads == 1 or outputs % threads or weight.numel() < 100_000:
        return F.linear(x, weight, bias)
    shares = weight.view(threads, outputs // threads, inputs).mT  # views in both layouts: nothing is copied
    result = torch.bmm(x.view(1, 1, inputs).expand(threads, 1, inputs), shares).view(*x.shape[:-1], outputs)
    return result if bias is None else result.add_(bias)


def columns(weight: Tensor) -> Tensor:
    """The same matrix; if it has more outputs than inputs, stored column by column.

    A product with a single row, as in decoding, then runs through contiguous memory: on the CPU two to three times
    faster for wide matrices. Training prefers rows.
    """
    outputs, inputs = weight.shape
    return weight.t().contiguous().t() if outputs > inputs else weight.contiguous()
