"""What a recipe that says little means: defaults that do not mislead."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.training.conftest import create, finish, resume, start
from trivium.config import load, overrides
from trivium.data.bucketing import Buckets
from trivium.data.config import DataConfig
from trivium.errors import ConfigError
from trivium.training.build_job import build_job
from trivium.training.recipe import TOKENS, BatchConfig, Recipe

Make = Callable[..., Recipe]
PAIRS: dict[str, Any] = {
    "name": "pairs",
    "device": "cpu",
    "threads": 1,
    "model": "t5-mini",
    "objective": "seq2seq",
    "tokenizer": "bytes",
    "budget.steps": 2,
}


@pytest.fixture
def pairs(tmp_path: Path) -> Path:
    path = tmp_path / "pairs.tsv"
    path.write_text("".join(f"number {number}\tZahl {number}\n" for number in range(2000)))
    return path


def test_pairs_are_counted_in_tokens_unless_rows_are_asked_for(pairs: Path, tmp_path: Path) -> None:
    context = create(load(Recipe, overrides({**PAIRS, "data.pairs": str(pairs)})), tmp_path / "runs")
    assert (context.recipe.batch.tokens, context.recipe.batch.rows) == (TOKENS, 32)
    order = build_job(context, 1).order
    assert isinstance(order, Buckets)
    assert len(order.batch(0)) > 100  # not 32 short pairs
    asked = {**PAIRS, "data.pairs": str(pairs), "batch.rows": 32}
    assert create(load(Recipe, overrides({**asked, "name": "rows"})), tmp_path / "runs").recipe.batch.tokens == 0
    packed = {**PAIRS, "data.pairs": str(pairs), "data.pack": 64, "name": "packed"}
    assert create(load(Recipe, overrides(packed)), tmp_path / "runs").recipe.batch == BatchConfig(rows=32)


def test_text_is_counted_in_rows(small: Make, tmp_path: Path) -> None:
    recipe = small(**{"batch.rows": 0, "batch.micro": 0})
    assert create(recipe, tmp_path).recipe.batch == BatchConfig(rows=32)


@pytest.mark.parametrize(
    ("size", "share"), [(100, 0.1), (500_000, 0.1), (1_000_000, 0.0655), (6_553_600, 0.01), (10**9, 0.01)]
)
def test_more_of_a_small_text_is_kept_for_validation(size: int, share: float) -> None:
    assert DataConfig().settled(size).valid == share
    assert DataConfig(valid=0.02).settled(size).valid == 0.02
    assert DataConfig(valid="held.txt").settled(size).valid_path == "held.txt"


def test_a_small_book_has_rows_enough_to_choose_by(small: Make, tmp_path: Path) -> None:
    """6 kB of text in rows of 16 bytes: a hundredth would be four rows."""
    context = create(small(**{"data.valid": "auto"}), tmp_path)
    assert context.recipe.data.valid == 0.1
    assert len(context.valid) > 30


@pytest.mark.parametrize("text", ["hello", "x" * 14])
def test_a_text_shorter_than_a_row_is_refused(small: Make, tmp_path: Path, text: str) -> None:
    path = tmp_path / "tiny.txt"
    path.write_text(text)
    recipe = small(**{"data.paths": [str(path)], "data.valid": 0.0})
    with pytest.raises(ConfigError, match=r"has \d+ tokens, less than one row of 16; name more text, or set a smaller"):
        create(recipe, tmp_path / "runs")
    assert not (tmp_path / "runs").exists()


def test_rows_may_be_shorter_than_the_context(small: Make, tmp_path: Path) -> None:
    run = start(small(**{"data.length": 5}), tmp_path)
    assert run.context.task.length == 5
    assert run.context.train.take(np.zeros(1, np.int64)).ids.shape == (1, 6)
    assert run.recipe.model.context == 16
    finish(run)
    finish(resume(run.folder, **{"budget.steps": 22}))
    other = start(small(**{"data.length": 5, "name": "other"}), tmp_path)
    assert other.context.identity == run.context.identity
    assert start(small(name="usual"), tmp_path).context.identity != run.context.identity
    with pytest.raises(ConfigError, match=r"data.length: 17 is more than the 16 of model.context; lower it"):
        create(small(**{"data.length": 17, "name": "long"}), tmp_path)


@pytest.mark.parametrize("demo", ["gpt", "bert", "t5"])
def test_demos_keep_their_best_weights(demo: str) -> None:
    from importlib.resources import as_file, files

    from trivium.config import read

    with as_file(files("trivium") / "assets" / f"demo-{demo}.toml") as path:
        assert load(Recipe, read(path), {"data": {"pairs": "x"}} if demo == "t5" else {}).checkpoint.use == "best"
