"""Adam and AdamW (spec: training §1)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from trivium.config import at_least, fraction
from trivium.optim.groups import Weight, trainable
from trivium.optim.stepper import Optimizer, State, check


@dataclass(frozen=True, kw_only=True, slots=True)
class AdamW:
    """Adam with decoupled weight decay on matrices and embeddings."""

    rate: float = 1e-3
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    decay: float = 0.1
    decay_embeddings: bool = True
    correction: bool = True  # of the moments, which start at zero; BERT's has none

    def __post_init__(self) -> None:
        _check(self)

    @property
    def states(self) -> float:
        return 2.0

    def build(self, model: nn.Module) -> Optimizer:
        return AdamStepper(self, trainable(model))


@dataclass(frozen=True, kw_only=True, slots=True)
class Adam:
    """AdamW except that decay, if any, is added to the gradient (L2), and so shrinks with the second moment."""

    rate: float = 1e-3
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    decay: float = 0.0
    decay_embeddings: bool = True
    correction: bool = True

    def __post_init__(self) -> None:
        _check(self)

    @property
    def states(self) -> float:
        return 2.0

    def build(self, model: nn.Module) -> Optimizer:
        return AdamStepper(self, trainable(model))


# 1 - beta^COUNT is 1 to the last bit, and in float32 COUNT + 1 is COUNT again.
COUNT = 2.0**30


class AdamStepper:
    """torch's fused kernel over two groups per rate, decayed and not."""

    def __init__(self, options: AdamW | Adam, weights: Sequence[Weight], rates: dict[str, float] | None = None) -> None:
        rates = rates or {}
        groups: dict[tuple[bool, float], list[nn.Parameter]] = {}
        for weight in weights:
            decayed = weight.decayed and (options.decay_embeddings or weight.kind != "embedding")
            groups.setdefault((decayed, rates.get(weight.name, options.rate)), []).append(weight.parameter)
        self.peaks = [rate for _, rate in groups]
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

    def step(self, factor: float | Tensor, healthy: Tensor) -> None:
        for group, peak in zip(self.inner.param_groups, self.peaks, strict=True):
            group["lr"] = peak * factor
        # the fused kernel's own switch, meant for loss scaling: with 1 here it leaves everything as it is
        self.inner.found_inf = 1.0 - healthy.float()  # type: ignore[attr-defined]
        self.inner.step()

    def compile(self) -> None:
        """Nothing: it is one kernel already."""

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


def _check(options: AdamW | Adam) -> None:
    check(options.rate, options.decay)
    at_least("eps", options.eps, 0)
    fraction("beta1", options.beta1)
    fraction("beta2", options.beta2)
