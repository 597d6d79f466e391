"""The next-token objective against the worked example and closed forms."""

# B rows, T tokens, V vocabulary

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.objectives.samples import letters, rows, speaking, tiny
from trivium.data.batch import Batch
from trivium.data.packing import RowBatch
from trivium.models.transformer import States, build
from trivium.objectives.causal import CausalTask, restarting
from trivium.objectives.options import Causal


def prepared(given: RowBatch, task: CausalTask | None = None) -> Batch:
    return (task or CausalTask(length=3)).inputs(given, np.random.default_rng(0))


def loss(logits_BTV: Tensor, labels_BT: Tensor) -> Tensor:
    task, model = CausalTask(length=3), speaking(logits_BTV.shape[-1])
    return task.loss(model, States(logits_BTV, {}), {"labels": labels_BT})["tokens"].sum


def test_the_worked_example() -> None:
    batch = prepared(rows([[1, 3, 2, 4], [1, 2, 0, 0]], [4, 2]))
    labels_BT = batch.targets["labels"]
    assert batch.inputs["tokens"].tolist() == [[1, 3, 2], [1, 2, 0]]
    assert labels_BT.tolist() == [[3, 2, 4], [2, -100, -100]]
    assert batch.counts["tokens"] == 4
    logits_BTV = torch.zeros(2, 3, 5)
    for t in range(3):
        logits_BTV[:, t, (t + 1) % 5] = 1.0
    total = loss(logits_BTV, labels_BT).item()
    assert total == pytest.approx(6.619330, abs=1e-5)
    assert total / batch.counts["tokens"] == pytest.approx(1.654832, abs=1e-6)
    means = [loss(logits_BTV[[row]], labels_BT[[row]]).item() / count for row, count in ((0, 3), (1, 1))]
    assert sum(means) / 2 == pytest.approx(1.738166, abs=1e-6)  # what a mean of means would say


def test_a_batch_with_nothing_to_predict_has_a_loss_of_exactly_zero() -> None:
    batch = prepared(rows([[1, 0, 0, 0]], [1]))
    assert batch.counts["tokens"] == 0
    logits_BTV = torch.randn(1, 3, 5, generator=torch.Generator().manual_seed(0))
    assert loss(logits_BTV, batch.targets["labels"]).item() == 0


@pytest.mark.parametrize("sizes", [[1, 1, 1, 1, 1], [2, 3], [4, 1]])
@pytest.mark.parametrize("documents", ["join", "mask"])
def test_accumulated_micro_batches_give_the_gradient_of_the_full_batch(sizes: list[int], documents: str) -> None:
    rng = np.random.default_rng(0)
    ids, real = rng.integers(0, 11, (5, 7)).tolist(), [7, 2, 5, 1, 4]  # uneven: means of means would differ
    task = CausalTask(length=6, documents="mask" if documents == "mask" else "join")

    def gradient(parts: list[int]) -> list[Tensor]:
        model, start = build(tiny("decoder", 8, 11), seed=1), 0
        batches = []
        for size in parts:
            batches.append(prepared(rows(ids[start : start + size], real[start : start + size]), task))
            start += size
        count = sum(batch.counts["tokens"] for batch in batches)
        for batch in batches:
            part = task.loss(model, model(**batch.inputs), batch.targets)["tokens"].sum / count
            part.backward()  # type: ignore[no-untyped-call]
        return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]

    for whole, summed in zip(gradient([5]), gradient(sizes), strict=True):
        torch.testing.assert_close(summed, whole, atol=1e-6, rtol=1e-4)


def test_documents_are_kept_apart_only_if_asked() -> None:
    given = rows([[1, 2, 3, 4, 5, 6]], [6], [[1, 1, 1, 2, 2]])
    assert set(prepared(given).inputs) == {"tokens"}
    masked = prepared(given, CausalTask(length=5, documents="mask"))
    assert masked.inputs["documents"].tolist() == [[1, 1, 1, 2, 2]]
    assert masked.inputs["positions"].tolist() == [[0, 1, 2, 0, 1]]


@settings(max_examples=40, deadline=None)
@given(lengths=st.lists(st.integers(1, 5), min_size=1, max_size=5), padding=st.integers(0, 3))
def test_positions_begin_again_with_every_document(lengths: list[int], padding: int) -> None:
    numbers = [number for number, length in enumerate(lengths, 1) for _ in range(length)] + [0] * padding
    expected = [at for length in lengths for at in range(length)] + list(range(padding))
    assert restarting(torch.tensor([numbers])).tolist() == [expected]


@pytest.mark.parametrize("documents", ["join", "mask"])
def test_the_options_reach_the_task(documents: str) -> None:
    objective = Causal(documents="mask" if documents == "mask" else "join")
    task = objective.bind(letters(objective), tiny("decoder", 17, 9))
    assert (task.length, task.documents) == (17, documents)
