"""Runs whose rows are cut elsewhere in every epoch: the cursor still says it all."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.training.conftest import FAMILIES, create, finish, resume, start
from tests.training.test_resume import assert_goes_on_exactly
from trivium.data.packing import RowBatch, Rows
from trivium.errors import CheckpointError, ConfigError
from trivium.training.build_job import build_job
from trivium.training.loop import updates
from trivium.training.recipe import Recipe

Make = Callable[..., Recipe]
CASES = {**{name: (name, False) for name in FAMILIES}, "mixed": ("decoder", True)}


@pytest.fixture
def shifted(small: Make, text: Path, tmp_path: Path) -> Make:
    """The small recipe on a text of which twenty steps are several epochs, alone or mixed with another."""
    (tmp_path / "one.txt").write_text(text.read_text()[:900])
    (tmp_path / "two.txt").write_text(text.read_text()[900:1500])

    def make(kind: str = "decoder", *, mixed: bool = False, shift: str = "epoch", **more: Any) -> Recipe:
        paths = [str(tmp_path / "one.txt"), *([str(tmp_path / "two.txt")] if mixed else [])]
        given = {"data.paths": paths, "data.weights": [1.0, 2.0] if mixed else [], "data.shift": shift}
        return small(kind, **given, **{"data.valid": 0.2}, **more)

    return make


@pytest.mark.parametrize(("kind", "mixed"), CASES.values(), ids=CASES)
def test_a_run_goes_on_exactly_across_the_end_of_an_epoch(
    shifted: Make, tmp_path: Path, kind: str, mixed: bool
) -> None:
    recipe = shifted(kind, mixed=mixed, **{"checkpoint.every": 1, "checkpoint.keep": 30})
    straight = start(recipe, tmp_path / "straight")
    finish(straight)
    order = build_job(straight.context, 20).order
    count = len(straight.context.train)
    moved = [step for step in range(20) if (order.batch(6 * step) >= count).any()]
    assert 0 < moved[0] < 10  # the first batch with rows of a later epoch
    for step in (moved[0], moved[0] + 1, 15):  # right before it, right behind it, in a later epoch
        assert_goes_on_exactly(straight.folder, step, tmp_path)
    with pytest.raises(CheckpointError, match=r"data\.shift was 'epoch', not 'none'"):
        resume(straight.folder, **{"data.shift": "none"})


def test_only_the_epochs_behind_the_first_are_cut_elsewhere(shifted: Make, tmp_path: Path) -> None:
    contexts = [create(shifted(shift=shift), tmp_path / shift) for shift in ("none", "epoch")]
    assert contexts[0].shards.digest == contexts[1].shards.digest
    assert contexts[0].identity != contexts[1].identity
    whole = len(contexts[0].train) // 6  # the steps that see nothing but the first epoch
    found = [[float(update.loss) for update in updates(build_job(context, 20))] for context in contexts]
    assert found[0][:whole] == found[1][:whole]
    assert found[0][whole:] != found[1][whole:]
    assert len(contexts[1].valid) == len(contexts[0].valid)


def test_rows_that_a_rollback_leaves_out_are_left_out_of_shifted_ones_too(
    shifted: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = build_job(create(shifted(**{"batch.micro": 0}), tmp_path), 8)
    job.skipped = [(12, 60)]  # from the first epoch into the second
    seen: list[list[int]] = []
    take = Rows.take

    def taken(this: Rows, indices: Any) -> RowBatch:
        seen.append(indices.tolist())
        return take(this, indices)

    monkeypatch.setattr(Rows, "take", taken)
    for _ in updates(job):
        pass
    assert len(job.rows) < 60
    cursors = [0, 6, *range(60, 96, 6)]
    assert seen == [job.order.batch(cursor).tolist() for cursor in cursors]
    assert job.cursor == 96
    assert (np.array(seen[2:]) >= len(job.rows)).any()


def test_what_is_not_cut_from_a_text_row_by_row_cannot_be_shifted(shifted: Make, tmp_path: Path) -> None:
    pairs = {"objective.frame": "pair", "model.embedding.segments": 2, "model.sentence": "pooler"}
    with pytest.raises(ConfigError, match=r"data\.shift: only rows that are cut"):
        create(shifted("encoder", **pairs), tmp_path / "runs")
    assert not (tmp_path / "runs").exists()
