"""Small models, planted gradients and snapshots for the tests of optimizers and averages."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from trivium.models.config import ModelConfig, Stack
from trivium.models.options import Block
from trivium.models.transformer import Transformer, build
from trivium.optim.options import Optim
from trivium.optim.stepper import Optimizer
from trivium.parts.linear import Linear
from trivium.parts.options.attention import MultiHeadOptions
from trivium.parts.options.embeddings import TokenEmbeddingOptions

YES, NO = torch.tensor(True), torch.tensor(False)


def single(value: Tensor) -> tuple[nn.Module, nn.Parameter]:
    """A model that is one matrix."""
    layer = Linear(value.shape[1], value.shape[0], bias=False, role="up")
    with torch.no_grad():
        layer.weight.copy_(value)
    (weight,) = layer.parameters()
    return layer, weight


def some(*shapes: tuple[int, ...], seed: int = 0) -> nn.ParameterList:
    """A model that is a list of weights of these shapes."""
    generator = torch.Generator().manual_seed(seed)
    return nn.ParameterList([nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes])


def small(seed: int = 0) -> Transformer:
    block = Block(attention=MultiHeadOptions(heads=2, bias="all"))
    config = ModelConfig(
        width=8, context=8, vocab=11, embedding=TokenEmbeddingOptions(tie="none"), decoder=Stack(layers=2, block=block)
    )
    return build(config, seed=seed)


def gradients(model: nn.Module, seed: int, fill: float | None = None) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator)
        if fill is not None:
            parameter.grad.fill_(fill)


def snapshot(model: nn.Module, optimizer: Optimizer) -> dict[str, Tensor]:
    tensors = {**dict(model.named_parameters()), **optimizer.tensors()}
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}


def same(first: dict[str, Tensor], second: dict[str, Tensor]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def walk(optim: Optim) -> list[float]:
    """A weight of 1 after each of the three gradients of the worked tables."""
    model, weight = single(torch.ones(1, 1))
    optimizer, path = optim.build(model), []
    for gradient in (1.0, -0.5, 0.25):
        weight.grad = torch.full((1, 1), gradient)
        optimizer.step(1.0, YES)
        path.append(weight.item())
    return path


def together(
    ours: nn.Module, optimizer: Optimizer, theirs: nn.Module, reference: torch.optim.Optimizer, steps: int
) -> None:
    """Walk two equal models by two optimizers along the same gradients and falling rates, and compare each step."""
    peaks = [group["lr"] for group in reference.param_groups]
    for step in range(steps):
        factor = 1 / (step + 1) ** 0.5
        for group, peak in zip(reference.param_groups, peaks, strict=True):
            group["lr"] = peak * factor
        for model in (ours, theirs):
            gradients(model, step)
        optimizer.step(factor, YES)
        reference.step()
        for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
            torch.testing.assert_close(mine, other, atol=2e-6, rtol=1e-5)
