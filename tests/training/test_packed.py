"""Runs on packed pairs: the same losses as one by one, in one shape, exact after a stop."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch._dynamo.testing import CompileCounter

from tests.training.conftest import create, finish, resume, silent, start
from tests.training.test_families import quiet
from tests.training.test_pairs import files, paired  # noqa: F401
from tests.training.test_resume import assert_goes_on_exactly
from trivium import config as settings
from trivium.data.bucketing import Pairs
from trivium.data.packed import PackedPairs
from trivium.errors import CheckpointError, ConfigError
from trivium.renamed import restore_old_keys
from trivium.training.build_job import build_job
from trivium.training.context import open_context
from trivium.training.job import Job
from trivium.training.loop import updates
from trivium.training.recipe import Recipe
from trivium.training.setup import create_run
from trivium.training.validate import validate

Make = Callable[..., Recipe]
POSITIONS = ["sinusoidal", "learned", "t5", "rotary", "alibi", "shaw"]


@pytest.fixture
def packed(paired: Make) -> Make:  # noqa: F811
    return lambda **more: paired(**{"data.pack": 24, "batch.tokens": 0, "batch.micro": 2, **more})


def packed_rows(job: Job) -> PackedPairs:
    assert isinstance(job.rows, PackedPairs)
    return job.rows


def summed(job: Job, rows: Pairs | PackedPairs, numbers: list[int]) -> tuple[float, list[torch.Tensor]]:
    """The summed loss of some rows, and its gradients."""
    batch = job.task.inputs(rows.take(np.array(numbers)), np.random.default_rng(0))
    job.model.train()
    job.model.zero_grad()
    loss = job.compute(batch)["tokens"].sum
    loss.backward()  # type: ignore[no-untyped-call]
    return float(loss.detach()), [
        parameter.grad.clone() for parameter in job.model.parameters() if parameter.grad is not None
    ]


@pytest.mark.parametrize("position", POSITIONS)
def test_packed_pairs_have_the_loss_and_gradients_of_padded_ones(packed: Make, tmp_path: Path, position: str) -> None:
    """Both sides, both masks and restarting positions: the same pairs one by one in rows of their own."""
    sides = {f"model.{side}.block.position.kind": position for side in ("encoder", "decoder")}
    job = build_job(create(packed(**quiet("encoder-decoder"), **sides), tmp_path), 1)
    rows = packed_rows(job)
    loss, gradients = summed(job, rows, [0, len(rows) - 1])
    inside = [int(pair) for row in (0, len(rows) - 1) for pair in rows._row(0, row)]
    assert len(inside) > 4
    wanted, others = summed(job, rows.pairs, inside)
    assert loss == pytest.approx(wanted, rel=1e-5)
    for one, other in zip(gradients, others, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_no_position_is_left_without_a_key(packed: Make, tmp_path: Path) -> None:
    job = build_job(create(packed(), tmp_path), 1)
    rows = packed_rows(job)
    batch = job.task.inputs(rows.take(np.arange(len(rows))), np.random.default_rng(0))
    numbers = batch.inputs
    seen = numbers["documents"][:, :, None] == numbers["source_documents"][:, None, :]
    assert seen.any(dim=2).all()
    assert (numbers["positions"] < job.model.config.context).all()
    real = batch.targets["labels"] >= 0
    # a target begins with the padding token and goes on with the label before
    begins = numbers["positions"] == 0
    assert len(set(numbers["tokens"][begins].tolist())) == 1
    assert begins[:, 1:][real[:, 1:]].sum() + len(rows) == len(rows.pairs)
    before = batch.targets["labels"][:, :-1][real[:, 1:] & ~begins[:, 1:]]
    assert torch.equal(numbers["tokens"][:, 1:][real[:, 1:] & ~begins[:, 1:]], before)


def test_an_epoch_of_updates_sees_every_label_once(packed: Make, tmp_path: Path) -> None:
    job = build_job(create(packed(**{"batch.rows": 1, "batch.micro": 1}), tmp_path), 1000)
    for epoch in (1, 2):
        for _ in islice(updates(job), len(packed_rows(job))):
            pass
        assert job.tokens == epoch * packed_rows(job).labels


def test_resuming_gives_the_same_bits(packed: Make, tmp_path: Path) -> None:
    recipe = packed(**{"checkpoint.every": 1, "checkpoint.keep": 30})
    straight = start(recipe, tmp_path / "straight")
    finish(straight)
    for step in (4, 13):  # in the first epoch, and in a later one
        assert_goes_on_exactly(straight.folder, step, tmp_path)
    with pytest.raises(CheckpointError, match=r"data\.pack was 24, not 32"):
        resume(straight.folder, **{"data.pack": 32})


def test_validation_is_that_of_pairs_in_rows_of_their_own(packed: Make, tmp_path: Path) -> None:
    job = build_job(create(packed(), tmp_path / "packed"), 1)
    rows = create(packed(), tmp_path / "again").valid
    assert isinstance(rows, PackedPairs)
    assert validate(job, rows, limit=0).loss == pytest.approx(validate(job, rows.pairs, limit=0).loss, rel=1e-5)


def test_all_batches_are_one_program(packed: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counter, compiled = CompileCounter(), torch.compile
    monkeypatch.setattr(
        torch, "compile", lambda function, dynamic: compiled(function, backend=counter, dynamic=dynamic)
    )
    few = {"model.encoder.layers": 1, "model.decoder.layers": 1, "batch.micro": 0}
    job = build_job(create(packed(compile="on", **few), tmp_path), 12)
    for _ in updates(job):
        pass
    assert counter.frame_count == 1


def test_what_does_not_go_together_is_refused(packed: Make, small: Make, tmp_path: Path) -> None:
    cases: list[tuple[Recipe, str]] = [
        (small(**{"data.pack": 16}), r"data\.pack: text fills its rows anyway"),
        (packed(**{"batch.tokens": 60}), r"batch\.tokens: packed pairs fill rows of one length; set batch\.rows"),
        (packed(**{"data.pack": 5}), r"data\.pack: 5 is less than the longest pair's 1\d"),
        (packed(**{"data.pack": 33}), r"data\.pack: 33 is more than a row may have; set it to 32"),
    ]
    for recipe, message in cases:
        with pytest.raises(ConfigError, match=message):
            create(recipe, tmp_path / "runs")
    assert not (tmp_path / "runs").exists()


def test_how_full_the_rows_are_is_told(packed: Make, tmp_path: Path) -> None:
    said: list[str] = []
    context = create_run(packed(**{"data.valid": 0.0}), tmp_path, say=said.append, tick=silent)
    rows = context.train
    assert isinstance(rows, PackedPairs)
    assert said[-1] == (
        f"100 pairs fill {len(rows)} rows of {sum(rows.widths)} tokens; {rows.padding:.1%} of them is padding"
    )


def test_a_budget_in_tokens_counts_labels(packed: Make, tmp_path: Path) -> None:
    more: dict[str, Any] = {"budget.steps": 0, "budget.tokens": 2000, "batch.rows": 2}
    context = create(packed(**more), tmp_path)
    job = build_job(context, context.recipe.budget.steps)
    for _ in updates(job):
        pass
    assert job.tokens == pytest.approx(2000, rel=0.1)


def test_rows_are_filled_once(packed: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes seconds for millions of pairs, and a session asks for its rows at every step."""
    made: list[PackedPairs] = []
    inner = PackedPairs.__init__

    def counted(this: PackedPairs, *given: Any) -> None:
        made.append(this)
        inner(this, *given)

    monkeypatch.setattr(PackedPairs, "__init__", counted)
    context = create(packed(), tmp_path)
    made.clear()
    context = open_context(context.folder, context.recipe)
    other = replace(context, recipe=replace(context.recipe, compile="on"))
    assert len({id(rows) for which in (context, other, context) for rows in (which.train, which.valid)}) == 2
    assert len(made) == 2
    assert replace(context, recipe=replace(context.recipe, seed=5)).train is not context.train


def test_a_run_from_before_there_was_packing_goes_on(packed: Make, paired: Make, tmp_path: Path) -> None:  # noqa: F811
    """What tells whether a checkpoint belongs to a run was then made of these keys, and none of packing."""
    context, other = create(paired(), tmp_path / "plain"), create(packed(), tmp_path / "packed")
    prefixes = ("model.", "objective.", "optim.kind", "average.kind", "data.weights", "data.shift")
    for which in (context, other):
        recipe = which.recipe
        flat = settings.flat(restore_old_keys(settings.dump(recipe)))  # settings had their first names then
        kept = {key: value for key, value in flat.items() if key.startswith(prefixes)}
        content = {**kept, "seed": recipe.seed, recipe.batch.unit: recipe.batch.size, "data": which.shards.digest}
        before = settings.hashed({**content, "sources": list(which.shards.train.sources)})
        assert (which.identity == before) == (which is context)
