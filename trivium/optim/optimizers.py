"""AdamW, and Muon for hidden matrices with AdamW for the rest (spec: training §1).

`step` takes a `healthy` flag as a tensor: where it is 0 nothing moves, neither weights nor moments, and the host need
not wait to know. State goes in and out as plain named tensors, so that a checkpoint needs no pickle.
"""

# K matrices of one shape, R rows (outputs), C columns (inputs)

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn

from trivium.config import at_least, fraction
from trivium.errors import CheckpointError, ConfigError
from trivium.optim.groups import Weight, trainable
from trivium.parts.hardware import native_bf16


class Optimizer(Protocol):
    """Moves the weights; `factor` is the schedule's share of each group's peak rate."""

    def step(self, factor: float, healthy: Tensor) -> None: ...
    def tensors(self) -> dict[str, Tensor]: ...
    def load(self, tensors: dict[str, Tensor]) -> None: ...


class Optim(Protocol):
    """The options of an optimizer."""

    @property
    def rate(self) -> float: ...
    def build(self, model: nn.Module) -> Optimizer: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class AdamW:
    """Adam with decoupled weight decay on matrices and embeddings."""

    rate: float = 1e-3
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    decay: float = 0.1

    def __post_init__(self) -> None:
        _check(self.rate, self.decay, self.eps)
        fraction("beta1", self.beta1)
        fraction("beta2", self.beta2)

    def build(self, model: nn.Module) -> Optimizer:
        return AdamWStepper(self, trainable(model))


@dataclass(frozen=True, kw_only=True, slots=True)
class Muon:
    """Momentum made orthogonal for hidden matrices; embeddings, head and vectors follow AdamW at `adam_rate`."""

    rate: float = 0.02
    momentum: float = 0.95
    decay: float = 0.0
    scale: Literal["original", "adamw"] = "original"  # rate x sqrt(max(1, R/C)), or x 0.2 sqrt(max(R, C))
    iterations: int = 5
    adam_rate: float = 3e-3
    head_rate: float = 3e-3
    adam_decay: float = 0.0
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8

    def __post_init__(self) -> None:
        _check(self.rate, self.decay, self.eps)
        _check(self.adam_rate, self.adam_decay, self.eps, "adam_")
        _check(self.head_rate, self.adam_decay, self.eps, "head_")
        for name in ("momentum", "beta1", "beta2"):
            fraction(name, getattr(self, name))
        at_least("iterations", self.iterations, 1)

    def build(self, model: nn.Module) -> Optimizer:
        every = trainable(model)
        adam = AdamW(rate=self.adam_rate, beta1=self.beta1, beta2=self.beta2, eps=self.eps, decay=self.adam_decay)
        matrices = [weight for weight in every if weight.kind == "matrix"]
        rest = [weight for weight in every if weight.kind != "matrix"]
        if not matrices:
            raise ConfigError("optim.kind: muon needs hidden matrices, and this model trains none; try adamw")
        if not rest:
            return MuonStepper(self, matrices)
        rates = {weight.name: self.head_rate for weight in rest if weight.kind == "head"}
        return Both(MuonStepper(self, matrices), AdamWStepper(adam, rest, rates))


OPTIMIZERS: dict[str, type[Optim]] = {"adamw": AdamW, "muon": Muon}


class AdamWStepper:
    """torch's fused AdamW over two groups per rate, decayed and not."""

    def __init__(self, options: AdamW, weights: Sequence[Weight], rates: dict[str, float] | None = None) -> None:
        self.names = {weight.name: weight.parameter for weight in weights}
        rates = rates or {}
        groups: dict[tuple[bool, float], list[nn.Parameter]] = {}
        for weight in weights:
            key = (weight.decayed, rates.get(weight.name, options.rate))
            groups.setdefault(key, []).append(weight.parameter)
        self.peaks = [rate for _, rate in groups]
        self.inner = torch.optim.AdamW(
            [{"params": group, "weight_decay": options.decay if key[0] else 0.0} for key, group in groups.items()],
            lr=options.rate,
            betas=(options.beta1, options.beta2),
            eps=options.eps,
            fused=True,
        )
        for parameter in self.names.values():  # now, not at the first step: a checkpoint of step 0 is whole
            self.inner.state[parameter] = {
                "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
                "exp_avg": torch.zeros_like(parameter),
                "exp_avg_sq": torch.zeros_like(parameter),
            }

    def step(self, factor: float, healthy: Tensor) -> None:
        for group, peak in zip(self.inner.param_groups, self.peaks, strict=True):
            group["lr"] = peak * factor
        # the fused kernel's own switch, meant for loss scaling: with 1 here it leaves everything as it is
        self.inner.found_inf = 1.0 - healthy.float()  # type: ignore[attr-defined]
        self.inner.step()

    def tensors(self) -> dict[str, Tensor]:
        state: Mapping[Tensor, dict[str, Any]] = self.inner.state
        return {
            f"{name}.{key}": tensor
            for name, parameter in self.names.items()
            for key, tensor in state[parameter].items()
        }

    def load(self, tensors: dict[str, Tensor]) -> None:
        for name, parameter in self.names.items():
            _expect(tensors, name, ("step", "exp_avg", "exp_avg_sq"))
            # copies: what a file gives may be a view of its mapped pages
            self.inner.state[parameter] = {
                key: tensors[f"{name}.{key}"].to(parameter.device, copy=True)
                for key in ("step", "exp_avg", "exp_avg_sq")
            }


