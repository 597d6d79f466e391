"""Runs on pairs: batches by tokens, smoothed labels, exact after a stop, and one sentence for what cannot be."""

from __future__ import annotations

import lzma
import random
import shutil
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch._dynamo.testing import CompileCounter

from tests.training.conftest import create, finish, resume, silent, start
from tests.training.test_families import quiet
from tests.training.test_resume import assert_goes_on_exactly
from trivium.data.bucketing import Buckets, Pairs
from trivium.data.config import DataConfig
from trivium.data.pairs import build
from trivium.errors import CheckpointError, ConfigError, DataError
from trivium.text.kinds import Bytes
from trivium.training.build_job import build_job
from trivium.training.job import Job
from trivium.training.loop import updates
from trivium.training.recipe import Recipe
from trivium.training.setup import create_run
from trivium.training.spikes import position
from trivium.training.validate import validate

Make = Callable[..., Recipe]
Count = Callable[[int, int], int]


@pytest.fixture
def files(tmp_path: Path) -> dict[str, str]:
    """A hundred words of two to nine letters, and each word backwards."""
    rng = random.Random(0)
    words = ["".join(rng.choices("abcd", k=rng.randint(2, 9))) for _ in range(100)]
    (tmp_path / "a.txt").write_text("".join(f"{word}\n" for word in words))
    (tmp_path / "b.txt").write_text("".join(f"{word[::-1]}{'!' * (len(word) % 2)}\n" for word in words))
    return {"data.source": str(tmp_path / "a.txt"), "data.target": str(tmp_path / "b.txt")}


@pytest.fixture
def paired(small: Make, files: dict[str, str]) -> Make:
    base: dict[str, Any] = {"objective": "seq2seq", "data.paths": [], "batch.tokens": 60, "batch.micro": 25}
    return lambda **more: small("encoder-decoder", **{**base, **files, **more})


def pairs_of(job: Job) -> Pairs:
    assert isinstance(job.rows, Pairs)
    return job.rows


def test_resuming_gives_the_same_bits(paired: Make, tmp_path: Path, count: Count) -> None:
    """R3, with dropout and accumulation, in the middle of an epoch and behind its end; every step under --full."""
    recipe = paired(**{"checkpoint.every": 1, "checkpoint.keep": 30})
    straight = start(recipe, tmp_path / "straight")
    job = build_job(straight.context, 1)
    assert isinstance(job.order, Buckets)
    assert len(job.order) < 18  # so that 20 steps go behind the first epoch
    finish(straight)
    for step in range(5, 20, 7) if count(0, 1) == 0 else range(1, 20):
        assert_goes_on_exactly(straight.folder, step, tmp_path)


def test_the_same_seed_gives_the_same_losses_twice_and_another_seed_others(paired: Make, tmp_path: Path) -> None:
    """R19."""

    def losses(name: str, seed: int) -> list[float]:
        job = build_job(create(paired(seed=seed), tmp_path / name), 6)
        return [float(update.loss) for update in updates(job)]

    assert losses("one", 3) == losses("two", 3)
    assert losses("three", 3) != losses("four", 4)


def test_an_epoch_of_updates_sees_every_label_once(paired: Make, tmp_path: Path) -> None:
    job = build_job(create(paired(), tmp_path), 1000)
    assert isinstance(job.order, Buckets)
    for epoch in (1, 2):
        for _ in islice(updates(job), len(job.order)):
            pass
        assert job.tokens == epoch * pairs_of(job).labels


def test_micro_batches_change_the_order_of_sums_only(paired: Make, tmp_path: Path) -> None:
    found = []
    for micro in (0, 30, 1):
        context = create(paired(**quiet("encoder-decoder"), **{"batch.micro": micro}), tmp_path / str(micro))
        job = build_job(context, 6)
        trained = [float(update.loss) for update in updates(job)]
        found.append([*trained, validate(job, context.valid, limit=7).loss, job.tokens])
    for other in found[1:]:
        assert other == pytest.approx(found[0], rel=1e-4)


def test_validation_is_the_plain_likelihood_of_the_pairs_one_by_one(paired: Make, tmp_path: Path) -> None:
    """Training has smoothed labels; what is reported has not, whatever the batches."""
    context = create(paired(**quiet("encoder-decoder"), **{"objective.smoothing": 0.3}), tmp_path)
    job = build_job(context, 1)
    rows = context.valid
    assert isinstance(rows, Pairs)
    total = 0.0
    job.model.eval()
    with torch.no_grad():
        for number in range(len(rows)):
            batch = job.task.inputs(rows.take(np.array([number])), np.random.default_rng(0))
            logprobs = job.model.head.logits(job.model(**batch.inputs).hidden).log_softmax(-1)
            total -= float(logprobs.gather(-1, batch.targets["labels"][..., None]).sum())
    result = validate(job, rows, limit=0)
    assert result.loss == pytest.approx(total / rows.labels, rel=1e-5)
    assert result.bits_per_byte is None
    first = float(next(updates(job)).loss)
    assert first != pytest.approx(result.loss, rel=1e-4)


