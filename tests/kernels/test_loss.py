"""The loss whose gradients are made on the way against torch's own cross entropy in float64."""

# N rows, D width, V vocabulary

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from trivium.kernels import loss as kernels
from trivium.kernels.loss import ALIGNED, Scoring, differentiated, differentiated_in_place, summed
from trivium.labels import IGNORED

N, D = 50, 16
CASES = list(itertools.product((100, 128), (0.0, 3.0), (0.0, 0.1), (False, True), (False, True)))


class Given(NamedTuple):
    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    labels: Tensor

    @property
    def leaves(self) -> list[Tensor]:
        return [self.hidden, self.weight] if self.bias is None else [self.hidden, self.weight, self.bias]


def given(vocab: int, *, bias: bool = False, ignored: bool = False, dtype: torch.dtype = torch.float64) -> Given:
    generator = torch.Generator().manual_seed(vocab)
    hidden, weight, offset = (
        torch.randn(shape, generator=generator, dtype=dtype).requires_grad_() for shape in ((N, D), (vocab, D), vocab)
    )
    labels = torch.randint(vocab, (N,), generator=generator)
    if ignored:
        labels[::3] = IGNORED
    return Given(hidden, weight, offset if bias else None, labels)


def plain(hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, cap: float, smoothing: float) -> Tensor:
    scores = F.linear(hidden, weight, bias)
    scores = cap * torch.tanh(scores / cap) if cap else scores
    return F.cross_entropy(scores, labels, ignore_index=IGNORED, reduction="sum", label_smoothing=smoothing)


def same(loss: Callable[..., Any], case: Given, cap: float, smoothing: float) -> None:
    expected = plain(*case, cap, smoothing)
    found = loss(*case)
    torch.testing.assert_close(found, expected)
    gradients = torch.autograd.grad(1.7 * found, case.leaves, retain_graph=True)
    wanted = torch.autograd.grad(1.7 * expected, case.leaves)
    for one, other in zip(gradients, wanted, strict=True):
        torch.testing.assert_close(one, other)
    # a second time through the same graph: what was kept has not been changed
    for one, other in zip(torch.autograd.grad(1.7 * found, case.leaves), gradients, strict=True):
        assert torch.equal(one, other)
    with torch.no_grad():
        torch.testing.assert_close(loss(*case), expected.detach())


@pytest.mark.parametrize(("vocab", "cap", "smoothing", "bias", "ignored"), CASES)
@pytest.mark.parametrize("rows", [0, 16])  # all at once, and four chunks
def test_the_summed_loss_and_its_gradients_are_those_of_torch(
    vocab: int, cap: float, smoothing: float, bias: bool, ignored: bool, rows: int
) -> None:
    case = given(vocab, bias=bias, ignored=ignored)
    same(lambda *tensors: summed(*tensors, cap=cap, smoothing=smoothing, rows=rows), case, cap, smoothing)


@pytest.mark.parametrize(("cap", "smoothing", "bias"), [(0.0, 0.0, False), (3.0, 0.1, True)])
def test_a_compiler_sees_it_as_one_graph(cap: float, smoothing: float, bias: bool) -> None:
    def loss(hidden: Tensor, weight: Tensor, offset: Tensor | None, labels: Tensor) -> Tensor:
        return summed(hidden, weight, offset, labels, cap=cap, smoothing=smoothing, rows=32)

    case = given(100, bias=bias, ignored=True)
    same(torch.compile(loss, backend="aot_eager", fullgraph=True), case, cap, smoothing)
    torch._dynamo.reset()


@pytest.mark.parametrize(("vocab", "cap", "smoothing", "bias", "ignored"), CASES)
def test_the_formulas_for_the_compiler_are_those_in_place(
    vocab: int, cap: float, smoothing: float, bias: bool, ignored: bool
) -> None:
    case, scoring = given(vocab, bias=bias, ignored=ignored), Scoring(vocab, cap, smoothing)
    beyond = -vocab % ALIGNED
    with torch.no_grad():
        logits = case.hidden @ case.weight.mT
        padded = F.pad(logits, (0, beyond), value=7.0)  # what a product with padding leaves there is never looked at
        offset = None if case.bias is None else F.pad(case.bias, (0, beyond))
        loss, gradient = differentiated(padded, offset, case.labels, scoring, True)
        torch.testing.assert_close(loss, differentiated_in_place(logits, case.bias, case.labels, scoring, True))
    torch.testing.assert_close(gradient[:, :vocab], logits)
    assert not gradient[:, vocab:].any()


