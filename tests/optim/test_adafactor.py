"""Adafactor against the worked step, torch's own and that of transformers."""

from __future__ import annotations

from itertools import pairwise

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from transformers.optimization import Adafactor as Theirs

from tests.optim.steps import YES, gradients, single, some, together
from trivium.optim.options import Adafactor

SHAPES = ((5, 7), (7, 5), (9,), (1, 6), (3, 4, 6), (2, 1, 3, 4), ())


def reference(model: nn.Module, **options: object) -> torch.optim.Optimizer:
    made = Theirs(model.parameters(), lr=0.01, relative_step=False, **options)
    assert isinstance(made, torch.optim.Optimizer)
    return made


def test_the_worked_step() -> None:
    model, weight = single(torch.ones(3, 2))
    weight.grad = torch.tensor([[1.0, 2], [3, 4], [5, 6]])
    Adafactor(rate=0.01).build(model).step(1.0, YES)
    worked = torch.tensor([[0.992789, 0.988598], [0.990325, 0.989802], [0.989677, 0.990207]])
    torch.testing.assert_close(weight.detach(), worked, atol=1e-6, rtol=0)


def test_it_is_that_of_transformers_for_every_number_of_dimensions() -> None:
    ours, theirs = some(*SHAPES), some(*SHAPES)
    together(ours, Adafactor().build(ours), theirs, reference(theirs, scale_parameter=True), steps=40)


def test_without_scaling_it_is_that_of_transformers() -> None:
    ours, theirs = some(*SHAPES), some(*SHAPES)
    together(ours, Adafactor(scale="none").build(ours), theirs, reference(theirs, scale_parameter=False), steps=40)


def test_clip_least_and_eps_are_those_of_transformers() -> None:
    ours, theirs = some(*SHAPES), some(*SHAPES)
    for model in (ours, theirs):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1e-3)  # below `least`, so that it counts
    optimizer = Adafactor(clip=0.3, least=0.1, eps=0.5).build(ours)
    other = reference(theirs, scale_parameter=True, clip_threshold=0.3, eps=(0.5, 0.1))
    together(ours, optimizer, theirs, other, steps=40)


def test_it_is_torchs_own() -> None:
    shapes = ((5, 7), (7, 5), (9,), (3, 4, 6))
    ours, theirs = some(*shapes), some(*shapes)
    together(ours, Adafactor().build(ours), theirs, torch.optim.Adafactor(theirs.parameters(), lr=0.01), steps=40)


def test_a_matrix_too_small_to_factor_is_treated_as_a_long_vector() -> None:
    ours, theirs = some((5, 7)), some((35,))
    optimizer = Adafactor(factor_from=6).build(ours)
    other = reference(theirs, scale_parameter=True)
    for step in range(20):
        for model in (ours, theirs):
            gradients(model, step)
        optimizer.step(1.0, YES)
        other.step()
        mine, flat = next(ours.parameters()), next(theirs.parameters())
        torch.testing.assert_close(mine.flatten(), flat, atol=2e-6, rtol=1e-5)


def test_a_matrix_keeps_one_number_per_row_and_column() -> None:
    def kept(factor_from: int) -> list[int]:
        tensors = Adafactor(factor_from=factor_from).build(some((5, 7), (9,), (3, 4, 6))).tensors()
        sizes = {name: tensor.numel() for name, tensor in tensors.items() if not name.endswith(".step")}
        return [sum(size for name, size in sizes.items() if name.startswith(f"{index}.")) for index in range(3)]

    assert kept(1) == [5 + 7, 9, 3 * (4 + 6)]
    assert kept(5) == [5 + 7, 9, 3 * 4 * 6]
    assert kept(128) == [5 * 7, 9, 3 * 4 * 6]


def test_each_expert_is_factored_by_itself() -> None:
    experts, alone = some((3, 4, 6)), nn.ParameterList()
    for matrix in next(experts.parameters()).detach():
        alone.append(nn.Parameter(matrix.clone()))
    options = Adafactor(scale="none", clip=1e9)  # these two look at the tensor as a whole
    whole, apart = options.build(experts), options.build(alone)
    for step in range(10):
        gradients(experts, step)
        gradient = next(experts.parameters()).grad
        assert gradient is not None
        for matrix, part in zip(alone, gradient * torch.tensor([1.0, 10, 100])[:, None, None], strict=True):
            matrix.grad = part
        next(experts.parameters()).grad = torch.stack([matrix.grad for matrix in alone if matrix.grad is not None])
        whole.step(1.0, YES)
        apart.step(1.0, YES)
    torch.testing.assert_close(next(experts.parameters()), torch.stack([*alone]), atol=1e-6, rtol=1e-6)


@settings(max_examples=30, deadline=None)
@given(exponent=st.integers(-13, 13))
def test_the_size_of_the_gradients_does_not_matter(exponent: int) -> None:
    """Down to where a product of two means would be 0 in float32."""
    results = []
    for scale in (1.0, 10.0**exponent):
        model = some((5, 7), (9,))
        optimizer = Adafactor().build(model)
        for step in range(3):
            gradients(model, step)
            for parameter in model.parameters():
                assert parameter.grad is not None
                parameter.grad *= scale
            optimizer.step(1.0, YES)
        results.append([parameter.detach() for parameter in model.parameters()])
    for plain, scaled in zip(*results, strict=True):
        torch.testing.assert_close(plain, scaled, atol=1e-5, rtol=1e-4)


def test_weights_of_zero_can_move() -> None:
    model = some((4, 4))
    with torch.no_grad():
        next(model.parameters()).zero_()
    optimizer, sizes = Adafactor().build(model), [0.0]
    for step in range(3):
        gradients(model, 0)
        optimizer.step(1.0, YES)
        sizes.append(next(model.parameters()).norm().item())
        assert sizes[-1] <= (step + 1) * 0.01 * 1e-3 * 4 * (1 + 1e-5)  # the clip bounds each update
    assert all(later > earlier for earlier, later in pairwise(sizes))
