"""Fast outputs: the loss in chunks, with gradients made on the way, against the plain one and float64."""

from __future__ import annotations

from typing import cast

import pytest
import torch
from torch import Tensor, nn

from tests.fast.compare import fast_copy
from tests.kernels.launch import DEVICE, needs_triton
from tests.parts.drawing import drawn, random
from trivium.fast.choose import fast
from trivium.fast.linear import use_fp8
from trivium.fast.output import FastMaskedOutput, FastSoftmaxOutput
from trivium.labels import IGNORED
from trivium.parts.options.output import MaskedOutputOptions, SoftmaxOptions
from trivium.parts.output import SoftmaxOutput, VocabularyOutput
from trivium.parts.site import Site

SITE = Site(width=6, context=8, vocab=11)
OPTIONS: list[SoftmaxOptions | MaskedOutputOptions] = [
    SoftmaxOptions(),
    SoftmaxOptions(cap=5.0, scale="root", bias=True),
    SoftmaxOptions(bias=True, fixed=True),
    MaskedOutputOptions(),
]


def built(options: SoftmaxOptions | MaskedOutputOptions) -> VocabularyOutput:
    part = drawn(options.build(SITE, None))
    assert isinstance(part, VocabularyOutput)
    return part


def large(number: int) -> tuple[SoftmaxOutput, Tensor, Tensor]:
    """A fast output over 8,192 ids, of which chunks have 512 rows, with states and labels."""
    generator = torch.Generator().manual_seed(number)
    output = cast(SoftmaxOutput, SoftmaxOptions().build(Site(width=8, context=8, vocab=8192), None))
    nn.init.normal_(output.project.weight, generator=generator)
    fast(output)
    assert type(output) is FastSoftmaxOutput
    hidden = torch.randn(number, 8, generator=generator, requires_grad=True)
    labels = torch.randint(8192, (number,), generator=generator)
    labels[::7] = IGNORED
    return output, hidden, labels


