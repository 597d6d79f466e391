"""What every objective promises, whatever it asks for (spec: objectives §11)."""

# B rows, T tokens, V vocabulary, D width

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.objectives.samples import cut_rows, letters, octets, part, random_rows, scripted, speaking, tiny
from trivium.data.batch import Batch, add_counts
from trivium.data.packing import RowBatch
from trivium.errors import ConfigError
from trivium.labels import IGNORED
from trivium.models.config import ModelConfig
from trivium.models.transformer import States, build
from trivium.objectives.objective import Task
from trivium.objectives.options import OBJECTIVES, Causal, Denoise, Masked, Objective, Prefix, Seq2Seq, Spans
from trivium.parts.losses import total
from trivium.parts.options.boundary import SpanBoundaryOptions
from trivium.parts.options.embeddings import TokenEmbeddingOptions
from trivium.parts.options.sentence import PoolerOptions
from trivium.text.tokenizer import Tokenizer


class Case(NamedTuple):
    objective: Objective
    family: str
    context: int = 48
    places: Mapping[str, Any] = {}

    @property
    def tokenizer(self) -> Tokenizer:
        return octets(self.objective)

    @property
    def model(self) -> ModelConfig:
        return tiny(self.family, self.context, self.tokenizer.size, **self.places)

    @property
    def task(self) -> Task:
        return self.objective.bind(self.tokenizer, self.model)

    def rows(self, *, last: int = 0) -> RowBatch:
        if isinstance(self.objective, Masked) and self.objective.frame == "pair":
            return cut_rows(5, self.task.length, 256, last=last)
        return random_rows(5, self.task.length, 256, last=last)

    @property
    def draws(self) -> tuple[int, ...]:
        """How many random numbers a row takes."""
        if isinstance(self.objective, Masked):
            pair = 6 + self.task.length if self.objective.frame == "pair" else 0
            return () if self.objective.copies else (3 * self.context + pair,)
        if isinstance(self.objective, Spans):
            return (4, self.context)
        return (self.task.length,) if isinstance(self.objective, Denoise) else ()

    @property
    def second(self) -> float:
        """The loss that a second head begins with."""
        if "boundary" in self.places:
            return math.log(self.tokenizer.size)
        return math.log(2) if "sentence" in self.places else 0.0


PAIRED = {"embedding": TokenEmbeddingOptions(segments=2), "sentence": PoolerOptions()}

CASES = {
    "causal": Case(Causal(), "decoder"),
    "causal, documents": Case(Causal(documents="mask"), "decoder"),
    "masked": Case(Masked(), "encoder"),
    "masked, coins": Case(Masked(mode="bernoulli"), "encoder"),
    "masked, words": Case(Masked(unit="word", rate=0.4), "encoder"),
    "masked, word coins": Case(Masked(unit="word", mode="bernoulli"), "encoder"),
    "masked, bert": Case(Masked(frame="bert", max_predictions=3, draw="all"), "encoder"),
    "masked, static": Case(Masked(copies=3), "encoder"),
    "masked, pairs": Case(Masked(frame="pair"), "encoder", places=PAIRED),
    "masked, static pairs": Case(Masked(frame="pair", copies=2, unit="word"), "encoder", places=PAIRED),
    "spans": Case(Spans(), "encoder", places={"boundary": SpanBoundaryOptions()}),
    "spans, alone": Case(Spans(frame="none", rate=0.4), "encoder"),
    "denoise": Case(Denoise(), "encoder-decoder"),
    "denoise, coins": Case(Denoise(noise="iid"), "encoder-decoder"),
    "denoise, joined": Case(Denoise(), "decoder"),
    "denoise, joined, all": Case(Denoise(loss_on="all"), "decoder"),
    "denoise, joined, prefix": Case(Denoise(attention="prefix"), "decoder"),
    "denoise, joined, coins": Case(Denoise(noise="iid", attention="prefix"), "decoder"),
    "prefix": Case(Prefix(), "decoder"),
    "prefix, two sides": Case(Prefix(), "encoder-decoder"),
}


@pytest.fixture(params=list(CASES.values()), ids=list(CASES))
def case(request: pytest.FixtureRequest) -> Case:
    assert isinstance(request.param, Case)
    return request.param


def drawn(case: Case, given: RowBatch, seed: int = 0) -> Batch:
    return case.task.inputs(given, np.random.default_rng(seed))