def test_what_a_rollback_leaves_out_is_whole_batches(paired: Make, tmp_path: Path) -> None:
    recipe = paired()
    context = create(recipe, tmp_path)
    job = build_job(context, 8)
    size = recipe.batch.rows
    job.skipped = [(2 * size, 4 * size)]
    seen: list[int] = []
    for _ in updates(job):
        seen.append(job.cursor // size - 1)
        assert job.cursor - size == position(job.skipped, job.step - 1, size)  # as History reckons
    assert seen == [0, 1, 4, 5, 6, 7, 8, 9]


@pytest.mark.parametrize("turned", [False, True])
def test_a_run_learns_its_direction(paired: Make, files: dict[str, str], tmp_path: Path, turned: bool) -> None:
    if turned:
        files = {"data.source": files["data.target"], "data.target": files["data.source"]}
    more = {"optim.rate": 1e-2, "schedule": "constant", "batch.tokens": 300, "batch.micro": 0, "objective.align": 8}
    context = create(paired(**quiet("encoder-decoder"), **files, **more), tmp_path)
    job = build_job(context, 60)
    batch = job.task.inputs(pairs_of(job).take(np.arange(5)), np.random.default_rng(0))
    for row, labels in enumerate(batch.targets["labels"]):
        source = context.tokenizer.decode(batch.inputs["source"][row].tolist(), skip_specials=True)
        target = context.tokenizer.decode(labels[labels >= 0].tolist(), skip_specials=True)
        assert source.rstrip("!") == target.rstrip("!")[::-1]
        assert "!" not in (target if turned else source)
    found = [float(update.loss) for update in updates(job)]
    assert found[-1] < 0.5 * found[0]


def test_a_number_of_rows_is_a_batch_too(paired: Make, tmp_path: Path) -> None:
    job = build_job(create(paired(**{"batch.tokens": 0, "batch.micro": 2}), tmp_path), 4)
    for _ in updates(job):
        pass
    assert job.cursor == 4 * 6


def test_a_budget_in_tokens_counts_labels(paired: Make, tmp_path: Path) -> None:
    for name, tokens in (("by-tokens", 60), ("by-rows", 0)):
        recipe = paired(**{"budget.steps": 0, "budget.tokens": 2000, "batch.tokens": tokens, "batch.micro": 0})
        context = create(recipe, tmp_path / name)
        job = build_job(context, context.recipe.budget.steps)
        for _ in updates(job):
            pass
        assert job.tokens == pytest.approx(2000, rel=0.1)


def test_pairs_that_are_too_long_are_told_and_without_others_refused(
    paired: Make, files: dict[str, str], tmp_path: Path
) -> None:
    said: list[str] = []
    words = Path(files["data.source"]).read_text().split()
    backwards = Path(files["data.target"]).read_text().split()
    longest = [max(len(a), len(b)) + 1 for a, b in zip(words, backwards, strict=True)]
    recipe = paired(**{"model.context": 8, "data.valid": 0.0})
    context = create_run(recipe, tmp_path, say=said.append, tick=silent, clock=lambda: 0.0)  # no stage takes a while
    gone = sum(length > 8 for length in longest)
    assert said[0] == (
        f"training pairs with a side of more than 8 tokens, which are left out: {gone} of 100 (model.context)"
    )
    assert len(context.train) == 100 - gone > 0
    order = build_job(context, 1).order
    assert isinstance(order, Buckets)
    share = f"{order.padding:.1%}"
    assert said[1] == f"{100 - gone} pairs make {len(order)} batches an epoch; {share} of them is padding"
    with pytest.raises(ConfigError, match=r"model\.context: no training pair has both sides within 2 tokens; raise it"):
        create(paired(**{"model.context": 2, "name": "short"}), tmp_path)
    assert not (tmp_path / "short").exists()


def test_what_does_not_go_together_is_refused_before_anything_is_made(
    paired: Make, small: Make, files: dict[str, str], tmp_path: Path
) -> None:
    cases: list[tuple[Recipe, str]] = [
        (paired(objective="denoise"), "objective: pairs are learned with objective=seq2seq"),
        (small("encoder-decoder", objective="seq2seq"), "data: objective=seq2seq learns from pairs; set data.source"),
        (small(**{"batch.tokens": 100}), r"batch\.tokens: rows of text are all of one length; set batch\.rows"),
        (paired(**{"batch.tokens": 9, "batch.micro": 0}), r"batch\.tokens: 9 are less than the longest pair's 1\d"),
        (paired(**{"data.target": f"{tmp_path}/no"}), r"data\.target: .*/no does not exist"),
    ]
    for recipe, message in cases:
        with pytest.raises((ConfigError, DataError), match=message):
            create(recipe, tmp_path / "runs")
    assert not (tmp_path / "runs").exists()
    Path(files["data.target"]).write_text("one\n")
    with pytest.raises(DataError, match=r"a\.txt has 100 lines and .*b\.txt has 1:"):
        create(paired(), tmp_path / "runs")
    assert not (tmp_path / "runs").exists()


def test_a_changed_side_is_refused_on_resume_by_name(paired: Make, files: dict[str, str], tmp_path: Path) -> None:
    """R11."""
    session = start(paired(), tmp_path)
    finish(session)
    path = Path(files["data.target"])
    path.write_text(path.read_text().replace("a", "b"))
    with pytest.raises(CheckpointError, match=r"b\.txt has changed since the run began"):
        finish(resume(session.folder, **{"budget.steps": 25}))
    with pytest.raises(CheckpointError, match=r"batch\.tokens was 60, not 70"):
        resume(session.folder, **{"batch.tokens": 70})


def test_shards_that_are_gone_are_built_again_from_the_pairs(paired: Make, tmp_path: Path) -> None:
    session = start(paired(), tmp_path)
    finish(session)
    digest = session.context.shards.digest
    shutil.rmtree(session.folder / "data")
    assert resume(session.folder, **{"budget.steps": 25}).context.shards.digest == digest


def test_built_shards_of_pairs_give_the_same_batches(paired: Make, files: dict[str, str], tmp_path: Path) -> None:
    config = DataConfig(source=files["data.source"], target=files["data.target"], valid=0.1)
    build(config, Bytes().build([]), tmp_path / "shards", progress=silent, say=silent)
    given = {"data.source": "", "data.target": "", "data.paths": [str(tmp_path / "shards")]}
    found = []
    for name, more in (("one", {}), ("two", given)):
        job = build_job(create(paired(**more), tmp_path / name), 4)
        found.append([float(update.loss) for update in updates(job)])
    assert found[0] == found[1]


def test_the_compiler_makes_few_programs_for_many_shapes(
    paired: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counter = CompileCounter()
    compiled = torch.compile
    monkeypatch.setattr(
        torch, "compile", lambda function, dynamic: compiled(function, backend=counter, dynamic=dynamic)
    )
    found = []
    for name in ("off", "on"):
        few = {"model.encoder.layers": 1, "model.decoder.layers": 1, "batch.micro": 0}
        recipe = paired(compile=name, **quiet("encoder-decoder"), **few)
        context = create(recipe, tmp_path / name)
        job = build_job(context, 20)
        losses = [float(update.loss) for update in updates(job)]
        shapes = {job.rows.take(job.order.batch(step * 6)).ids.shape for step in range(20)}
        found.append([*losses, validate(job, context.valid, limit=0).loss])
    assert found[1] == pytest.approx(found[0], rel=1e-5)
    assert counter.frame_count <= 4 < 6 < len(shapes)


def test_tatoeba_teaches_a_small_model(paired: Make, shared: Path, tmp_path: Path) -> None:
    path = shared / "data" / "tatoeba" / "deu.txt.xz"
    if not path.is_file():
        pytest.skip("needs Tatoeba")
    with lzma.open(path, "rt", encoding="utf-8") as file:
        (tmp_path / "some.txt").write_text("".join(islice(file, 1500)))
    more = {
        "data.source": "",
        "data.target": "",
        "data.pairs": str(tmp_path / "some.txt"),
        "tokenizer": "bpe",
        "tokenizer.size": 400,
        "batch.tokens": 400,
        "batch.micro": 0,
        "optim.rate": 1e-2,
        "schedule": "constant",
    }
    context = create(paired(**quiet("encoder-decoder"), **more), tmp_path / "runs")
    job = build_job(context, 40)
    before = validate(job, context.valid, limit=0).loss
    for _ in updates(job):
        pass
    assert validate(job, context.valid, limit=0).loss < 0.8 * before
    assert {"<pad>", "<|endoftext|>"} <= set(context.tokenizer.specials)