class MuonStepper:
    """Nesterov momentum whose direction is orthogonalised, all matrices of one shape at a time."""

    def __init__(self, options: Muon, weights: Sequence[Weight]) -> None:
        self.options = options
        self.names = {weight.name: weight.parameter for weight in weights}
        self.momenta = {name: torch.zeros_like(parameter) for name, parameter in self.names.items()}
        shapes = dict.fromkeys(parameter.shape for parameter in self.names.values())
        self.groups = [[name for name, p in self.names.items() if p.shape == shape] for shape in shapes]

    @torch.no_grad()
    def step(self, factor: float, healthy: Tensor) -> None:
        rate, mu = self.options.rate * factor, self.options.momentum
        for group in self.groups:
            grad_KRC = torch.stack([_gradient(self.names[name]) for name in group])
            held_KRC = torch.stack([self.momenta[name] for name in group])
            moved_KRC = held_KRC.lerp(grad_KRC, 1 - mu)
            update_KRC = orthogonal(grad_KRC.lerp(moved_KRC, mu), self.options.iterations)
            _, rows, columns = update_KRC.shape
            size = rate * _scale(self.options.scale, rows, columns)
            for index, name in enumerate(group):
                parameter = self.names[name]
                moved = parameter * (1 - rate * self.options.decay) - size * update_KRC[index]
                parameter.copy_(torch.where(healthy, moved, parameter))
                self.momenta[name].copy_(torch.where(healthy, moved_KRC[index], held_KRC[index]))

    def tensors(self) -> dict[str, Tensor]:
        return {f"{name}.momentum": tensor for name, tensor in self.momenta.items()}

    def load(self, tensors: dict[str, Tensor]) -> None:
        for name, momentum in self.momenta.items():
            _expect(tensors, name, ("momentum",))
            momentum.copy_(tensors[f"{name}.momentum"])


class Both:
    """Two optimizers over disjoint weights, as one."""

    def __init__(self, first: Optimizer, second: Optimizer) -> None:
        self.pair = (first, second)

    def step(self, factor: float, healthy: Tensor) -> None:
        for optimizer in self.pair:
            optimizer.step(factor, healthy)

    def tensors(self) -> dict[str, Tensor]:
        return {name: tensor for optimizer in self.pair for name, tensor in optimizer.tensors().items()}

    def load(self, tensors: dict[str, Tensor]) -> None:
        for optimizer in self.pair:
            optimizer.load(tensors)


def orthogonal(matrix_KRC: Tensor, iterations: int) -> Tensor:
    """Five Newton-Schulz steps towards the nearest orthogonal matrix: singular values land in about [0.7, 1.2]."""
    rows, columns = matrix_KRC.shape[-2:]
    # bfloat16 pays where it has instructions; on a CPU without them it is 30 times slower than float32
    half = matrix_KRC.dtype == torch.float32 and native_bf16(matrix_KRC.device)
    x = matrix_KRC.to(torch.bfloat16) if half else matrix_KRC
    x = x.mT if rows > columns else x
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(iterations):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=-4.7750, alpha=2.0315), x, beta=3.4445)
    x = x.mT if rows > columns else x
    return x.to(matrix_KRC.dtype)


def _scale(kind: Literal["original", "adamw"], rows: int, columns: int) -> float:
    if kind == "original":
        return float(max(1.0, rows / columns) ** 0.5)
    return 0.2 * float(max(rows, columns) ** 0.5)


def _gradient(parameter: nn.Parameter) -> Tensor:
    return parameter.grad if parameter.grad is not None else torch.zeros_like(parameter)


def _expect(tensors: dict[str, Tensor], name: str, keys: Sequence[str]) -> None:
    missing = [key for key in keys if f"{name}.{key}" not in tensors]
    if missing:
        raise CheckpointError(
            f"the checkpoint has no optimizer state {missing[0]} for {name}: another optimizer wrote it"
        )


def _check(rate: float, decay: float, eps: float, prefix: str = "") -> None:
    at_least("eps", eps, 0)
    if not rate > 0:
        raise ConfigError(f"{prefix}rate: {rate} is not positive; try 1e-3")
    at_least(f"{prefix}decay", decay, 0)