@pytest.mark.parametrize("number", [511, 512, 513, 1300])
def test_the_loss_in_chunks_is_the_loss(number: int) -> None:
    output, hidden, labels = large(number)
    weight = output.project.weight

    def plain(hidden: Tensor, weight: Tensor) -> Tensor:
        scores = (hidden @ weight.mT).log_softmax(-1)
        picked = -scores.gather(-1, labels.clamp(min=0)[:, None])[:, 0]
        return torch.where(labels == IGNORED, 0.0, picked)

    wide = (hidden.detach().double().requires_grad_(), weight.detach().double().requires_grad_())
    expected = plain(*wide)
    wanted = torch.autograd.grad(expected.sum(), wide)
    found = output.nll(hidden, labels)
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)
    assert not found[::7].any()
    for loss in (found.sum(), output.loss(hidden, labels)):
        torch.testing.assert_close(loss.double(), expected.sum(), rtol=1e-5, atol=1e-5)
        for one, other in zip(torch.autograd.grad(loss, (hidden, weight)), wanted, strict=True):
            torch.testing.assert_close(one.double(), other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("share", [0.0, 0.1, 0.5])
def test_smoothing_in_chunks_spreads_a_share_of_each_label_evenly(share: float) -> None:
    output, hidden, labels = large(1300)
    with torch.no_grad():
        found, total = (one(hidden, labels, smoothing=share) for one in (output.nll, output.loss))
        logprobs = (hidden.double() @ output.project.weight.double().mT).log_softmax(-1)
    picked = logprobs.gather(-1, labels.clamp(min=0)[:, None])[:, 0]
    expected = (-(1 - share) * picked - share * logprobs.mean(-1)).masked_fill(labels == IGNORED, 0.0)
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(total.double(), expected.sum(), rtol=1e-5, atol=1e-5)
    assert not found[::7].any()


@pytest.mark.parametrize("options", OPTIONS, ids=repr)
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("device", ["cpu", pytest.param("launched", marks=needs_triton)])
def test_logits_losses_and_gradients_are_those_of_the_plain_output(
    options: SoftmaxOptions | MaskedOutputOptions, smoothing: float, device: str
) -> None:
    plain = built(options).to(DEVICE if device == "launched" else device)
    output = fast_copy(plain)
    assert isinstance(output, FastSoftmaxOutput | FastMaskedOutput)
    hidden = random(5, 6).to(plain.project.weight.device).requires_grad_()
    labels = torch.tensor([3, IGNORED, 0, 10, 7], device=hidden.device)
    torch.testing.assert_close(output.logits(hidden), plain.logits(hidden), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(
        output.nll(hidden, labels, smoothing=smoothing), plain.nll(hidden, labels, smoothing=smoothing)
    )
    found = output.loss(hidden, labels, smoothing=smoothing)
    expected = plain.loss(hidden, labels, smoothing=smoothing)
    torch.testing.assert_close(found, expected)
    grads = [
        torch.autograd.grad(2.5 * loss, [hidden, *part.parameters()])
        for loss, part in ((found, output), (expected, plain))
    ]
    for one, other in zip(*grads, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    with torch.no_grad():
        torch.testing.assert_close(output.loss(hidden, labels, smoothing=smoothing), expected.detach())


def test_dropout_falls_once_for_the_loss_too() -> None:
    part = built(SoftmaxOptions(dropout=0.5)).train()
    fast(part)
    hidden, labels = random(5, 6), torch.tensor([3, IGNORED, 0, 10, 7])
    torch.manual_seed(0)
    expected = part.nll(hidden, labels).sum()
    torch.manual_seed(0)
    torch.testing.assert_close(part.loss(hidden, labels), expected)
    assert not torch.equal(part.eval().loss(hidden, labels), expected)


def test_float16_keeps_the_plain_loss_whose_gradients_its_scale_reaches() -> None:
    part, hidden, labels = built(SoftmaxOptions()), random(4, 6).requires_grad_(), torch.tensor([3, 1, 0, 10])
    fast(part)
    with torch.autocast("cpu", torch.float16):
        assert torch.equal(part.loss(hidden, labels), part.nll(hidden, labels).sum())


@pytest.mark.parametrize("options", [SoftmaxOptions(bias=True), MaskedOutputOptions()], ids=repr)
def test_hooks_on_the_output_and_on_its_matrix_see_every_use(options: SoftmaxOptions | MaskedOutputOptions) -> None:
    hidden, labels = random(5, 6), torch.tensor([3, IGNORED, 0, 10, 7])
    for name in ("", "project"):
        plain = built(options)
        output = fast_copy(plain)
        before = [output.logits(hidden), output.nll(hidden, labels), output.loss(hidden, labels)]
        for part in (plain, output):
            part.get_submodule(name).register_forward_hook(lambda module, given, out: 2 * out)
        found = [output.logits(hidden), output.nll(hidden, labels), output.loss(hidden, labels)]
        expected = [plain.logits(hidden), plain.nll(hidden, labels), plain.loss(hidden, labels)]
        for one, other, old in zip(found, expected, before, strict=True):
            torch.testing.assert_close(one, other)
            assert not torch.allclose(one, old)


def test_logits_in_float8_are_near_the_plain_ones() -> None:
    output = cast(SoftmaxOutput, drawn(SoftmaxOptions().build(Site(width=32, context=8, vocab=96), None)))
    with torch.no_grad():
        output.project.weight.mul_(0.2)
    fast(output)
    hidden, labels = random(64, 32).requires_grad_(), torch.arange(64)
    expected = output.loss(hidden, labels)
    use_fp8(output, True)
    assert torch.equal(output.loss(hidden, labels), expected)  # float32 was asked for
    with torch.autocast("cpu", torch.bfloat16):
        found = output.loss(hidden, labels)
        assert not torch.equal(found, expected)
        torch.testing.assert_close(found, expected, rtol=5e-3, atol=0.0)
