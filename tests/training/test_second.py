"""Runs with two heads: next sentences and span boundaries, from a text on the disk to a checkpoint and back."""

from __future__ import annotations

import gzip
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.training.conftest import ASSETS, create, finish, start
from tests.training.test_resume import assert_goes_on_exactly
from trivium.errors import ConfigError, DataError
from trivium.training.build_job import build_job
from trivium.training.loop import train_step
from trivium.training.metrics import rows
from trivium.training.prefetch import step_batches
from trivium.training.recipe import Recipe
from trivium.training.step import StepScalars
from trivium.training.validate import validate

Make = Callable[..., Recipe]

KINDS: dict[str, dict[str, Any]] = {
    "pairs": {
        "objective": "masked",
        "objective.frame": "pair",
        "objective.copies": 10,
        "model.embedding.segments": 2,
        "model.sentence": "pooler",
    },
    "spans": {"objective": "spans", "model.boundary": "span", "model.boundary.size": 8},
}
STILL = {"model.encoder.block.dropout": 0.0, "model.encoder.block.attention.dropout": 0.0}
NAMES = {"pairs": "sentences", "spans": "boundary"}
each = pytest.mark.parametrize("kind", KINDS)


@pytest.fixture(scope="module")
def speeches(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """12 kB of Shakespeare, a document for every speech."""
    path = tmp_path_factory.mktemp("text") / "speeches.txt"
    text = gzip.decompress((ASSETS / "shakespeare-train.txt.gz").read_bytes())[:12_000]
    path.write_bytes(text.replace(b"\n\n", b"\f"))
    return path


@pytest.fixture
def two_heads(small: Make, speeches: Path) -> Make:
    """The small recipe of a kind, with some settings changed."""

    def make(kind: str, **changes: Any) -> Recipe:
        return small("encoder", **{**KINDS[kind], "data.paths": [str(speeches)], **changes})

    return make


@each
def test_a_stopped_run_goes_on_with_the_same_bits(two_heads: Make, tmp_path: Path, kind: str) -> None:
    recipe = two_heads(kind, **{"checkpoint.every": 1, "checkpoint.keep": 30, "budget.steps": 12})
    straight = start(recipe, tmp_path / "straight")
    finish(straight)
    copy = assert_goes_on_exactly(straight.folder, 5, tmp_path, 12)
    found = [row["loss"] for row in rows(copy / "metrics.jsonl")]
    assert found[-1] < found[0]


@each
def test_gradients_and_validation_do_not_depend_on_the_rows_at_a_time(
    two_heads: Make, tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[list[torch.Tensor]] = []
    for micro in (6, 4, 1):
        context = create(two_heads(kind, **STILL, **{"batch.micro": micro}), tmp_path / str(micro))
        job = build_job(context, 10)
        batches = step_batches(job, (0, 0, micro))
        assert batches.counts["tokens"] > 6
        monkeypatch.setattr(job.optimizer, "zero_grad", lambda: None)
        result = train_step(job, batches.batches, StepScalars(batches.counts, 0.0, 0.0))
        grown = job.optimizer.gradients()
        assert len(grown) == len(list(job.model.parameters()))
        assert list(result.over) == ["tokens", NAMES[kind]]
        judged = validate(job, context.valid, limit=5)
        assert judged.bits_per_byte is None
        means = [torch.tensor(mean) for mean in (judged.loss, *judged.losses.values())]
        found.append([result.numbers, *grown, *means])
    for other in found[1:]:
        for one, two in zip(found[0], other, strict=True):
            torch.testing.assert_close(two, one, rtol=1e-4, atol=1e-6)


@each
def test_a_compiled_step_has_the_same_loss(two_heads: Make, tmp_path: Path, kind: str) -> None:
    context = create(two_heads(kind, **STILL), tmp_path)
    plain, compiled = (build_job(context, 10) for _ in range(2))
    eager = torch.compile(compiled.compute, backend="aot_eager")
    batch = context.task.inputs(context.train.take(plain.order.batch(0)), np.random.default_rng(0))
    found, expected = eager(batch), plain.compute(batch)
    assert [(name, *loss[1:]) for name, loss in found.items()] == [(name, *loss[1:]) for name, loss in expected.items()]
    for name, loss in expected.items():
        torch.testing.assert_close(found[name].sum, loss.sum)


def test_pairs_from_one_document_are_refused_in_a_sentence(two_heads: Make, text: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"objective.frame: .*at least two documents"):
        start(two_heads("pairs", **{"data.paths": [str(text)]}), tmp_path)


def test_a_model_without_the_head_leaves_nothing_behind(two_heads: Make, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"model.sentence: objective.frame=pair asks"):
        create(two_heads("pairs", **{"model.sentence": "none"}), tmp_path / "runs")
    assert not (tmp_path / "runs").exists()
