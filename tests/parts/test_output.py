"""The output part against its formulas; tying is one storage whatever happens to the model."""

from __future__ import annotations

import copy
import math
from typing import Literal, cast

import pytest
import torch
from torch import Tensor, nn

from trivium.errors import ConfigError, RequestError
from trivium.labels import IGNORED
from trivium.models.config import ModelConfig, Stack
from trivium.models.transformer import Transformer, build, weights
from trivium.parts.options.embeddings import TokenEmbeddingOptions
from trivium.parts.options.output import MaskedOutputOptions, NoOutputOptions, SoftmaxOptions
from trivium.parts.options.sentence import PoolerOptions
from trivium.parts.output import Head, MaskedOutput, SoftmaxOutput
from trivium.parts.sentence import Pooler
from trivium.parts.site import Site

SITE = Site(width=6, context=8, vocab=11)


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def head(cap: float = 0.0) -> SoftmaxOutput:
    part = SoftmaxOptions(cap=cap).build(SITE, None)
    assert isinstance(part, SoftmaxOutput)
    with torch.no_grad():
        part.project.weight.copy_(random(11, 6, seed=1) * 3)
    return part


def model(tie: Literal["output", "none"]) -> Transformer:
    return build(
        ModelConfig(width=16, context=8, vocab=11, embedding=TokenEmbeddingOptions(tie=tie), decoder=Stack(layers=1))
    )


def test_logits_are_one_matrix_product() -> None:
    part, hidden = head(), random(4, 6)
    torch.testing.assert_close(part.logits(hidden), hidden @ part.project.weight.T)


def test_a_soft_cap_bounds_logits_and_keeps_small_ones_and_their_order() -> None:
    plain, capped, hidden = head(), head(cap=5.0), random(4, 6)
    free, bound = plain.logits(hidden), capped.logits(hidden)
    torch.testing.assert_close(bound, 5 * torch.tanh(free / 5))
    assert free.abs().max() > 5 > bound.abs().max()
    assert torch.equal(free.argmax(-1), bound.argmax(-1))
    torch.testing.assert_close(capped.logits(hidden * 1e-4), plain.logits(hidden * 1e-4), atol=1e-6, rtol=1e-4)


def test_nll_is_minus_the_log_of_the_softmax_and_zero_where_ignored() -> None:
    part, hidden = head(), random(4, 6)
    labels = torch.tensor([3, IGNORED, 0, 10])
    losses = part.nll(hidden, labels)
    probabilities = part.logits(hidden).exp() / part.logits(hidden).exp().sum(-1, keepdim=True)
    for row, label in enumerate(labels.tolist()):
        expected = 0.0 if label == IGNORED else -math.log(probabilities[row, label].item())
        assert losses[row].item() == pytest.approx(expected, abs=1e-5)
    assert losses[1].item() == 0


def test_ignored_positions_give_no_gradient() -> None:
    part, hidden = head(), random(4, 6).requires_grad_()
    part.nll(hidden, torch.tensor([3, IGNORED, IGNORED, 1])).sum().backward()  # type: ignore[no-untyped-call]
    assert hidden.grad is not None
    assert hidden.grad.abs().amax(-1).gt(0).tolist() == [True, False, False, True]


def test_the_loss_is_taken_in_float32_from_half_precision_states() -> None:
    part = head().to(torch.bfloat16)
    hidden, labels = random(4, 6).to(torch.bfloat16), torch.tensor([3, 1, 0, 10])
    losses = part.nll(hidden, labels)
    assert losses.dtype == torch.float32
    scores = part.logits(hidden).float()
    torch.testing.assert_close(losses, scores.logsumexp(-1) - scores.gather(-1, labels[:, None])[:, 0])


def shared(tied: Transformer) -> bool:
    output = tied.output
    assert isinstance(output, SoftmaxOutput)
    return output.project.weight is tied.embedding.weight


def test_tying_is_one_storage_and_stays_so() -> None:
    tied = model("output")
    assert shared(tied)
    assert not shared(model("none"))
    assert shared(tied.to(torch.float64))
    assert shared(tied.to("cpu", torch.bfloat16))
    assert shared(copy.deepcopy(tied))
    other = model("output")
    other.load_state_dict(tied.state_dict())
    assert shared(other)
    assert torch.equal(other.embedding.weight, tied.embedding.weight.to(torch.float32))