def same(first: Batch, second: Batch) -> bool:
    tensors, others = ({**batch.inputs, **batch.targets} for batch in (first, second))
    return tensors.keys() == others.keys() and all(torch.equal(tensors[name], others[name]) for name in tensors)


def spread(batch: Batch) -> Tensor:
    """The labels [B, T], wherever they were gathered from."""
    labels = batch.targets["labels"]
    if "where" not in batch.targets:
        return labels
    spread = torch.full_like(batch.inputs["tokens"], IGNORED).flatten()
    real = labels != IGNORED
    spread[batch.targets["where"][real]] = labels[real]
    return spread.view_as(batch.inputs["tokens"])


def test_every_objective_is_tried_in_every_family() -> None:
    tried = {(type(case.objective), case.family) for case in CASES.values()}
    # the rows of seq2seq are pairs, and it has a file of its own
    wanted = {kind for kind in OBJECTIVES.values() if kind is not Seq2Seq}
    assert tried == {(kind, family) for kind in wanted for family in kind().families}


def test_the_same_seed_gives_the_same_tensors_and_another_seed_others(case: Case) -> None:
    given = case.rows()
    assert same(drawn(case, given), drawn(case, given))
    assert same(drawn(case, given), drawn(case, given, seed=1)) == isinstance(case.objective, Causal)


def test_rows_are_not_changed(case: Case) -> None:
    given = case.rows(last=3)
    before = [array.copy() for array in (*given[:4], given.stream.ids)]
    drawn(case, given)
    for array, old in zip((*given[:4], given.stream.ids), before, strict=True):
        np.testing.assert_equal(array, old)


@pytest.mark.parametrize("sizes", [[1, 4], [2, 2, 1], [1, 1, 1, 1, 1]])
def test_cutting_a_batch_into_micro_batches_changes_nothing(case: Case, sizes: list[int]) -> None:
    given, rng, start = case.rows(), np.random.default_rng(3), 0
    whole = drawn(case, given, seed=3)
    batches = []
    for size in sizes:
        batches.append(case.task.inputs(part(given, slice(start, start + size)), rng))
        start += size
    for name, tensor in whole.inputs.items():
        assert torch.equal(tensor, torch.cat([batch.inputs[name] for batch in batches]))
    assert torch.equal(spread(whole), torch.cat([spread(batch) for batch in batches]))
    assert whole.counts == add_counts(batch.counts for batch in batches)
    assert (len(whole.counts) > 2) == bool(case.second)
    assert whole.counts["sequences"] == sum(len(next(iter(batch.inputs.values()))) for batch in batches)


def test_permuting_rows_permutes_labels(case: Case) -> None:
    order = [3, 0, 4, 1, 2]
    given = case.rows(last=5)
    draws = np.random.default_rng(0).random((5, *case.draws))
    first = case.task.inputs(given, scripted(draws))
    moved = case.task.inputs(part(given, order), scripted(draws[order]))
    assert torch.equal(spread(first)[order], spread(moved))
    assert all(torch.equal(first.inputs[name][order], moved.inputs[name]) for name in moved.inputs)


def test_shapes_depend_on_the_shape_of_the_rows_alone(case: Case) -> None:
    """So that a compiler sees one of each."""
    given = case.rows()
    shapes = {
        tuple((name, tensor.shape) for name, tensor in {**batch.inputs, **batch.targets}.items())
        for batch in (drawn(case, given, seed) for seed in range(50))
    }
    assert len(shapes) == 1
    assert max(tensor.shape[1] for tensor in drawn(case, given).inputs.values() if tensor.dim() > 1) <= case.context


@pytest.mark.parametrize("last", [0, 1, 2, 7])
def test_the_count_is_the_number_of_labels_and_every_id_exists(case: Case, last: int) -> None:
    batch = drawn(case, case.rows(last=last))
    labels = batch.targets["labels"]
    assert batch.counts["tokens"] == int((labels != IGNORED).sum()) > 0
    ids = torch.cat([labels[labels != IGNORED], *(batch.inputs[name].flatten() for name in ("tokens",))])
    assert 0 <= int(ids.min()) <= int(ids.max()) < case.tokenizer.size


