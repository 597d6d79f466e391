"""Adam and AdamW against worked tables, torch's own loop, and BERT's formula."""

from __future__ import annotations

import pytest
import torch

from tests.optim.steps import YES, gradients, single, small, some, together, walk
from trivium.optim.options import Adam, AdamW


def test_adam_walks_the_worked_tables() -> None:
    worked = [0.900000, 0.873289, 0.839011]
    assert walk(Adam(rate=0.1, beta2=0.98, eps=1e-9)) == pytest.approx(worked, abs=1e-6)
    assert walk(AdamW(rate=0.1, beta2=0.98, eps=1e-9, decay=0)) == pytest.approx(worked, abs=1e-6)


def test_decay_is_decoupled_in_adamw_and_added_to_the_gradient_in_adam() -> None:
    decoupled = walk(AdamW(rate=0.1, beta2=0.999, decay=0.01))
    coupled = walk(Adam(rate=0.1, beta2=0.999, decay=0.01))
    assert decoupled == pytest.approx([0.899000, 0.871467, 0.836553], abs=1e-6)
    assert coupled == pytest.approx([0.900000, 0.872291, 0.837066], abs=1e-6)


@pytest.mark.parametrize("kind", [AdamW, Adam])
def test_adam_is_torchs_own_over_random_steps(kind: type[AdamW] | type[Adam]) -> None:
    ours, theirs = small(), small()
    decayed = [parameter for parameter in theirs.parameters() if parameter.ndim >= 2]
    vectors = [parameter for parameter in theirs.parameters() if parameter.ndim < 2]
    reference = (torch.optim.AdamW if kind is AdamW else torch.optim.Adam)(
        [{"params": decayed, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}],
        lr=0.01,
        betas=(0.9, 0.95),
        fused=False,
        foreach=False,
    )
    together(ours, kind(rate=0.01, beta2=0.95, decay=0.1).build(ours), theirs, reference, steps=40)


def test_without_correction_the_first_step_is_larger_by_the_ratio_of_the_moments() -> None:
    """m = 0.1 g and v = 0.001 g^2 give a step of 0.1 / sqrt(0.001) rates, whatever the gradient."""
    for gradient in (1e-2, 3.0):
        model, weight = single(torch.ones(1, 1))
        optimizer = AdamW(rate=0.01, beta2=0.999, decay=0, correction=False).build(model)
        weight.grad = torch.full((1, 1), gradient)
        optimizer.step(1.0, YES)
        assert 1 - weight.item() == pytest.approx(0.01 * 0.1 / 0.001**0.5, rel=1e-4)


@pytest.mark.parametrize("resumed", [False, True])
def test_adamw_without_correction_is_berts(resumed: bool) -> None:
    """AdamWeightDecayOptimizer of BERT's own code, in float64, through a resume too."""
    options = AdamW(rate=0.01, beta1=0.9, beta2=0.999, eps=1e-6, decay=0.01, correction=False)
    ours = some((3, 4), (5,))
    weights = [parameter.detach().double() for parameter in ours.parameters()]
    first, second = ([torch.zeros_like(weight) for weight in weights] for _ in range(2))
    optimizer = options.build(ours)
    for step in range(40):
        gradients(ours, step)
        if resumed:
            before, optimizer = optimizer, options.build(ours)
            optimizer.load(before.tensors())
        optimizer.step(1.0, YES)
        for index, parameter in enumerate(ours.parameters()):
            assert parameter.grad is not None
            gradient = parameter.grad.double()
            first[index] = 0.9 * first[index] + 0.1 * gradient
            second[index] = 0.999 * second[index] + 0.001 * gradient**2
            update = first[index] / (second[index].sqrt() + 1e-6)
            if parameter.ndim >= 2:
                update = update + 0.01 * weights[index]
            weights[index] = weights[index] - 0.01 * update
            torch.testing.assert_close(parameter.detach().double(), weights[index], atol=2e-6, rtol=1e-5)


def test_the_configured_correction_wins_over_the_one_in_a_checkpoint() -> None:
    corrected, plain = AdamW(rate=0.01), AdamW(rate=0.01, correction=False)
    paths = []
    for options in (corrected, plain):
        model = some((2, 3))
        optimizer = options.build(model)
        optimizer.load(corrected.build(some((2, 3))).tensors())
        gradients(model, 0)
        optimizer.step(1.0, YES)
        paths.append(next(model.parameters()))
    assert not torch.allclose(paths[0], paths[1], atol=1e-3)
