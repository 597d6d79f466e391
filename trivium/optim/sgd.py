"""Gradient descent, with momentum or without (spec: training §1)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from trivium.optim.groups import Weight
from trivium.optim.options import Sgd
from trivium.optim.stepper import Optimizer, State


class SgdStepper(Optimizer):
    """torch's fused kernel after a decay of our own: torch adds decay to the gradient, and so to the momentum."""

    def __init__(self, options: Sgd, weights: Sequence[Weight]) -> None:
        super().__init__([weight.parameter for weight in weights])
        self.options = options
        self.decayed = [weight.parameter for weight in weights if weight.decayed and options.decay]
        self.inner = torch.optim.SGD(
            [weight.parameter for weight in weights],
            lr=options.rate,
            momentum=options.momentum,
            nesterov=options.form == "nesterov",
            fused=True,
        )
        moving = weights if options.momentum else ()
        self.state = State({w.name: {"velocity": torch.zeros_like(w.parameter)} for w in moving})
        for weight in moving:
            self.inner.state[weight.parameter] = {"momentum_buffer": self.state.of[weight.name]["velocity"]}

    @torch.no_grad()
    def step(self, factor: float | Tensor, finite: Tensor) -> None:
        rate = self.options.rate * factor
        decayed: list[Tensor] = [parameter for parameter in self.decayed if parameter.grad is not None]
        if decayed:
            torch._foreach_mul_(decayed, 1.0 - finite.float() * (rate * self.options.decay))
        self.inner.param_groups[0]["lr"] = rate
        # the fused kernel's own switch, meant for loss scaling: with 1 here it leaves everything as it is
        self.inner.found_inf = 1.0 - finite.float()  # type: ignore[attr-defined]
        self.inner.step()

    def tensors(self) -> dict[str, Tensor]:
        return self.state.tensors()

    def load(self, tensors: dict[str, Tensor]) -> None:
        self.state.load(tensors)
