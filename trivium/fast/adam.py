"""Adam over a model whose products go with twins (parts/twins.py): one kernel moves each weight and its twin."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from trivium.fast.twins import Pair, Twins
from trivium.kernels.hardware import can_launch
from trivium.optim.adam import AdamStepper
from trivium.optim.stepper import Optimizer


class OnePass:
    """`AdamStepper` for weights with a gradient of their own, and its rule for those whose twins have it."""

    def __init__(self, inner: AdamStepper, twins: Twins) -> None:
        self.inner, self.twins = inner, twins
        groups = inner.inner.param_groups
        self._place: dict[Tensor, int] = {
            parameter: at for at, group in enumerate(groups) for parameter in group["params"]
        }

    @torch.no_grad()
    def step(self, factor: float | Tensor, healthy: Tensor) -> None:
        able, alone = can_launch(healthy), []
        for pair in self.twins.pairs():
            if able and pair.weight.grad is None:
                alone.append(pair)
            else:
                gradient = pair.gradient.float() * self.twins.scale
                pair.weight.grad = gradient if pair.weight.grad is None else pair.weight.grad + gradient
        if alone:
            self._by_kernel(alone, factor, healthy)
        self.twins.outdate()
        self.inner.step(factor, healthy)

    def _by_kernel(self, pairs: list[Pair], factor: float | Tensor, healthy: Tensor) -> None:
        from trivium.kernels.adam import Rule, adam  # not above: there is no Triton for a CPU

        allowed = healthy.float()
        if not isinstance(factor, Tensor):
            factor = torch.full_like(allowed, factor)
        state, groups = self.inner.inner.state, self.inner.inner.param_groups
        # as many tensors as counts: one alone would be read by the host
        torch._foreach_add_([state[weight]["step"] for weight, _, _ in pairs], [allowed] * len(pairs))
        for weight, twin, gradient in pairs:
            group, kept = groups[self._place[weight]], state[weight]
            decoupled, (beta1, beta2) = group["decoupled_weight_decay"], group["betas"]
            rate = self.inner.peaks[self._place[weight]]
            adam(
                Rule(rate, beta1, beta2, group["eps"], group["weight_decay"], decoupled),
                weight,
                (kept["exp_avg"], kept["exp_avg_sq"]),
                twin,
                gradient,
                count=kept["step"],
                healthy=allowed,
                factor=factor,
                scale=self.twins.scale,
            )

    def compile(self) -> None:
        self.inner.compile()

    def tensors(self) -> dict[str, Tensor]:
        return self.inner.tensors()

    def load(self, tensors: dict[str, Tensor]) -> None:
        self.inner.load(tensors)


def with_twins(optimizer: Optimizer, model: nn.Module) -> tuple[Optimizer, Twins | None]:
    """The optimizer and the twins it moves along with the weights, if it is one that can."""
    if not isinstance(optimizer, AdamStepper):
        return optimizer, None
    twins = Twins(model)
    return OnePass(optimizer, twins), twins
