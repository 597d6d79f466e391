"""Gradients between the backward pass and the update: cleared, measured, clipped."""

from __future__ import annotations

import pytest
import torch

from tests.optim.steps import gradients, small, some
from trivium.optim.options import OPTIMIZERS, Sgd


def test_clipping_scales_to_the_limit_and_reports_the_norm_before() -> None:
    model = some((2,), (1,))
    optimizer = Sgd().build(model)
    one, two = model.parameters()
    one.grad, two.grad = torch.tensor([3.0, 0.0]), torch.tensor([4.0])
    assert float(optimizer.clip(1.0)) == 5.0
    assert one.grad.tolist() == pytest.approx([0.6, 0.0], abs=1e-6)
    assert two.grad.tolist() == pytest.approx([0.8], abs=1e-6)
    assert float(optimizer.clip(0.0)) == pytest.approx(1.0)


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_every_optimizer_clips_as_torch_does_and_clears_all(kind: str) -> None:
    """To the last bit: the norm of several tensors depends on their order, which is the model's."""
    ours, theirs = small(), small()
    optimizer = OPTIMIZERS[kind]().build(ours)
    for model in (ours, theirs):
        gradients(model, 3)
    expected = torch.nn.utils.clip_grad_norm_(theirs.parameters(), 0.5)
    assert torch.equal(optimizer.clip(0.5), expected)
    for one, two in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert one.grad is not None
        assert two.grad is not None
        assert torch.equal(one.grad, two.grad)
    optimizer.zero_grad()
    assert all(parameter.grad is None for parameter in ours.parameters())


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_no_optimizer_but_one_with_copies_has_other_weights_to_work_with(kind: str) -> None:
    model = small()
    optimizer = OPTIMIZERS[kind]().build(model)
    before = {name: id(parameter) for name, parameter in model.named_parameters()}
    with optimizer.working_weights(1):
        assert {name: id(parameter) for name, parameter in model.named_parameters()} == before
    optimizer.refresh()
    optimizer.free_working_weights()
