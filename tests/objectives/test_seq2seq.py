"""Pairs with teacher forcing and label smoothing (spec: objectives §9, §11)."""

# B pairs, T target tokens, V vocabulary

from __future__ import annotations

import math
from typing import Literal

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.data.test_packing import stream
from tests.objectives.samples import Heads, letters, octets, speaking, tiny
from trivium.data.batch import Batch
from trivium.data.bucketing import Pairs
from trivium.data.packing import RowBatch
from trivium.errors import ConfigError
from trivium.labels import IGNORED
from trivium.models.transformer import States, build
from trivium.objectives.options import OBJECTIVES, Seq2Seq
from trivium.objectives.seq2seq import Seq2SeqTask
from trivium.parts.losses import total

Kind = Literal["uniform", "others"]
Text = tuple[list[int], list[int]]
END, PAD = 9, 10  # the END of tests.data.test_packing
SIDE = st.lists(st.integers(0, 8), min_size=1, max_size=7)
TEXTS = st.lists(st.tuples(SIDE, SIDE), min_size=1, max_size=6)
PAIRS: list[Text] = [([1, 2, 3], [4]), ([5], [6, 7, 8, 0]), ([2], [3])]


def task(smoothing: float = 0.0, kind: Kind = "uniform", align: int = 1) -> Seq2SeqTask:
    """The task for a vocabulary of 11: nine letters, the END and the padding of these tests."""
    options = Seq2Seq(smoothing=smoothing, smoothing_kind=kind, align=align)
    known = letters(options)
    bound = options.bind(known, tiny("encoder-decoder", 16, 11))
    return Seq2SeqTask(length=16, pad=PAD, smoothing=bound.smoothing, align=align)


def rows(texts: list[Text]) -> RowBatch:
    return Pairs(stream([side for pair in texts for side in pair]), 16).take(np.arange(len(texts)))


def made(texts: list[Text], align: int = 1) -> Batch:
    return task(align=align).inputs(rows(texts), np.random.default_rng(0))


def test_it_is_in_the_table() -> None:
    assert OBJECTIVES["seq2seq"] is Seq2Seq


def test_the_tensors_of_three_pairs() -> None:
    batch = made(PAIRS)
    assert batch.inputs["source"].tolist() == [[1, 2, 3, END], [5, END, PAD, PAD], [2, END, PAD, PAD]]
    real = [[True] * 4, [True, True, False, False], [True, True, False, False]]
    assert batch.inputs["source_padding"].tolist() == real
    assert batch.inputs["tokens"].tolist() == [[PAD, 4, END, PAD, PAD], [PAD, 6, 7, 8, 0], [PAD, 3, END, PAD, PAD]]
    gone = [IGNORED] * 3
    assert batch.targets["labels"].tolist() == [[4, END, *gone], [6, 7, 8, 0, END], [3, END, *gone]]
    assert batch.counts["tokens"] == 9
    assert batch.inputs.keys() == {"source", "source_padding", "tokens"}


