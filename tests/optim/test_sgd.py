"""Gradient descent against closed forms and torch's own loop."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.optim.steps import YES, gradients, small, some, together, walk
from trivium.optim.options import Sgd


def test_plain_descent_subtracts_the_rate_times_the_gradient() -> None:
    assert walk(Sgd(rate=0.1)) == pytest.approx([0.9, 0.95, 0.925], abs=1e-6)


@pytest.mark.parametrize("momentum", [0.0, 0.5, 0.9])
@pytest.mark.parametrize("nesterov", [False, True])
def test_descent_is_torchs_own_over_random_steps(momentum: float, nesterov: bool) -> None:
    if nesterov and not momentum:
        return
    ours, theirs = small(), small()
    optimizer = Sgd(rate=0.05, momentum=momentum, form="nesterov" if nesterov else "plain").build(ours)
    reference = torch.optim.SGD(theirs.parameters(), lr=0.05, momentum=momentum, nesterov=nesterov, foreach=False)
    together(ours, optimizer, theirs, reference, steps=40)


def test_without_momentum_decoupled_decay_is_torchs_decay() -> None:
    ours, theirs = some((3, 4), (4, 2)), some((3, 4), (4, 2))
    reference = torch.optim.SGD(theirs.parameters(), lr=0.05, weight_decay=0.1, foreach=False)
    together(ours, Sgd(rate=0.05, decay=0.1).build(ours), theirs, reference, steps=20)


def test_decay_never_enters_the_momentum() -> None:
    ours = some((3, 4), (5,))
    optimizer = Sgd(rate=0.05, momentum=0.9, decay=0.1).build(ours)
    matrix, vector = (parameter.detach().double() for parameter in ours.parameters())
    sums = [torch.zeros(3, 4).double(), torch.zeros(5).double()]
    for step in range(20):
        gradients(ours, step)
        optimizer.step(1.0, YES)
        sums = [0.9 * held + _gradient(weight) for held, weight in zip(sums, ours.parameters(), strict=True)]
        matrix = matrix * (1 - 0.05 * 0.1) - 0.05 * sums[0]
        vector = vector - 0.05 * sums[1]
        for mine, other in zip(ours.parameters(), (matrix, vector), strict=True):
            torch.testing.assert_close(mine.detach().double(), other, atol=2e-6, rtol=1e-5)


def test_without_momentum_there_is_no_state() -> None:
    assert Sgd().build(small()).tensors() == {}


def _gradient(parameter: nn.Parameter) -> torch.Tensor:
    assert parameter.grad is not None
    return parameter.grad.double()
