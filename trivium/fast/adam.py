"""Adam over a model that multiplies by bf16 copies of its weights (fast/bf16_copies.py): one kernel moves both."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn

from trivium.fast.bf16_copies import Bf16Copies, WeightCopy
from trivium.kernels.hardware import can_launch
from trivium.optim.adam import AdamStepper
from trivium.optim.stepper import Optimizer, clip_factor, global_norm


class FusedAdam(Optimizer):
    """`AdamStepper` for weights with a gradient of their own, and its rule for those whose bf16 copies have it."""

    def __init__(self, adam: AdamStepper, copies: Bf16Copies) -> None:
        super().__init__(adam.parameters)
        self.adam, self.copies = adam, copies
        self._place: dict[Tensor, int] = {
            parameter: at for at, group in enumerate(adam.inner.param_groups) for parameter in group["params"]
        }

    def zero_grad(self) -> None:
        super().zero_grad()
        self.copies.clear()

    def clip(self, limit: float) -> Tensor:
        """As of every optimizer, except that gradients of copies stay as they are: the kernel scales them."""
        gradients, halves = self.gradients(), self.copies.gradients()
        norm = global_norm(gradients)
        if halves:
            norms = torch._foreach_norm(halves, 2, torch.float32)  # in their own precision a norm would have two digits
            norm = torch.linalg.vector_norm(torch.stack([norm, *norms]))
        if limit:
            self.copies.scale = clip_factor(norm, limit)
            torch._foreach_mul_(gradients, self.copies.scale)
        return norm

    def working_weights(self, micro_batches: int) -> AbstractContextManager[None]:
        if micro_batches > 1:  # whose gradients are added up in float32, which those of copies are not
            return nullcontext()
        self.copies.refresh()
        return self.copies.used()

    def refresh(self) -> None:
        self.copies.refresh()

    def free_working_weights(self) -> None:
        self.copies.drop()

    @torch.no_grad()
    def step(self, factor: float | Tensor, finite: Tensor) -> None:
        able, alone = can_launch(finite), []
        for pair in self.copies.pairs():
            if able and pair.weight.grad is None:
                alone.append(pair)
            else:
                gradient = pair.gradient.float() * self.copies.scale
                pair.weight.grad = gradient if pair.weight.grad is None else pair.weight.grad + gradient
        if alone:
            self._by_kernel(alone, factor, finite)
        self.copies.mark_stale()
        self.adam.step(factor, finite)

    def _by_kernel(self, pairs: list[WeightCopy], factor: float | Tensor, finite: Tensor) -> None:
        from trivium.kernels.adam import Rule, adam  # not above: there is no Triton for a CPU

        healthy = finite.float()
        if not isinstance(factor, Tensor):
            factor = torch.full_like(healthy, factor)
        state, groups = self.adam.inner.state, self.adam.inner.param_groups
        # as many tensors as counts: one alone would be read by the host
        torch._foreach_add_([state[weight]["step"] for weight, _, _ in pairs], [healthy] * len(pairs))
        for weight, twin, gradient in pairs:
            group, kept = groups[self._place[weight]], state[weight]
            decoupled, (beta1, beta2) = group["decoupled_weight_decay"], group["betas"]
            rate = self.adam.peaks[self._place[weight]]
            adam(
                Rule(rate, beta1, beta2, group["eps"], group["weight_decay"], decoupled),
                weight,
                (kept["exp_avg"], kept["exp_avg_sq"]),
                twin,
                gradient,
                count=kept["step"],
                healthy=healthy,
                factor=factor,
                scale=self.copies.scale,
            )

    def compile(self) -> None:
        self.adam.compile()

    def tensors(self) -> dict[str, Tensor]:
        return self.adam.tensors()

    def load(self, tensors: dict[str, Tensor]) -> None:
        self.adam.load(tensors)


def with_bf16_copies(optimizer: Optimizer, model: nn.Module) -> Optimizer:
    """The optimizer with bf16 copies of the weights, which it moves along with them; as it is if it cannot."""
    if not isinstance(optimizer, AdamStepper) or optimizer.sharded:
        return optimizer
    return FusedAdam(optimizer, Bf16Copies(model))