def test_a_matrix_used_twice_has_both_gradients() -> None:
    case = given(100)
    tokens = case.labels.roll(1)

    def through(loss: Callable[..., Tensor]) -> Tensor:
        entered = case.weight[tokens] + case.hidden
        (gradient,) = torch.autograd.grad(loss(entered, case.weight, None, case.labels), case.weight)
        return gradient

    torch.testing.assert_close(through(summed), through(functools.partial(plain, cap=0.0, smoothing=0.0)))


@pytest.mark.parametrize("frozen", ["hidden", "weight", "both"])
def test_what_wants_no_gradient_costs_none(frozen: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = given(100)
    names = ("hidden", "weight") if frozen == "both" else (frozen,)
    for name in names:
        getattr(case, name).requires_grad_(False)
    asked: list[tuple[bool, ...]] = []
    honest = kernels._forward

    def forward(*given: Any) -> Any:
        asked.append(given[-1])
        return honest(*given)

    monkeypatch.setattr(kernels, "_forward", forward)
    found = summed(*case)
    assert asked == [("hidden" not in names, "weight" not in names, False)]
    assert found.requires_grad == (frozen != "both")
    torch.testing.assert_close(found, plain(*case, 0.0, 0.0))
    leaves = [leaf for leaf in case.leaves if leaf.requires_grad]
    if leaves:
        expected = torch.autograd.grad(plain(*case, 0.0, 0.0), leaves)
        torch.testing.assert_close(torch.autograd.grad(found, leaves), expected)


def test_scores_too_large_for_an_exponential_have_an_exact_loss() -> None:
    """A label 200 nats below the best: its probability is 0 in float32, its loss is not."""
    hidden, weight = torch.eye(2)[:1].requires_grad_(), torch.tensor([[200.0, 0.0], [0.0, 0.0], [100.0, 0.0]])
    found = summed(hidden, weight, None, torch.tensor([1]))
    assert found.item() == 200.0
    (gradient,) = torch.autograd.grad(found, hidden)
    torch.testing.assert_close(gradient, torch.tensor([[200.0, 0.0]]))


def test_no_labels_at_all_is_a_loss_of_zero() -> None:
    case = given(100)
    labels = torch.full_like(case.labels, IGNORED)
    found = summed(case.hidden, case.weight, None, labels)
    assert found.item() == 0
    assert not any(gradient.any() for gradient in torch.autograd.grad(found, case.leaves))
    assert summed(case.hidden[:0], case.weight, None, labels[:0]).item() == 0


def test_half_precision_is_in_the_products_alone() -> None:
    case = given(100, dtype=torch.float32)
    expected = plain(*case, 0.0, 0.0)
    with torch.autocast("cpu", torch.bfloat16):
        found = summed(*case, rows=16)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, expected, rtol=1e-2, atol=0.0)
    gradients, wanted = (torch.autograd.grad(loss, case.leaves) for loss in (found, expected))
    for one, other in zip(gradients, wanted, strict=True):
        assert one.dtype == torch.float32
        assert (one - other).norm() < 1e-2 * other.norm()


def test_gradients_in_half_precision_have_the_scale_of_the_mean() -> None:
    """One over 15,480 labels is 0.16 % off in bfloat16; the rounding of the gradients themselves has no direction."""
    case = given(100, dtype=torch.float32)
    expected = torch.autograd.grad(plain(*case, 0.0, 0.0) / 15_480, case.leaves)
    with torch.autocast("cpu", torch.bfloat16):
        found = torch.autograd.grad(summed(*case) / 15_480, case.leaves)
    for one, other in zip(found, expected, strict=True):
        assert ((one * other).sum() / (other * other).sum()).item() == pytest.approx(1, abs=6e-4)


def test_narrow_products_are_near_the_plain_ones() -> None:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(64, 32, generator=generator, requires_grad=True)
    weight = (0.2 * torch.randn(100, 32, generator=generator)).requires_grad_()
    labels = torch.randint(100, (64,), generator=generator)
    labels[::5] = IGNORED
    expected = plain(hidden, weight, None, labels, 0.0, 0.0)
    with torch.autocast("cpu", torch.bfloat16):
        found = summed(hidden, weight, None, labels, narrow=True, rows=32)
        nothing = summed(hidden[:0], weight, None, labels[:0], narrow=True)
    torch.testing.assert_close(found, expected, rtol=5e-3, atol=0.0)
    assert nothing.item() == 0
    assert not any(gradient.any() for gradient in torch.autograd.grad(nothing, (hidden, weight)))
    usual = summed(hidden, weight, None, labels, rows=32)
    assert torch.equal(summed(hidden, weight, None, labels, narrow=True, rows=32), usual)  # float32 was asked for
    leaves = (hidden, weight)
    for one, other in zip(torch.autograd.grad(found, leaves), torch.autograd.grad(expected, leaves), strict=True):
        assert 1e-4 * other.norm() < (one - other).norm() < 0.03 * other.norm()  # the logits have three bits fewer
