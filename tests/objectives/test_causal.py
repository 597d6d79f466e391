"""The next-token objective against the worked example and closed forms."""

# B rows, T tokens, V vocabulary

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from trivium.data.batch import Batch
from trivium.data.packing import RowBatch
from trivium.models.config import Block, ModelConfig, Stack
from trivium.models.transformer import States, build
from trivium.objectives.causal import Causal, restarting
from trivium.parts.output import IGNORED, Head, Softmax, SoftmaxOutput
from trivium.parts.positions import Rotary
from trivium.parts.site import Site


def speaking(vocab: int) -> Head:
    """A head whose logits are the states themselves."""
    head = Softmax().build(Site(width=vocab, context=1, vocab=vocab), None)
    assert isinstance(head, SoftmaxOutput)
    with torch.no_grad():
        head.project.weight.copy_(torch.eye(vocab))
    return head


def rows(ids: list[list[int]], real: list[int], documents: list[list[int]] | None = None) -> RowBatch:
    """Rows whose first `real` tokens are text."""
    ids_NU = np.array(ids, dtype=np.int64)
    real_NT = np.arange(1, ids_NU.shape[1]) < np.array(real)[:, None]
    numbers = real_NT.astype(np.int32) if documents is None else np.array(documents, dtype=np.int32)
    return RowBatch(ids_NU, np.where(real_NT, ids_NU[:, 1:], IGNORED), numbers)


def prepared(given: RowBatch, objective: Causal | None = None) -> Batch:
    return (objective or Causal()).inputs(given, np.random.default_rng(0))


def loss(logits_BTV: Tensor, batch: Batch) -> Tensor:
    return Causal().loss(speaking(logits_BTV.shape[-1]), States(logits_BTV, {}), batch.labels)


def test_the_worked_example() -> None:
    batch = prepared(rows([[1, 3, 2, 4], [1, 2, 0, 0]], [4, 2]))
    assert batch.inputs["tokens"].tolist() == [[1, 3, 2], [1, 2, 0]]
    assert batch.labels.tolist() == [[3, 2, 4], [2, -100, -100]]
    assert batch.count == 4
    logits_BTV = torch.zeros(2, 3, 5)
    for t in range(3):
        logits_BTV[:, t, (t + 1) % 5] = 1.0
    total = loss(logits_BTV, batch).item()
    assert total == pytest.approx(6.619330, abs=1e-5)
    assert total / batch.count == pytest.approx(1.654832, abs=1e-6)
    means = [
        loss(logits_BTV[[row]], Batch(inputs={}, labels=batch.labels[[row]], count=count)).item() / count
        for row, count in ((0, 3), (1, 1))
    ]
    assert sum(means) / 2 == pytest.approx(1.738166, abs=1e-6)  # what a mean of means would say


def test_a_model_that_knows_has_no_loss_and_one_that_does_not_has_log_v() -> None:
    batch = prepared(rows([[1, 3, 2, 4], [1, 2, 0, 0]], [4, 2]))
    known = torch.nn.functional.one_hot(batch.labels.clamp(min=0), 5).float() * 30
    assert loss(known, batch).item() / batch.count < 1e-6
    assert loss(torch.zeros(2, 3, 5), batch).item() / batch.count == pytest.approx(math.log(5), abs=1e-6)


def test_a_batch_with_nothing_to_predict_has_a_loss_of_exactly_zero() -> None:
    batch = prepared(rows([[1, 0, 0, 0]], [1]))
    assert batch.count == 0
    assert loss(torch.randn(1, 3, 5, generator=torch.Generator().manual_seed(0)), batch).item() == 0


def test_permuting_rows_permutes_labels_and_keeps_the_loss() -> None:
    ids, real = [[1, 3, 2, 4], [1, 2, 0, 0], [4, 4, 1, 0]], [4, 2, 3]
    order = [2, 0, 1]
    first, moved = prepared(rows(ids, real)), prepared(rows([ids[i] for i in order], [real[i] for i in order]))
    assert torch.equal(first.labels[order], moved.labels)
    logits_BTV = torch.randn(3, 3, 5, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(loss(logits_BTV, first), loss(logits_BTV[order], moved))


@pytest.mark.parametrize("sizes", [[1, 1, 1, 1, 1], [2, 3], [4, 1]])
@pytest.mark.parametrize("documents", ["join", "mask"])
def test_accumulated_micro_batches_give_the_gradient_of_the_full_batch(sizes: list[int], documents: str) -> None:
    config = ModelConfig(width=16, context=8, vocab=11, decoder=Stack(layers=1, block=Block(position=Rotary())))
    rng = np.random.default_rng(0)
    ids, real = rng.integers(0, 11, (5, 7)).tolist(), [7, 2, 5, 1, 4]  # uneven: means of means would differ
    objective = Causal(documents="mask" if documents == "mask" else "join")

    def gradient(parts: list[int]) -> list[Tensor]:
        model, start = build(config, seed=1), 0
        batches = []
        for size in parts:
            batches.append(prepared(rows(ids[start : start + size], real[start : start + size]), objective))
            start += size
        count = sum(batch.count for batch in batches)
        for batch in batches:
            part = objective.loss(model.head, model(**batch.inputs), batch.labels) / count
            part.backward()  # type: ignore[no-untyped-call]
        return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]

    for whole, summed in zip(gradient([5]), gradient(sizes), strict=True):
        torch.testing.assert_close(summed, whole, atol=1e-6, rtol=1e-4)


def test_documents_are_kept_apart_only_if_asked() -> None:
    given = rows([[1, 2, 3, 4, 5, 6]], [6], [[1, 1, 1, 2, 2]])
    assert set(prepared(given).inputs) == {"tokens"}
    masked = prepared(given, Causal(documents="mask"))
    assert masked.inputs["documents"].tolist() == [[1, 1, 1, 2, 2]]
    assert masked.inputs["positions"].tolist() == [[0, 1, 2, 0, 1]]


@settings(max_examples=40, deadline=None)
@given(lengths=st.lists(st.integers(1, 5), min_size=1, max_size=5), padding=st.integers(0, 3))
def test_positions_begin_again_with_every_document(lengths: list[int], padding: int) -> None:
    numbers = [number for number, length in enumerate(lengths, 1) for _ in range(length)] + [0] * padding
    expected = [at for length in lengths for at in range(length)] + list(range(padding))
    assert restarting(torch.tensor([numbers])).tolist() == [expected]


def test_the_objective_draws_nothing() -> None:
    given = rows([[1, 3, 2, 4]], [4])
    first, second = (Causal().inputs(given, np.random.default_rng(seed)) for seed in (0, 1))
    assert torch.equal(first.inputs["tokens"], second.inputs["tokens"])
    assert torch.equal(first.labels, second.labels)