def test_a_model_that_knows_has_no_loss_and_one_that_does_not_has_log_v(case: Case) -> None:
    batch = drawn(case, case.rows(last=6))
    vocab = case.tokenizer.size
    known_BTV = torch.nn.functional.one_hot(spread(batch).clamp(min=0), vocab).float() * 30
    loss = case.task.loss(speaking(vocab), States(known_BTV, {}), batch.targets)["tokens"].sum.item()
    assert loss / batch.counts["tokens"] < 1e-6
    unknown_BTV = torch.zeros_like(known_BTV)
    loss = case.task.loss(speaking(vocab), States(unknown_BTV, {}), batch.targets)["tokens"].sum.item()
    assert loss / batch.counts["tokens"] == pytest.approx(math.log(vocab), abs=1e-5)


def test_the_loss_is_the_plain_sum_over_all_positions(case: Case) -> None:
    batch = drawn(case, case.rows(last=6))
    labels_BT = spread(batch)
    hidden_BTV = torch.randn(*labels_BT.shape, case.tokenizer.size, generator=torch.Generator().manual_seed(0))
    gradients = []
    for ours in (True, False):
        states = hidden_BTV.clone().requires_grad_()
        if ours:
            loss = case.task.loss(speaking(case.tokenizer.size), States(states, {}), batch.targets)["tokens"].sum
        else:
            loss = torch.nn.functional.cross_entropy(
                states.flatten(0, 1), labels_BT.flatten(), ignore_index=IGNORED, reduction="sum"
            )
        loss.backward()  # type: ignore[no-untyped-call]
        assert states.grad is not None
        gradients.append((loss.detach(), states.grad))
    for ours_, plain in zip(*gradients, strict=True):
        torch.testing.assert_close(ours_, plain)


@pytest.mark.parametrize("last", [0, 6])
def test_a_model_of_the_family_takes_the_inputs_and_learns_from_them(case: Case, last: int) -> None:
    model = build(case.model, seed=1)
    batch = drawn(case, case.rows(last=last))
    states = model(**batch.inputs)
    losses = case.task.loss(model, states, batch.targets)
    assert next(iter(losses)) == "tokens"
    assert {"sequences", *(loss.over for loss in losses.values())} == batch.counts.keys()
    loss = total(losses, batch.counts)
    loss.backward()  # type: ignore[no-untyped-call]
    assert loss.item() == pytest.approx(math.log(case.tokenizer.size) + case.second, rel=0.2)
    assert all(weight.grad is not None and weight.grad.isfinite().all() for weight in model.parameters())


def test_a_short_row_has_the_loss_it_has_without_its_padding(case: Case) -> None:
    """Two rows of which the second is short; its labels alone, then the same tokens without what fills them up."""
    model = build(case.model, seed=1).eval()
    given = part(case.rows(last=6), [4])
    batch = drawn(case, given)
    sizes = {name: _end(batch, name) for name in ("tokens", "source") if name in batch.inputs}
    cut = {
        name: tensor[:, : sizes["source" if name.startswith("source") else "tokens"]] if tensor.dim() > 1 else tensor
        for name, tensor in batch.inputs.items()
        if "padding" not in name
    }
    assert cut["tokens"].shape[1] < batch.inputs["tokens"].shape[1]
    with torch.no_grad():
        whole = case.task.loss(model, model(**batch.inputs), batch.targets)["tokens"].sum
        labels_BT = spread(batch)[:, : sizes["tokens"]]
        plain = model.head.nll(model(**cut).hidden.flatten(0, 1), labels_BT.flatten()).sum()
    torch.testing.assert_close(whole, plain, rtol=1e-5, atol=1e-5)


def _end(batch: Batch, name: str) -> int:
    """Where the padding of the only row begins."""
    mask = batch.inputs.get("source_padding" if name == "source" else "padding")
    if mask is not None:
        return int(mask.sum())
    return int((spread(batch)[0] != IGNORED).nonzero().max()) + 1 if name == "tokens" else batch.inputs[name].shape[1]


@pytest.mark.parametrize("kind", OBJECTIVES)
def test_a_tokenizer_without_the_specials_is_refused_in_a_sentence(kind: str) -> None:
    objective = OBJECTIVES[kind]()
    plain = letters(Causal())
    family = sorted(objective.families)[0]
    if not objective.specials:
        objective.bind(plain, tiny(family, 24, plain.size))
        return
    with pytest.raises(ConfigError, match=r"objective: the tokenizer has no special token .*; train from the text"):
        objective.bind(plain, tiny(family, 24, plain.size))
