"""Two heads in one loss: against Hugging Face's pretraining loss, and against every cut into micro-batches."""

# B rows, T tokens

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import BertConfig, BertForPreTraining

from tests.objectives.samples import cut_rows, octets, part, random_rows, tiny
from tests.oracle.copying import copy, enliven
from trivium.data.batch import Batch
from trivium.data.packing import RowBatch
from trivium.labels import IGNORED
from trivium.models.presets import bert
from trivium.models.transformer import Transformer, build
from trivium.objectives.objective import Task
from trivium.objectives.options import Masked, Objective, Spans
from trivium.objectives.second import beside, mean
from trivium.parts.options.boundary import SpanBoundary
from trivium.parts.options.embeddings import Tokens
from trivium.parts.options.sentence import Pooler

PAIRS: dict[str, Any] = {"embedding": Tokens(segments=2), "sentence": Pooler()}
CASES: dict[str, tuple[Objective, dict[str, Any]]] = {
    "pairs": (Masked(frame="pair"), PAIRS),
    "spans": (Spans(rate=0.4), {"boundary": SpanBoundary(rows=4)}),
}


def sums(task: Task, model: Transformer, batch: Batch) -> Tensor:
    states = model(**batch.inputs)
    return beside(task.loss(model.head, states, batch.targets), model, states, batch.targets)


def made(name: str) -> tuple[Task, Transformer, RowBatch]:
    objective, places = CASES[name]
    tokenizer = octets(objective)
    config = tiny("encoder", 40, tokenizer.size, **places)
    task = objective.bind(tokenizer, config)
    cut = cut_rows(12, task.length, 256) if name == "pairs" else random_rows(12, task.length, 256)
    return task, build(config, seed=0), cut


def test_the_loss_of_pairs_is_that_of_bert_for_pretraining() -> None:
    objective = Masked(frame="pair")
    tokenizer = octets(objective)
    shape = bert.Shape(2, 24, 3, vocab=tokenizer.size)
    sizes = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 3, "intermediate_size": 96}
    theirs = BertForPreTraining(BertConfig(vocab_size=shape.vocab, max_position_embeddings=40, **sizes)).eval()
    ours = build(replace(bert.bert(shape), context=40)).eval()
    enliven(theirs, seed=0)
    copy(theirs, ours, "bert")
    task = objective.bind(tokenizer, ours.config)
    batch = task.inputs(cut_rows(12, task.length, 256), np.random.default_rng(0))
    tokens_BT = batch.inputs["tokens"]
    labels = torch.full((tokens_BT.numel(),), IGNORED)
    real = batch.targets["labels"] != IGNORED
    labels[batch.targets["where"][real]] = batch.targets["labels"][real]
    with torch.no_grad():
        other = theirs(
            tokens_BT,
            attention_mask=batch.inputs["padding"].long(),
            token_type_ids=batch.inputs["segments"],
            labels=labels.view_as(tokens_BT),
            next_sentence_label=batch.targets["classes"],
        )
        loss = mean(sums(task, ours, batch), (batch.count, batch.second))
    assert set(batch.targets["classes"].tolist()) == {0, 1}
    torch.testing.assert_close(loss, other.loss, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("cuts", [[6], [1, 2, 9], list(range(1, 12))])
def test_the_loss_of_a_step_does_not_depend_on_its_micro_batches(name: str, cuts: list[int]) -> None:
    task, model, rows = made(name)
    gradients = []
    for borders in ([], cuts):
        rng = np.random.default_rng(5)
        batches = [
            task.inputs(part(rows, list(range(start, stop))), rng)
            for start, stop in zip([0, *borders], [*borders, 12], strict=True)
        ]
        counts = [sum(batch.count for batch in batches), sum(batch.second for batch in batches)]
        model.zero_grad()
        loss = torch.zeros(())
        for batch in batches:
            share = mean(sums(task, model, batch), counts)
            share.backward()  # type: ignore[no-untyped-call]
            loss += share.detach()
        gradients.append([loss, *(p.grad.clone() for p in model.parameters() if p.grad is not None)])
    assert len(gradients[0]) == 1 + len(list(model.parameters()))
    for whole, pieces in zip(*gradients, strict=True):
        torch.testing.assert_close(pieces, whole, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", CASES)
def test_the_loss_of_a_step_is_the_sum_of_two_plain_means(name: str) -> None:
    task, model, rows = made(name)
    batch = task.inputs(rows, np.random.default_rng(0))
    assert 0 < batch.second != batch.count
    first, second = sums(task, model, batch)
    assert mean(torch.stack((first, second)), (batch.count, batch.second)).item() == pytest.approx(
        first.item() / batch.count + second.item() / batch.second, rel=1e-6
    )
    assert mean(first, (batch.count, 0)).item() == pytest.approx(first.item() / batch.count, rel=1e-6)


def test_a_step_without_labels_has_a_loss_of_exactly_zero() -> None:
    assert mean(torch.zeros(2), (0, 0)).item() == 0
    assert mean(torch.zeros(()), (0, 0)).item() == 0


@pytest.mark.parametrize("sums", [torch.tensor(6.0), torch.tensor([6.0, 8.0])])
def test_counts_on_the_device_give_the_same_mean(sums: Tensor) -> None:
    for counts in ((3, 4), (0, 0)):
        assert torch.equal(mean(sums, torch.tensor(counts, dtype=torch.float32)), mean(sums, counts))
