"""Adam and AdamW (spec: training §1)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from trivium.optim.groups import Weight
from trivium.optim.options import Adam, AdamW
from trivium.optim.stepper import Optimizer, State
from trivium.parts.sharded import is_sharded

# 1 - beta^COUNT is 1 to the last bit, and in float32 COUNT + 1 is COUNT again.
COUNT = 2.0**30


class AdamStepper(Optimizer):
    """torch's fused kernel over two groups per rate, decayed and not; sharded weights are groups of their own."""

    def __init__(self, options: AdamW | Adam, weights: Sequence[Weight], rates: dict[str, float] | None = None) -> None:
        super().__init__([weight.parameter for weight in weights])
        rates = rates or {}
        groups: dict[tuple[bool, float, bool], list[nn.Parameter]] = {}
        for weight in weights:
            decayed = weight.decayed and (options.decay_embeddings or weight.kind != "embedding")
            key = decayed, rates.get(weight.name, options.rate), is_sharded(weight.parameter)
            groups.setdefault(key, []).append(weight.parameter)
        self.peaks = [rate for _, rate, _ in groups]
        self.inner = torch.optim.Adam(
            [{"params": group, "weight_decay": options.decay if key[0] else 0.0} for key, group in groups.items()],
            lr=options.rate,
            betas=(options.beta1, options.beta2),
            eps=options.eps,
            decoupled_weight_decay=isinstance(options, AdamW),
            fused=True,
            capturable=weights[0].parameter.is_cuda,  # all of a step can be one CUDA graph
        )
        self.correction = options.correction
        self.state = State({weight.name: _moments(weight.parameter) for weight in weights})
        for weight in weights:  # now, not at the first step: a checkpoint of step 0 is whole
            self.inner.state[weight.parameter] = self.state.of[weight.name]
        self._settle()

    def step(self, factor: float | Tensor, finite: Tensor) -> None:
        for group, peak in zip(self.inner.param_groups, self.peaks, strict=True):
            group["lr"] = peak * factor
        # the fused kernel's own switch, meant for loss scaling: with 1 here it leaves everything as it is
        self.inner.found_inf = 1.0 - finite.float()  # type: ignore[attr-defined]
        self.inner.step()

    def tensors(self) -> dict[str, Tensor]:
        return self.state.tensors()

    def load(self, tensors: dict[str, Tensor]) -> None:
        self.state.load(tensors)
        self._settle()

    def _settle(self) -> None:
        """Without correction, a count of steps at which there is nothing left to correct: the kernel always does."""
        if not self.correction:
            for kept in self.state.of.values():
                kept["step"].fill_(COUNT)


def _moments(parameter: nn.Parameter) -> dict[str, Tensor]:
    return {
        "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
        "exp_avg": torch.zeros_like(parameter),
        "exp_avg_sq": torch.zeros_like(parameter),
    }
