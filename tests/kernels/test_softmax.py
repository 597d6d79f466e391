"""The Triton kernel of the loss against its plain formulas; on a GPU, or in Triton's interpreter."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

from tests.kernels.launch import DEVICE, needs_triton
from tests.parts.drawing import random
from trivium.kernels.loss import Scoring, summed
from trivium.kernels.loss import differentiated as plain
from trivium.labels import IGNORED

pytestmark = needs_triton

CASES = list(itertools.product((100, 128), (0.0, 3.0), (0.0, 0.1), (False, True)))


def found(
    logits: Tensor, labels: Tensor, scoring: Scoring, *, bias: Tensor | None = None, wanted: bool = True
) -> tuple[Tensor, Tensor]:
    """The losses, and what has become of the logits."""
    from trivium.kernels import softmax

    logits = logits.clone()
    return softmax.differentiated_in_place(logits, bias, labels, scoring, wanted), logits


@pytest.mark.parametrize(("vocab", "cap", "smoothing", "bias"), CASES)
@pytest.mark.parametrize("block", [32, 8192])  # several rounds of a row, and one
def test_losses_and_gradients_are_those_of_the_plain_formulas(
    vocab: int, cap: float, smoothing: float, bias: bool, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from trivium.kernels import softmax

    monkeypatch.setattr(softmax, "BLOCK", block)
    logits = 4 * random(6, 128, seed=vocab).to(DEVICE)
    logits[:, vocab:] = float("nan")  # never looked at
    offset = random(128).to(DEVICE) if bias else None
    labels = torch.tensor([3, IGNORED, 0, 99, 5, 6], device=DEVICE)
    scoring = Scoring(vocab, cap, smoothing)
    loss, expected = plain(logits.nan_to_num(), offset, labels, scoring, True)
    losses, gradient = found(logits, labels, scoring, bias=offset)
    torch.testing.assert_close(losses.sum(), loss)
    torch.testing.assert_close(gradient, expected)
    assert losses[1].item() == 0
    assert not gradient[1].any()
    assert not gradient[:, vocab:].any()
    alone, same = found(logits, labels, scoring, bias=offset, wanted=False)
    torch.testing.assert_close(alone, losses)
    assert torch.equal(same.nan_to_num(), logits.nan_to_num())


def test_rows_may_lie_apart() -> None:
    wide = random(4, 192).to(DEVICE)
    labels, before = torch.arange(4, device=DEVICE), wide.clone()
    from trivium.kernels import softmax

    softmax.differentiated_in_place(wide[:, :128], None, labels, Scoring(128), True)
    _, expected = plain(before[:, :128], None, labels, Scoring(128), True)
    torch.testing.assert_close(wide[:, :128], expected)
    assert torch.equal(wide[:, 128:], before[:, 128:])


def test_labels_and_biases_may_lie_apart() -> None:
    logits, table = random(5, 128).to(DEVICE), random(128, 3, seed=1).to(DEVICE)
    spread = torch.tensor([[3, 90], [IGNORED, 91], [0, 92], [99, 93], [5, 94]], device=DEVICE)
    for labels in (spread[:, 0], spread[1, 1].expand(5)):
        loss, expected = plain(logits, table[:, 0], labels, Scoring(128), True)
        losses, gradient = found(logits, labels, Scoring(128), bias=table[:, 0])
        torch.testing.assert_close(losses.sum(), loss)
        torch.testing.assert_close(gradient, expected)


def test_a_score_that_is_not_a_number_is_seen_in_the_loss() -> None:
    logits = torch.zeros(3, 64, device=DEVICE)
    logits[1, 7] = float("nan")
    losses, _ = found(logits, torch.tensor([1, 2, 3], device=DEVICE), Scoring(64))
    assert losses.isnan().tolist() == [False, True, False]


@pytest.mark.filterwarnings("ignore:invalid value encountered")  # of the interpreter, where the infinities meet
def test_an_impossible_id_has_no_share_and_an_endless_score_is_seen_in_the_loss() -> None:
    logits = torch.zeros(2, 64, device=DEVICE)
    logits[0, 7], logits[1, 7] = float("-inf"), float("inf")
    losses, gradient = found(logits, torch.tensor([1, 2], device=DEVICE), Scoring(64))
    assert losses[0].item() == pytest.approx(math.log(63))
    assert gradient[0, 7].item() == 0
    assert not losses[1].isfinite()


def test_scores_too_large_for_an_exponential_have_an_exact_loss() -> None:
    logits = torch.zeros(1, 64, device=DEVICE)
    logits[0, 5], logits[0, 9] = 200.0, 100.0
    losses, gradient = found(logits, torch.tensor([1], device=DEVICE), Scoring(64))
    assert losses.item() == 200.0
    torch.testing.assert_close(gradient[0, [1, 5]], torch.tensor([-1.0, 1.0], device=DEVICE))


def test_gradients_are_rounded_to_the_precision_of_the_logits() -> None:
    logits = (4 * random(8, 128)).to(DEVICE, torch.bfloat16)
    labels = torch.arange(8, device=DEVICE)
    _, expected = plain(logits, None, labels, Scoring(100), True)
    _, gradient = found(logits, labels, Scoring(100))
    assert gradient.dtype == torch.bfloat16
    room = torch.finfo(torch.bfloat16).eps  # a whole step and not half: the interpreter does not round to the nearest
    torch.testing.assert_close(gradient.float(), expected, rtol=room, atol=1e-9)


def test_the_whole_loss_goes_through_the_kernel_in_one_graph() -> None:
    leaves = (random(50, 16).to(DEVICE), random(100, 16, seed=1).to(DEVICE), random(100, seed=2).to(DEVICE))
    hidden, weight, bias = (leaf.requires_grad_() for leaf in leaves)
    labels = torch.randint(100, (50,), generator=torch.Generator().manual_seed(0)).to(DEVICE)
    labels[::3] = IGNORED

    def loss(hidden: Tensor, weight: Tensor, bias: Tensor, labels: Tensor) -> Tensor:
        return summed(hidden, weight, bias, labels, cap=3.0, smoothing=0.1, rows=32)

    compiled = torch.compile(loss, backend="aot_eager", fullgraph=True)
    found = compiled(hidden, weight, bias, labels)
    scores = 3 * torch.tanh(F.linear(hidden, weight, bias) / 3)
    expected = F.cross_entropy(scores, labels, ignore_index=IGNORED, reduction="sum", label_smoothing=0.1)
    torch.testing.assert_close(found, expected)
    for one, other in zip(torch.autograd.grad(found, leaves), torch.autograd.grad(expected, leaves), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    with torch.no_grad():
        torch.testing.assert_close(compiled(hidden, weight, bias, labels), expected.detach())
    torch._dynamo.reset()


def test_one_program_is_for_batches_of_any_number_of_labels() -> None:
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(summed, backend=counter, dynamic=True)
    weight = torch.randn(100, 16, device=DEVICE, requires_grad=True)
    programs = []
    for number in (28, 45, 33, 57, 91, 26, 99, 250):  # no multiples of 16: those have chunks of another kind
        hidden, labels = torch.randn(number, 16, device=DEVICE), torch.arange(number, device=DEVICE) % 100
        expected = F.cross_entropy(F.linear(hidden, weight), labels, reduction="sum")
        torch.testing.assert_close(compiled(hidden, weight, None, labels), expected)
        programs.append(counter.frame_count)
    assert programs == [programs[0]] * 8
    torch._dynamo.reset()
