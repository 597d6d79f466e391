"""Muon for hidden matrices, with AdamW for the rest (spec: training §1)."""

# K matrices of one shape, R rows (outputs), C columns (inputs)

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor, nn

from trivium.errors import ConfigError
from trivium.kernels.hardware import native_bf16
from trivium.optim.adam import AdamStepper
from trivium.optim.groups import Weight, trainable
from trivium.optim.options import AdamW, Muon
from trivium.optim.stepper import Both, Optimizer, State
from trivium.parts.sharded import fill, whole


def build_muon(options: Muon, model: nn.Module) -> Optimizer:
    """Muon for the hidden matrices of a model, AdamW for the rest."""
    every = trainable(model)
    adam = AdamW(
        rate=options.adam_rate, beta1=options.beta1, beta2=options.beta2, eps=options.eps, decay=options.adam_decay
    )
    matrices = [weight for weight in every if weight.kind == "matrix"]
    rest = [weight for weight in every if weight.kind != "matrix"]
    if not matrices:
        raise ConfigError("optim.kind: muon needs hidden matrices, and this model trains none; try adamw")
    if not rest:
        return MuonStepper(options, matrices)
    rates = {weight.name: options.head_rate for weight in rest if weight.kind == "head"}
    parameters = [weight.parameter for weight in every]
    return Both(parameters, MuonStepper(options, matrices), AdamStepper(adam, rest, rates))


class MuonStepper(Optimizer):
    """Nesterov momentum whose direction is orthogonalised, all matrices of one shape at a time."""

    def __init__(self, options: Muon, weights: Sequence[Weight]) -> None:
        super().__init__([weight.parameter for weight in weights])
        self.options = options
        self.names = {weight.name: weight.parameter for weight in weights}
        self.momenta = {name: torch.zeros_like(p) for name, p in self.names.items()}
        self.state = State({name: {"momentum": momentum} for name, momentum in self.momenta.items()})
        shapes = dict.fromkeys(parameter.shape for parameter in self.names.values())
        self.groups = [[name for name, p in self.names.items() if p.shape == shape] for shape in shapes]
        self.compiled, self._move = False, _move

    @torch.no_grad()
    def step(self, factor: float | Tensor, finite: Tensor) -> None:
        rate = self.options.rate * factor
        if self.compiled and not isinstance(rate, Tensor):  # a number would be a constant of the program
            rate = torch.full((), rate, device=finite.device)
        for group in self.groups:
            parameters: list[Tensor] = [self.names[name] for name in group]
            momenta = [self.momenta[name] for name in group]
            grads = [_gradient(parameter) for parameter in parameters]
            if self.sharded:
                self._move_gathered(parameters, momenta, grads, rate, finite)
            else:
                self._move(self.options, parameters, momenta, grads, rate, finite, products(grads[0]))

    def _move_gathered(
        self,
        parameters: list[Tensor],
        momenta: list[Tensor],
        grads: list[Tensor],
        rate: float | Tensor,
        finite: Tensor,
    ) -> None:
        """One step of sharded matrices: all processes gather those of a shape, move them alike, and keep their shards.

        Orthogonal is a property of whole matrices.
        """
        moved, held, given = ([whole(one) for one in each] for each in (parameters, momenta, grads))
        self._move(self.options, moved, held, given, rate, finite, products(given[0]))
        for own, new in zip((*parameters, *momenta), (*moved, *held), strict=True):
            if own is not new:
                fill(own, new)

    def compile(self) -> None:
        # One program for each shape: all that is not a matrix product in a few passes over memory. Without fullgraph:
        # shapes beyond the compiler's limit of programs (8) are moved by the plain one, and nothing fails.
        self.compiled, self._move = True, torch.compile(_move, dynamic=False)

    def tensors(self) -> dict[str, Tensor]:
        return self.state.tensors()

    def load(self, tensors: dict[str, Tensor]) -> None:
        self.state.load(tensors)


def _move(
    options: Muon,
    parameters: list[Tensor],
    momenta: list[Tensor],
    grads: list[Tensor],
    rate: float | Tensor,
    finite: Tensor,
    dtype: torch.dtype,
) -> None:
    """One step of all matrices of a shape, as a stack: a dozen kernels for all of them, not for each."""
    # a stack of matrices, such as those of experts, is as many matrices
    grad_KRC, weight_KRC, held_KRC = (torch.stack(one).flatten(0, -3) for one in (grads, parameters, momenta))
    shape = (len(parameters), *parameters[0].shape)
    moved_KRC = held_KRC.lerp(grad_KRC, 1 - options.momentum)
    update_KRC = orthogonal(grad_KRC.lerp(moved_KRC, options.momentum), options.iterations, dtype)
    _, rows, columns = update_KRC.shape
    size = rate * _scale(options.scale, rows, columns)
    next_KRC = weight_KRC * (1 - rate * options.decay) - size * update_KRC
    torch._foreach_copy_(parameters, torch.where(finite, next_KRC, weight_KRC).view(shape).unbind())
    torch._foreach_copy_(momenta, torch.where(finite, moved_KRC, held_KRC).view(shape).unbind())


def products(matrix: Tensor) -> torch.dtype:
    """What Newton-Schulz multiplies in: bfloat16 pays where it has instructions, without them it is 30 times slower."""
    return torch.bfloat16 if matrix.dtype == torch.float32 and native_bf16(matrix.device) else matrix.dtype


def orthogonal(matrix_KRC: Tensor, iterations: int, dtype: torch.dtype) -> Tensor:
    """Five Newton-Schulz steps towards the nearest orthogonal matrix: singular values land in about [0.7, 1.2]."""
    rows, columns = matrix_KRC.shape[-2:]
    x = matrix_KRC.to(dtype)
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


def _gradient(parameter: Tensor) -> Tensor:
    return parameter.grad if parameter.grad is not None else torch.zeros_like(parameter)
