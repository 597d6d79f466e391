"""Two heads in one loss: against Hugging Face's pretraining loss, and against every cut into micro-batches."""

# B rows, T tokens

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import BertConfig, BertForPreTraining

from tests.objectives.samples import cut_rows, octets, part, random_rows, tiny
from tests.oracle.copying import copy, enliven
from trivium.data.batch import Batch, add_counts
from trivium.data.packing import RowBatch
from trivium.labels import IGNORED
from trivium.models.presets import bert
from trivium.models.transformer import Transformer, build
from trivium.objectives.objective import Task
from trivium.objectives.options import Masked, Objective, Spans
from trivium.parts.losses import Losses, total
from trivium.parts.options.boundary import SpanBoundaryOptions
from trivium.parts.options.embeddings import TokenEmbeddingOptions
from trivium.parts.options.sentence import PoolerOptions

PAIRS: dict[str, Any] = {"embedding": TokenEmbeddingOptions(segments=2), "sentence": PoolerOptions()}
CASES: dict[str, tuple[Objective, dict[str, Any]]] = {
    "pairs": (Masked(frame="pair"), PAIRS),
    "spans": (Spans(rate=0.4), {"boundary": SpanBoundaryOptions(rows=4)}),
}
NAMES = {"pairs": "sentences", "spans": "boundary"}


def losses(task: Task, model: Transformer, batch: Batch) -> Losses:
    return task.loss(model, model(**batch.inputs), batch.targets)


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
        loss = total(losses(task, ours, batch), batch.counts)
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
        counts = add_counts(batch.counts for batch in batches)
        model.zero_grad()
        loss = torch.zeros(())
        for batch in batches:
            share = total(losses(task, model, batch), counts)
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
    tokens, other = losses(task, model, batch).items()
    assert tokens[0] == tokens[1].over == "tokens"
    assert other[0] == other[1].over == NAMES[name]
    assert batch.counts.keys() == {"tokens", "sequences", NAMES[name]}
    assert 0 < batch.counts[other[0]] != batch.counts["tokens"]
    assert total(dict((tokens, other)), batch.counts).item() == pytest.approx(
        sum(loss.sum.item() / batch.counts[key] for key, loss in (tokens, other)), rel=1e-6
    )
