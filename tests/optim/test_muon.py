"""Muon against singular values, the worked step and torch's own."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend

from tests.optim.steps import NO, YES, gradients, single, small
from trivium.errors import ConfigError
from trivium.optim.groups import trainable
from trivium.optim.muon import orthogonal, products
from trivium.optim.options import Muon
from trivium.optim.stepper import Optimizer
from trivium.parts.options.embeddings import TokenEmbeddingOptions


@pytest.mark.parametrize("shape", [(256, 64), (64, 256)])
def test_the_singular_values_of_a_muon_update_lie_near_one(
    shape: tuple[int, int], count: Callable[[int, int], int]
) -> None:
    for seed in range(count(5, 200)):
        matrix = torch.randn(1, *shape, generator=torch.Generator().manual_seed(seed))
        values = torch.linalg.svdvals(orthogonal(matrix, 5, products(matrix))[0])
        assert 0.67 <= values.min().item() <= values.max().item() <= 1.15


def test_a_square_muon_update_is_bounded(count: Callable[[int, int], int]) -> None:
    for seed in range(count(5, 200)):
        matrix = torch.randn(1, 128, 128, generator=torch.Generator().manual_seed(seed))
        assert torch.linalg.svdvals(orthogonal(matrix, 5, products(matrix))[0]).max().item() <= 1.21


@pytest.mark.parametrize("shape", [(5, 8), (8, 5), (6, 6)])
def test_orthogonalising_acts_on_the_singular_values_alone(shape: tuple[int, int]) -> None:
    matrices = torch.randn(3, *shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    results = orthogonal(matrices, 5, products(matrices))
    for matrix, result in zip(matrices, results, strict=True):
        left, values, right = torch.linalg.svd(matrix, full_matrices=False)
        values = values / values.norm()
        for _ in range(5):
            values = 3.4445 * values - 4.7750 * values**3 + 2.0315 * values**5
        torch.testing.assert_close(result, left @ values.diag() @ right, atol=1e-5, rtol=1e-5)


def muon_pair(
    value: Tensor, decay: float, scale: str
) -> tuple[nn.Parameter, Optimizer, nn.Parameter, torch.optim.Muon]:
    model, ours = single(value)
    adjust = "match_rms_adamw" if scale == "adamw" else "original"
    optimizer = Muon(rate=0.1, decay=decay, scale="adamw" if scale == "adamw" else "original").build(model)
    theirs = nn.Parameter(value.clone())
    return ours, optimizer, theirs, torch.optim.Muon([theirs], lr=0.1, weight_decay=decay, adjust_lr_fn=adjust)


def test_muon_takes_the_worked_step() -> None:
    ours, optimizer, theirs, reference = muon_pair(torch.eye(2, 3), 0.0, "original")
    for parameter in (ours, theirs):
        parameter.grad = torch.tensor([[1.0, 0, 0], [0, 2.0, 0]])
    optimizer.step(1.0, YES)
    reference.step()  # type: ignore[no-untyped-call]
    assert ours.diagonal().tolist() == pytest.approx([0.8883, 0.9309], abs=1e-2)
    torch.testing.assert_close(ours, theirs, atol=1e-2, rtol=0)


@pytest.mark.parametrize("scale", ["original", "adamw"])
@pytest.mark.parametrize("shape", [(16, 8), (8, 16)])
def test_muon_is_torchs_own_within_the_rounding_of_bfloat16(shape: tuple[int, int], scale: str) -> None:
    generator = torch.Generator().manual_seed(0)
    ours, optimizer, theirs, reference = muon_pair(torch.randn(shape, generator=generator), 0.1, scale)
    start = ours.detach().clone()
    for _ in range(5):
        ours.grad = torch.randn(shape, generator=generator)
        theirs.grad = ours.grad.clone()
        optimizer.step(1.0, YES)
        reference.step()  # type: ignore[no-untyped-call]
    moved, apart = (ours - start).norm(), (ours - theirs).norm()
    assert (apart / moved).item() < 2e-2


def test_muon_moves_hidden_matrices_and_adamw_the_rest() -> None:
    model = small()
    optimizer = Muon(rate=0.5, adam_rate=0.001, head_rate=0.01).build(model)
    kinds = {weight.name: weight.kind for weight in trainable(model)}
    names = optimizer.tensors()
    for name, kind in kinds.items():
        assert (f"{name}.momentum" in names) == (kind == "matrix")
        assert (f"{name}.exp_avg" in names) == (kind != "matrix")
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    gradients(model, 0)
    optimizer.step(1.0, YES)
    # the first step of Adam moves every weight by its rate
    for name, parameter in model.named_parameters():
        rate = {"head": 0.01, "embedding": 0.001, "vector": 0.001}.get(kinds[name])
        if rate:
            torch.testing.assert_close(
                (parameter - before[name]).abs(), torch.full_like(parameter, rate), rtol=1e-2, atol=0
            )


def test_muon_needs_a_hidden_matrix() -> None:
    with pytest.raises(ConfigError, match="muon needs hidden matrices"):
        Muon().build(TokenEmbeddingOptions().build(small().config.site()))


def test_a_compiled_step_is_the_plain_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also at another rate, which is no constant of the program, and where nothing may move."""
    compiled, counter = torch.compile, CompileCounterWithBackend("aot_eager")
    monkeypatch.setattr(torch, "compile", lambda function, **more: compiled(function, backend=counter, **more))
    plain, fast = small(), small()
    one, other = Muon(decay=0.1).build(plain), Muon(decay=0.1).build(fast)
    other.compile()
    for step, healthy in enumerate((YES, YES, NO, YES)):
        for model, optimizer in ((plain, one), (fast, other)):
            gradients(model, step)
            optimizer.step(1 / (step + 1), healthy)
        for wanted, found in zip(plain.parameters(), fast.parameters(), strict=True):
            torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-7)
    shapes = {tuple(momentum.shape) for name, momentum in one.tensors().items() if name.endswith(".momentum")}
    assert counter.frame_count == len(shapes)


def test_more_shapes_than_the_compiler_has_programs_for_are_moved_too(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = torch.compile
    monkeypatch.setattr(torch, "compile", lambda function, **more: compiled(function, backend="eager", **more))
    layers = [[single(torch.ones(8, 8 + more))[0] for more in range(12)] for _ in range(2)]
    plain, fast = (nn.ModuleList(one) for one in layers)
    one, other = Muon().build(plain), Muon().build(fast)
    other.compile()
    for model, optimizer in ((plain, one), (fast, other)):
        gradients(model, 0)
        optimizer.step(1.0, YES)
    for wanted, found in zip(plain.parameters(), fast.parameters(), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-7)
        assert not torch.equal(found, torch.ones_like(found))
    torch._dynamo.reset()
