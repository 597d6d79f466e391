"""Gradient descent, with momentum or without (spec: training §1)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from trivium.config import fraction
from trivium.errors import ConfigError
from trivium.optim.groups import Weight, trainable
from trivium.optim.stepper import Optimizer, State, check


@dataclass(frozen=True, kw_only=True, slots=True)
class Sgd:
    """A step against the gradient, or against a sum of gradients of which `momentum` remains at each step."""

    rate: float = 0.1
    momentum: float = 0.0
    form: Literal["plain", "nesterov"] = "plain"  # nesterov: the gradient is counted once more
    decay: float = 0.0  # decoupled, on matrices and embeddings

    def __post_init__(self) -> None:
        check(self.rate, self.decay)
        fraction("momentum", self.momentum)
        if self.form == "nesterov" and not self.momentum:
            raise ConfigError("form: nesterov is a form of momentum, and there is none; set momentum=0.9")

    @property
    def states(self) -> float:
        return 1.0 if self.momentum else 0.0

    def build(self, model: nn.Module) -> Optimizer:
        return SgdStepper(self, trainable(model))


class SgdStepper:
    """torch's fused kernel after a decay of our own: torch adds decay to the gradient, and so to the momentum."""

    def __init__(self, options: Sgd, weights: Sequence[Weight]) -> None:
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
    def step(self, factor: float | Tensor, healthy: Tensor) -> None:
        rate = self.options.rate * factor
        decayed: list[Tensor] = [parameter for parameter in self.decayed if parameter.grad is not None]
        if decayed:
            torch._foreach_mul_(decayed, 1.0 - healthy.float() * (rate * self.options.decay))
        self.inner.param_groups[0]["lr"] = rate
        # the fused kernel's own switch, meant for loss scaling: with 1 here it leaves everything as it is
        self.inner.found_inf = 1.0 - healthy.float()  # type: ignore[attr-defined]
        self.inner.step()

    def compile(self) -> None:
        """Nothing: it is one kernel already."""

    def tensors(self) -> dict[str, Tensor]:
        return self.state.tensors()

    def load(self, tensors: dict[str, Tensor]) -> None:
        self.state.load(tensors)
