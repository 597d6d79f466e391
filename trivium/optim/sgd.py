"""Gradient descent, with momentum or without (spec: training §1)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor
from torch.optim.sgd import sgd

from trivium.optim.groups import Weight
from trivium.optim.options import Sgd
from trivium.optim.stepper import Optimizer, State
from trivium.parts.sharded import own_shard


class SgdStepper(Optimizer):
    """torch's fused kernel after a decay of our own: torch adds decay to the gradient, and so to the momentum."""

    def __init__(self, options: Sgd, weights: Sequence[Weight]) -> None:
        super().__init__([weight.parameter for weight in weights])
        self.options = options
        self.decayed = [weight.parameter for weight in weights if weight.decayed and options.decay]
        moving = weights if options.momentum else ()
        self.state = State({w.name: {"velocity": torch.zeros_like(w.parameter)} for w in moving})
        self.velocities = {w.parameter: self.state.of[w.name]["velocity"] for w in moving}

    @torch.no_grad()
    def step(self, factor: float | Tensor, finite: Tensor) -> None:
        rate = self.options.rate * factor
        moving = [parameter for parameter in self.parameters if parameter.grad is not None]
        decayed: list[Tensor] = [own_shard(parameter) for parameter in self.decayed if parameter.grad is not None]
        if decayed:
            torch._foreach_mul_(decayed, 1.0 - finite.float() * (rate * self.options.decay))
        sgd(
            [own_shard(parameter) for parameter in moving],  # torch would not divide the kernel itself
            [own_shard(gradient) for gradient in self.gradients()],
            [own_shard(self.velocities[parameter]) if self.velocities else None for parameter in moving],
            fused=True,
            # the kernel's own switch, meant for loss scaling: with 1 here it leaves everything as it is
            found_inf=1.0 - finite.float(),
            lr=cast(float, rate),  # a tensor too, which its annotation does not say
            momentum=self.options.momentum,
            nesterov=self.options.form == "nesterov",
            weight_decay=0.0,
            dampening=0.0,
            maximize=False,
        )

    def tensors(self) -> dict[str, Tensor]:
        return self.state.tensors()

    def load(self, tensors: dict[str, Tensor]) -> None:
        self.state.load(tensors)
