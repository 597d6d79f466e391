"""The guard against numbers that are not finite."""

from __future__ import annotations

import torch
from torch import Tensor

from trivium.distributed import world


class FiniteGuard:
    """Decides on the device, without waiting for it, whether an update may move the weights.

    With the policy `stop` nothing moves after the first bad step; with `skip` and `rollback` only the bad steps
    themselves are lost, and what `rollback` makes of them is decided when the numbers are read.
    """

    def __init__(self, policy: str, device: torch.device, *, sharded: bool = False) -> None:
        self.policy, self.sharded = policy, sharded
        self.finite = torch.ones((), dtype=torch.bool, device=device)

    def agree(self, loss: Tensor) -> Tensor:
        """The loss; of a sharded model NaN if that of any process is not finite: the norm is the same in all already.

        Otherwise one process would move its shards and another not.
        """
        if not self.sharded:
            return loss
        return torch.where(world.agreed(torch.isfinite(loss)), loss, torch.nan)

    def check(self, loss: Tensor, norm: Tensor, overflow: bool = False) -> Tensor:
        """True on the device if loss and gradient norm are finite (and, to `stop`, always were).

        An fp16 `overflow` allows no update either, but is nothing to stop for.
        """
        if overflow:
            return torch.zeros_like(self.finite)
        finite = torch.isfinite(loss) & torch.isfinite(norm)
        if self.policy == "stop":
            finite = finite & self.finite
            self.finite.copy_(finite)  # in place: a recorded step finds it where it was
        return finite
