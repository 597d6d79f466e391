"""Runs on several sources mixed by weight."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tests.training.conftest import create, finish, resume, start
from tests.training.test_resume import assert_goes_on_exactly
from trivium.data import shards
from trivium.data.config import DataConfig
from trivium.errors import CheckpointError, ConfigError
from trivium.text.kinds import Bytes
from trivium.training.build_job import build_job
from trivium.training.loop import updates
from trivium.training.recipe import Recipe

Make = Callable[..., Recipe]


@pytest.fixture
def mixed(small: Make, text: Path, tmp_path: Path) -> Callable[..., Recipe]:
    (tmp_path / "digits.txt").write_text("\f".join(f"{n} {n * n} {n**3}\n" * 5 for n in range(60)))
    paths = [str(text), str(tmp_path / "digits.txt")]
    return lambda weights=(1.0, 2.0), **more: small(**{"data.paths": paths, "data.weights": list(weights)}, **more)


def test_every_batch_has_its_sources_in_their_shares(mixed: Make, tmp_path: Path) -> None:
    job = build_job(create(mixed(), tmp_path), 20)
    border = -(-job.rows.stream.sources[1] // job.rows.length)
    for step in range(20):
        numbers = job.order.batch(step * 6)
        assert np.count_nonzero(numbers >= border) == 4


def test_a_mixed_run_goes_on_exactly(mixed: Make, tmp_path: Path) -> None:
    straight = start(mixed(**{"checkpoint.keep": 30}), tmp_path / "straight")
    finish(straight)
    copy = assert_goes_on_exactly(straight.folder, 10, tmp_path)
    with pytest.raises(CheckpointError, match=r"data\.weights was \[1\.0, 2\.0\], not \[2\.0, 1\.0\]"):
        resume(copy, **{"data.weights": [2.0, 1.0]})


def test_the_weights_decide_what_is_learned(mixed: Make, tmp_path: Path) -> None:
    one, two = (create(mixed(weights), tmp_path / str(weights[0])) for weights in ((1.0, 2.0), (2.0, 1.0)))
    assert one.shards.digest == two.shards.digest
    assert one.identity != two.identity
    found = [[float(update.loss) for update in updates(build_job(context, 3))] for context in (one, two)]
    assert found[0] != found[1]


def test_built_shards_keep_their_sources(mixed: Make, small: Make, tmp_path: Path) -> None:
    """The same batches as from the text itself; a wrong number of weights is refused before a folder is made."""
    recipe = mixed()
    config = DataConfig(paths=recipe.data.paths, valid=0.1)
    shards.build(config, Bytes().build([]), tmp_path / "built", progress=lambda *_: None, say=lambda _: None)
    built = {"data.paths": [str(tmp_path / "built")]}
    two = build_job(create(small(**built, **{"data.weights": [1.0, 2.0]}), tmp_path / "two"), 20)
    one = build_job(create(recipe, tmp_path / "one"), 20)
    for step in range(20):
        ids = [job.rows.take(job.order.batch(step * 6)).ids.tolist() for job in (one, two)]
        assert ids[0] == ids[1]
    with pytest.raises(ConfigError, match=r"data\.weights: 3 weights for 2 sources"):
        create(small(**built, **{"data.weights": [1.0, 2.0, 3.0]}), tmp_path / "three")
    assert not (tmp_path / "three").exists()