@settings(max_examples=100, deadline=None)
@given(TEXTS, st.sampled_from([1, 4, 8]))
def test_every_pair_is_what_a_plain_loop_gives(texts: list[Text], align: int) -> None:
    batch = made(texts, align)
    source, real = batch.inputs["source"].tolist(), batch.inputs["source_padding"].tolist()
    for row, (given_source, given_target) in enumerate(texts):
        wanted = [*given_source, END]
        assert source[row] == wanted + [PAD] * (len(source[row]) - len(wanted))
        assert real[row] == [True] * len(wanted) + [False] * (len(source[row]) - len(wanted))
        labels = [*given_target, END]
        width = batch.inputs["tokens"].shape[1]
        assert batch.targets["labels"][row].tolist() == labels + [IGNORED] * (width - len(labels))
        assert batch.inputs["tokens"][row, : len(labels)].tolist() == [PAD, *given_target]
    for side, name in ((0, "source"), (1, "tokens")):
        longest = max(len(pair[side]) + 1 for pair in texts)
        assert batch.inputs[name].shape[1] == -(-longest // align) * align
    assert batch.counts["tokens"] == sum(len(target) + 1 for _, target in texts)


@pytest.mark.parametrize(("kind", "expected"), [("none", 0.440190), ("uniform", 0.590190), ("others", 0.640190)])
def test_the_example_of_the_specification(kind: str, expected: float) -> None:
    options = Seq2Seq(smoothing=0.0) if kind == "none" else Seq2Seq(smoothing_kind=kind)  # type: ignore[arg-type]
    bound = options.bind(letters(options), tiny("encoder-decoder", 8, 4))
    states = States(torch.tensor([[[2.0, 1.0, 0.0, -1.0]]]), {})
    targets = {"labels": torch.tensor([[0]])}
    assert bound.loss(speaking(4), states, targets)["tokens"].sum.item() == pytest.approx(expected, abs=1e-6)
    assert bound.validation_loss(speaking(4), states, targets)["tokens"].sum.item() == pytest.approx(0.440190, abs=1e-6)


def spread(label: int, vocab: int, share: float, kind: Kind) -> Tensor:
    """The distribution that a smoothed label stands for."""
    if kind == "uniform":
        wanted = torch.full((vocab,), share / vocab, dtype=torch.float64)
        wanted[label] += 1 - share
        return wanted
    wanted = torch.full((vocab,), share / (vocab - 1), dtype=torch.float64)
    wanted[label] = 1 - share
    return wanted


@pytest.mark.parametrize("kind", ["uniform", "others"])
@pytest.mark.parametrize("share", [0.0, 0.1, 0.3])
def test_smoothing_is_the_cross_entropy_with_the_smoothed_label(kind: Kind, share: float) -> None:
    """And its gradient is the difference of the two distributions; a position that is padding has neither."""
    labels_BT = torch.tensor([[3, 0, 10], [7, IGNORED, IGNORED]])
    hidden = torch.randn(2, 3, 11, generator=torch.Generator().manual_seed(1)).requires_grad_()
    loss = task(share, kind).loss(speaking(11), States(hidden, {}), {"labels": labels_BT})["tokens"].sum
    loss.backward()  # type: ignore[no-untyped-call]
    expected, gradient = 0.0, torch.zeros(2, 3, 11, dtype=torch.float64)
    for row, column in ((0, 0), (0, 1), (0, 2), (1, 0)):
        wanted = spread(int(labels_BT[row, column]), 11, share, kind)
        logprobs = hidden[row, column].detach().double().log_softmax(-1)
        expected -= float((wanted * logprobs).sum())
        gradient[row, column] = logprobs.exp() - wanted
    assert loss.item() == pytest.approx(expected, rel=1e-5)
    assert hidden.grad is not None
    torch.testing.assert_close(hidden.grad.double(), gradient, rtol=1e-4, atol=1e-6)
    assert not hidden.grad[1, 1:].any()


def test_the_least_smoothed_loss_is_the_entropy_that_tensor2tensor_subtracts() -> None:
    vocab = 37_000
    options = Seq2Seq(smoothing_kind="others")
    bound = options.bind(letters(options), tiny("encoder-decoder", 8, vocab))
    states = States(spread(5, vocab, 0.1, "others").log()[None, None], {})

    class Plain:
        def logits(self, hidden: Tensor) -> Tensor:
            return hidden

        def nll(self, hidden: Tensor, labels: Tensor, *, smoothing: float = 0.0) -> Tensor:
            return torch.nn.functional.cross_entropy(hidden, labels, reduction="none", label_smoothing=smoothing)

        def loss(self, hidden: Tensor, labels: Tensor, *, smoothing: float = 0.0) -> Tensor:
            return self.nll(hidden, labels, smoothing=smoothing).sum()

    found = bound.loss(Heads(Plain()), states, {"labels": torch.tensor([[5]])})["tokens"].sum.item()
    assert found == pytest.approx(1.376948, abs=1e-6)


def test_a_model_that_knows_has_no_score_and_one_that_does_not_has_log_v() -> None:
    batch = made(PAIRS)
    known = torch.nn.functional.one_hot(batch.targets["labels"].clamp(min=0), 11).float() * 30
    bound = task(0.1)
    model = speaking(11)
    assert total(bound.validation_loss(model, States(known, {}), batch.targets), batch.counts) < 1e-6
    assert total(bound.loss(model, States(known, {}), batch.targets), batch.counts) > 1
    for losses in (bound.loss, bound.validation_loss):
        even = total(losses(model, States(torch.zeros_like(known), {}), batch.targets), batch.counts).item()
        assert even == pytest.approx(math.log(11), abs=1e-5)


@pytest.mark.parametrize("align", [1, 8])
def test_a_padded_batch_has_the_losses_of_its_pairs_one_by_one(align: int) -> None:
    model = build(tiny("encoder-decoder", 16, 11), seed=1).eval()
    bound = task(0.1, align=align)

    def losses(texts: list[Text]) -> list[float]:
        batch = bound.inputs(rows(texts), np.random.default_rng(0))
        with torch.no_grad():
            states = model(**batch.inputs)
        kinds = (bound.loss, bound.validation_loss)
        return [kind(model, states, batch.targets)["tokens"].sum.item() for kind in kinds]

    alone = np.array([losses([pair]) for pair in PAIRS])
    assert losses(PAIRS) == pytest.approx(alone.sum(axis=0).tolist(), rel=1e-5)
    assert losses(PAIRS[::-1]) == pytest.approx(losses(PAIRS), rel=1e-5)
    assert alone[0].tolist() != pytest.approx(alone[1].tolist(), rel=1e-3)


def test_what_cannot_be_is_refused_in_a_sentence() -> None:
    with pytest.raises(ConfigError, match=r"smoothing: 1\.0 is not in \[0, 1\); try 0\.1"):
        Seq2Seq(smoothing=1.0)
    with pytest.raises(ConfigError, match="align: 0 is less than 1"):
        Seq2Seq(align=0)
    options = Seq2Seq(smoothing=0.9, smoothing_kind="others")
    with pytest.raises(ConfigError, match=r"objective\.smoothing: 0\.9 makes a label the least likely id; try 0\.1"):
        options.bind(letters(options), tiny("encoder-decoder", 8, 5))
    with pytest.raises(ConfigError, match="the tokenizer has no special token <pad>"):
        Seq2Seq().bind(octets(OBJECTIVES["causal"]()), tiny("encoder-decoder", 8, 300))
