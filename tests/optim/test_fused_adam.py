"""Adam in one pass: the rule of torch's own, whoever has the gradient; by the kernel on a GPU or in the interpreter."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from tests.kernels.launch import DEVICE, needs_triton
from tests.optim.steps import NO, YES, same, small, snapshot
from trivium.fast.adam import FusedAdam, with_bf16_copies
from trivium.fast.bf16_copies import Bf16Copies
from trivium.fast.choose import fast
from trivium.kernels.hardware import INTERPRETED, can_launch
from trivium.models.transformer import Transformer
from trivium.optim.adam import AdamStepper
from trivium.optim.options import Adam, AdamW, Muon


def quick() -> Transformer:
    """The small model, fast: only such layers have twins."""
    model = small()
    fast(model)
    assert Bf16Copies(model)._copies
    return model


def with_copies(options: AdamW | Adam, model: nn.Module) -> tuple[FusedAdam, Bf16Copies]:
    optimizer = with_bf16_copies(options.build(model), model)
    assert isinstance(optimizer, FusedAdam)
    return optimizer, optimizer.copies


def planted(model: nn.Module, twins: Bf16Copies, seed: int) -> None:
    """Gradients in all twins, and in those weights that have none."""
    generator = torch.Generator().manual_seed(seed)
    held = {id(layer.weight) for _, layers in twins._copies for layer in layers}
    for twin, _ in twins._copies:
        twin.grad = torch.randn(twin.shape, generator=generator).to(DEVICE, torch.bfloat16)
    for parameter in model.parameters():
        if id(parameter) not in held:
            parameter.grad = torch.randn(parameter.shape, generator=generator).to(DEVICE)


def alike(first: dict[str, Tensor], second: dict[str, Tensor]) -> bool:
    """The same bits, or nearly so where a kernel of ours has moved the first."""
    if not can_launch(YES.to(DEVICE)):
        return same(first, second)
    return all(torch.allclose(one, second[name], rtol=2e-6, atol=1e-6) for name, one in first.items())


def spread(model: nn.Module, twins: Bf16Copies) -> None:
    """The same gradients where a plain optimizer looks for them."""
    for pair in twins.pairs():
        pair.weight.grad = pair.gradient.float() * twins.scale
    twins.clear()


@pytest.mark.parametrize("kind", [AdamW, Adam])
def test_weights_walk_as_with_gradients_of_their_own(kind: type[AdamW] | type[Adam]) -> None:
    ours, theirs = quick().to(DEVICE), quick().to(DEVICE)
    optimizer, twins = with_copies(kind(rate=0.01, decay=0.1), ours)
    plain = kind(rate=0.01, decay=0.1).build(theirs)
    other = Bf16Copies(theirs)
    for step in range(5):
        for model, pair in ((ours, twins), (theirs, other)):
            planted(model, pair, step)
            pair.scale = torch.tensor(0.5, device=DEVICE)
        spread(theirs, other)
        healthy = (NO if step == 2 else YES).to(DEVICE)
        optimizer.step(1 / (step + 1), healthy)
        plain.step(1 / (step + 1), healthy)
        assert alike(snapshot(ours, optimizer), snapshot(theirs, plain))
        twins.clear()
        twins.refresh()
        for model in (ours, theirs):
            model.zero_grad()
    planted(ours, twins, 9)
    assert all(rounded(pair.copy, pair.weight.detach()) for pair in twins.pairs())


def test_a_gradient_on_both_sides_is_one() -> None:
    ours, theirs = quick().to(DEVICE), quick().to(DEVICE)
    optimizer, twins = with_copies(AdamW(rate=0.01), ours)
    plain, other = AdamW(rate=0.01).build(theirs), Bf16Copies(theirs)
    for model, pair in ((ours, twins), (theirs, other)):
        planted(model, pair, 0)
    both = [pair.weight for pair in twins.pairs()][::2]  # the others are moved beside them
    for weight in both:
        weight.grad = torch.ones_like(weight)
    held = [pair.weight for pair in other.pairs()][::2]
    spread(theirs, other)
    for weight in held:
        assert weight.grad is not None
        weight.grad += 1
    optimizer.step(1.0, YES.to(DEVICE))
    plain.step(1.0, YES.to(DEVICE))
    for one, two in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(one, two)
    twins.refresh()
    assert all(torch.equal(twin, weight.bfloat16()) for weight, twin, _ in twins.pairs())


def test_only_adam_takes_twins_along() -> None:
    model = quick()
    muon = Muon().build(model)
    assert with_bf16_copies(muon, model) is muon


def test_a_checkpoint_is_that_of_adam() -> None:
    model = quick().to(DEVICE)
    optimizer, twins = with_copies(AdamW(rate=0.01), model)
    planted(model, twins, 0)
    optimizer.step(1.0, YES.to(DEVICE))
    again = quick().to(DEVICE)
    plain = AdamW(rate=0.01).build(again)
    plain.load(optimizer.tensors())
    assert plain.tensors().keys() == optimizer.tensors().keys()
    back, _ = with_copies(AdamW(rate=0.01), again)
    back.load(plain.tensors())
    assert all(torch.equal(one, optimizer.tensors()[name]) for name, one in back.tensors().items())


def rounded(twin: Tensor, weight: Tensor) -> bool:
    """The interpreter only cuts the last bits off."""
    if INTERPRETED:
        return torch.allclose(twin.float(), weight, rtol=2**-7, atol=0)
    return torch.equal(twin, weight.bfloat16())


def by_kernel(optimizer: FusedAdam, factor: float | Tensor, healthy: Tensor) -> None:
    """A step of the weights with twins alone, by the kernel wherever it runs."""
    optimizer._by_kernel(list(optimizer.copies.pairs()), factor, healthy)


@needs_triton
@pytest.mark.parametrize("options", [
    AdamW(rate=0.01, decay=0.1),
    AdamW(rate=0.01, decay=0.1, correction=False),
    Adam(rate=0.02, decay=0.1, beta2=0.999),
    AdamW(rate=0.01, beta1=0.0, beta2=0.5, decay=0.0),
], ids=["adamw", "uncorrected", "adam", "no momentum"])  # fmt: skip
def test_the_kernel_walks_as_torch_does(options: AdamW | Adam) -> None:
    ours, theirs = quick().to(DEVICE), quick().to(DEVICE)
    stepper = options.build(ours)
    assert isinstance(stepper, AdamStepper)
    twins, other = Bf16Copies(ours), Bf16Copies(theirs)
    optimizer, plain = FusedAdam(stepper, twins), options.build(theirs)
    yes, no = YES.to(DEVICE), NO.to(DEVICE)
    for step in range(8):
        for model, pair in ((ours, twins), (theirs, other)):
            for twin, _ in pair._copies:
                generator = torch.Generator().manual_seed(step)
                twin.grad = torch.randn(twin.shape, generator=generator).bfloat16().to(DEVICE)
            pair.scale = torch.tensor(0.25 + step / 8, device=DEVICE)
            model.zero_grad()
        factor: float | Tensor = 1 / (step + 1)
        before = snapshot(ours, optimizer)
        healthy = no if step == 3 else yes
        by_kernel(optimizer, torch.tensor(factor, device=DEVICE) if step % 2 else factor, healthy)
        assert same(snapshot(ours, optimizer), before) == (step == 3)
        spread(theirs, other)
        plain.step(factor, healthy)
        expected = snapshot(theirs, plain)
        for name, value in snapshot(ours, optimizer).items():
            torch.testing.assert_close(value, expected[name], rtol=2e-6, atol=1e-6)
        for weight, twin, _ in twins.pairs():
            assert rounded(twin, weight.detach())
    assert twins._versions() == twins._seen  # torch has seen none of that, so that nothing is copied again


@needs_triton
@pytest.mark.parametrize("size", [1, 7, 1023, 1024, 1025, 5000])
def test_the_kernel_writes_all_numbers_and_no_others(size: int) -> None:
    from trivium.kernels.adam import Rule, adam

    around = [torch.full((size + 64,), 7.0, device=DEVICE, dtype=kind) for kind in (torch.float32,) * 3]
    around.append(torch.full((size + 64,), 7.0, device=DEVICE, dtype=torch.bfloat16))
    weight, moment, square, twin = (one[32 : size + 32] for one in around)
    gradient = torch.randn(size, device=DEVICE).bfloat16()
    number = torch.ones((), device=DEVICE)
    rule = Rule(0.1, 0.9, 0.95, 1e-8, 0.0, True)
    adam(rule, weight, (moment, square), twin, gradient, count=number, healthy=number, factor=number, scale=number)
    g = gradient.double()
    m, v = 0.9 * 7 + 0.1 * g, 0.95 * 7 + 0.05 * g * g
    expected = 7 - 0.1 * (m / 0.1) / ((v / 0.05).sqrt() + 1e-8)
    torch.testing.assert_close(weight.double(), expected, rtol=1e-5, atol=1e-5)
    assert rounded(twin, weight)
    for one in around:
        assert (one[:32] == 7).all()
        assert (one[-32:] == 7).all()