def test_a_tied_matrix_is_counted_and_saved_once() -> None:
    tied, untied = model("output"), model("none")
    assert untied.config.parameters() - tied.config.parameters() == 11 * 16
    assert untied.config.costs()["output"].flops == tied.config.costs()["output"].flops == 2 * 11 * 16
    assert set(weights(untied)) - set(weights(tied)) == {"output.project.weight"}


def test_both_uses_of_a_tied_matrix_add_to_its_gradient() -> None:
    tied, untied = model("output").double(), model("none").double()
    untied.load_state_dict(tied.state_dict())
    tokens, labels = torch.tensor([[1, 2, 3]]), torch.tensor([2, 3, 4])
    for each in (tied, untied):
        each.head.nll(each(tokens).hidden.flatten(0, 1), labels).sum().backward()  # type: ignore[no-untyped-call]
    output = untied.output
    assert isinstance(output, SoftmaxOutput)
    assert tied.embedding.weight.grad is not None
    assert untied.embedding.weight.grad is not None
    assert output.project.weight.grad is not None
    total = untied.embedding.weight.grad + output.project.weight.grad
    torch.testing.assert_close(tied.embedding.weight.grad, total, atol=1e-6, rtol=1e-5)  # the loss is float32


def test_a_negative_cap_is_refused() -> None:
    with pytest.raises(ConfigError, match="cap: -1 is negative"):
        SoftmaxOptions(cap=-1)


def test_a_scaled_output_divides_the_states_by_the_root_of_the_width() -> None:
    part = SoftmaxOptions(scale="root", bias=True).build(SITE, None)
    assert isinstance(part, SoftmaxOutput)
    hidden = random(4, 6)
    with torch.no_grad():
        part.project.weight.copy_(random(11, 6, seed=1))
        part.project.bias.copy_(random(11, seed=2))
        expected = hidden / math.sqrt(6) @ part.project.weight.mT + part.project.bias
        torch.testing.assert_close(part.logits(hidden), expected)
    assert SoftmaxOptions(scale="root", bias=True).cost(SITE, tied=True).parameters == 11


def test_the_masked_head_is_berts() -> None:
    """Linear, GELU, LayerNorm, then the tied matrix with a bias of its own: the module of another library's BERT."""
    from transformers import BertConfig
    from transformers.models.bert.modeling_bert import BertLMPredictionHead

    theirs = BertLMPredictionHead(BertConfig(hidden_size=6, vocab_size=11))
    tied = nn.Parameter(random(11, 6))
    ours = MaskedOutputOptions().build(SITE, tied)
    assert isinstance(ours, MaskedOutput)
    assert ours.project.weight is tied
    with torch.no_grad():
        for index, parameter in enumerate(theirs.parameters()):
            parameter.copy_(random(*parameter.shape, seed=index))
        theirs.decoder.weight.copy_(tied)
        ours.transform.load_state_dict(theirs.transform.dense.state_dict())
        ours.norm.load_state_dict(theirs.transform.LayerNorm.state_dict())
        ours.project.bias.copy_(theirs.decoder.bias)
        hidden = random(5, 6)
        torch.testing.assert_close(ours.logits(hidden), theirs(hidden))
        labels = torch.tensor([1, IGNORED, 3, 4, 10])
        expected = nn.functional.cross_entropy(theirs(hidden), labels, ignore_index=IGNORED, reduction="none")
        torch.testing.assert_close(ours.nll(hidden, labels), expected)


def test_the_sentence_head_is_berts_pooler_and_its_next_sentence_scores() -> None:
    part = PoolerOptions().build(SITE)
    assert isinstance(part, Pooler)
    assert part.classify is not None
    hidden = random(2, 3, 6)
    with torch.no_grad():
        for index, parameter in enumerate(part.parameters()):
            parameter.copy_(random(*parameter.shape, seed=index))
        pooled = torch.tanh(hidden[:, 0] @ part.dense.weight.mT + part.dense.bias)
        torch.testing.assert_close(part.pooled(hidden), pooled)
        torch.testing.assert_close(part.logits(hidden), pooled @ part.classify.weight.mT + part.classify.bias)
    assert PoolerOptions().cost(SITE).parameters == 6 * 6 + 6 + 6 * 2 + 2
    assert PoolerOptions(classes=0).cost(SITE).parameters == 6 * 6 + 6


