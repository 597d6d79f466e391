"""Adafactor: second moments of a matrix kept as means of its rows and columns (spec: training §1)."""

# R rows, C columns; `…` any dimensions before them, such as experts, each factored by itself

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from trivium.optim.groups import Weight
from trivium.optim.options import Adafactor
from trivium.optim.stepper import Optimizer, State
from trivium.parts.sharded import fill, is_sharded, whole


class AdafactorStepper(Optimizer):
    """One tensor after another: what a step needs besides the weights is small.

    Every process gathers a sharded weight and its gradient, since means and sizes are those of whole matrices; the
    second moments are whole in each.
    """

    def __init__(self, options: Adafactor, weights: Sequence[Weight]) -> None:
        super().__init__([weight.parameter for weight in weights])
        self.options = options
        self.names = {weight.name: weight.parameter for weight in weights}
        self.state = State({name: self._fresh(parameter) for name, parameter in self.names.items()})

    def _fresh(self, parameter: nn.Parameter) -> dict[str, Tensor]:
        def zeros(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=parameter.dtype, device=parameter.device)

        shape, step = parameter.shape, torch.zeros((), device=parameter.device)
        if len(shape) >= 2 and min(shape[-2:]) >= self.options.factor_from:
            return {"step": step, "row": zeros(*shape[:-1]), "column": zeros(*shape[:-2], shape[-1])}
        return {"step": step, "square": zeros(*shape)}

    @torch.no_grad()
    def step(self, factor: float | Tensor, finite: Tensor) -> None:
        nothing = torch.zeros((), device=finite.device)
        for name, parameter in self.names.items():
            if parameter.grad is None:
                continue
            # zeros instead of what may not be finite: then a share of 0 leaves the means as they are
            grad, weight = torch.where(finite, whole(parameter.grad), nothing), whole(parameter.detach())
            kept = self.state.of[name]
            kept["step"] += finite
            share = (finite * kept["step"].clamp(min=1) ** -0.8).to(grad.dtype)
            update = grad * _inverse_root(kept, grad.square().add_(self.options.eps), share)
            update /= (_rms(update) / self.options.clip).clamp(min=1)
            if self.options.scale == "weight":
                update *= _rms(weight).clamp(min=self.options.least)
            weight.sub_(torch.where(finite, update * (self.options.rate * factor), nothing))
            if is_sharded(parameter):
                fill(parameter, weight)

    def tensors(self) -> dict[str, Tensor]:
        return self.state.tensors()

    def load(self, tensors: dict[str, Tensor]) -> None:
        self.state.load(tensors)


def _inverse_root(kept: dict[str, Tensor], square: Tensor, share: Tensor) -> Tensor:
    """One over the root of the second moments, after `share` of the new squared gradient went into them."""
    if "square" in kept:
        return kept["square"].lerp_(square, share).rsqrt()
    row_R, column_C = kept["row"], kept["column"]
    row_R.lerp_(square.mean(dim=-1), share)
    column_C.lerp_(square.mean(dim=-2), share)
    # roots first: the product of two means of tiny gradients would be 0 in float32
    scaled_R = (row_R / row_R.mean(dim=-1, keepdim=True)).rsqrt()
    return scaled_R[..., None] * column_C[..., None, :].rsqrt()


def _rms(tensor: Tensor) -> Tensor:
    return tensor.square().mean().sqrt()