def test_the_sentence_head_of_distilbert_has_a_relu() -> None:
    part = PoolerOptions(activation="relu", classes=0).build(SITE)
    assert isinstance(part, Pooler)
    nn.init.eye_(part.dense.weight)
    nn.init.zeros_(part.dense.bias)
    hidden = random(2, 3, 6)
    torch.testing.assert_close(part.logits(hidden), hidden[:, 0].clamp(min=0))


def test_a_model_without_output_says_so_in_a_sentence() -> None:
    part = cast(Head, NoOutputOptions().build(SITE, None))
    with pytest.raises(RequestError, match="no output over the vocabulary"):
        part.logits(random(2, 6))
    with pytest.raises(RequestError, match="no output over the vocabulary"):
        part.nll(random(2, 6), torch.tensor([1, 2]))
    assert (
        NoOutputOptions().cost(SITE, tied=False).parameters == NoOutputOptions().cost(SITE, tied=True).parameters == 0
    )


@pytest.mark.parametrize("share", [0.0, 0.1, 0.5])
def test_smoothing_spreads_a_share_of_each_label_evenly(share: float) -> None:
    number, generator = 5, torch.Generator().manual_seed(5)
    output = cast(SoftmaxOutput, SoftmaxOptions().build(Site(width=8, context=8, vocab=8192), None))
    nn.init.normal_(output.project.weight, generator=generator)
    hidden = torch.randn(number, 8, generator=generator)
    labels = torch.randint(8192, (number,), generator=generator)
    labels[::4] = IGNORED
    with torch.no_grad():
        found = output.nll(hidden, labels, smoothing=share)
        logprobs = (hidden.double() @ output.project.weight.double().mT).log_softmax(-1)
    picked = logprobs.gather(-1, labels.clamp(min=0)[:, None])[:, 0]
    expected = -(1 - share) * picked - share * logprobs.mean(-1)
    torch.testing.assert_close(found.double(), expected.masked_fill(labels == IGNORED, 0.0), rtol=1e-5, atol=1e-5)
    assert not found[::4].any()


def test_dropout_before_the_matrix_falls_in_training_only() -> None:
    site = Site(width=4000, context=8, vocab=2)
    part = SoftmaxOptions(dropout=0.5).build(site, None)
    assert isinstance(part, SoftmaxOutput)
    nn.init.ones_(part.project.weight)
    hidden = torch.ones(1, 4000)
    torch.manual_seed(0)
    dropped = part.logits(hidden)
    # 4,000 coins, each 0 or 2: five standard deviations of their sum are 316
    assert dropped[0, 0] != 4000
    assert abs(dropped[0, 0].item() - 4000) < 316
    assert torch.equal(part.eval().logits(hidden), torch.full((1, 2), 4000.0))
    with pytest.raises(ConfigError, match="dropout"):
        SoftmaxOptions(dropout=1.0)


@pytest.mark.parametrize(
    "options", [SoftmaxOptions(), SoftmaxOptions(cap=5.0, scale="root", bias=True), MaskedOutputOptions()]
)
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_the_loss_is_the_sum_of_nll_and_has_its_gradients(
    options: SoftmaxOptions | MaskedOutputOptions, smoothing: float
) -> None:
    part = options.build(SITE, None).double()
    with torch.no_grad():
        for index, parameter in enumerate(part.parameters()):
            parameter.copy_(random(*parameter.shape, seed=index))
    hidden, labels = random(5, 6).double().requires_grad_(), torch.tensor([3, IGNORED, 0, 10, 7])
    leaves = [hidden, *part.parameters()]
    found = cast(Head, part).loss(hidden, labels, smoothing=smoothing)
    expected = cast(Head, part).nll(hidden, labels, smoothing=smoothing).sum()
    torch.testing.assert_close(found.float(), expected.float())
    for one, other in zip(torch.autograd.grad(found, leaves), torch.autograd.grad(expected, leaves), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)  # nll is float32


def test_dropout_falls_once_for_the_loss_too() -> None:
    part = SoftmaxOptions(dropout=0.5).build(SITE, None)
    assert isinstance(part, SoftmaxOutput)
    nn.init.normal_(part.project.weight, generator=torch.Generator().manual_seed(0))
    hidden, labels = random(5, 6), torch.tensor([3, IGNORED, 0, 10, 7])
    torch.manual_seed(0)
    expected = part.nll(hidden, labels).sum()
    torch.manual_seed(0)
    torch.testing.assert_close(part.loss(hidden, labels), expected)
    assert not torch.equal(part.eval().loss(hidden, labels), expected)
