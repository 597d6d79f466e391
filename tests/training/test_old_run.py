"""A run of an older trivium goes on: old names in its files, the same identity, the same losses."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

import pytest
import torch

from tests.training.conftest import finish, resume, silent
from tests.training.test_resume import assert_equal_ends, cut_copy
from trivium import api
from trivium.checkpoints import format
from trivium.config import load, overrides
from trivium.renamed import update
from trivium.training.metrics import rows
from trivium.training.recipe import Recipe
from trivium.training.run import open_run

OLD = Path(__file__).parents[1] / "assets" / "old-run"


@pytest.fixture(scope="module")
def straight(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The old recipe, trained in one go by the code of today."""
    recipe = load(Recipe, update(tomllib.loads(old_settings(text))))
    session = open_run(recipe, {}, runs=tmp_path_factory.mktemp("straight"), say=silent, tick=silent)
    finish(session)
    return session.folder


def old_settings(text: Path) -> str:
    """The old run's config.toml, with its text where it lies here."""
    return (OLD / "config.toml").read_text().replace('"play.txt"', json.dumps(str(text)))


def test_it_has_the_identity_and_the_losses_that_it_had(straight: Path) -> None:
    state = format.document(straight / "checkpoints" / "step-00000004", "state")
    assert state["identity"] == json.loads((OLD / "state.json").read_text())["identity"]
    found, then = ([row["loss"] for row in rows(folder / "metrics.jsonl")] for folder in (straight, OLD))
    assert found == pytest.approx(then, rel=1e-5)  # another machine may add in another order


def test_it_goes_on_from_its_checkpoint_as_in_one_go(straight: Path, text: Path, tmp_path: Path) -> None:
    copy = cut_copy(straight, 4, tmp_path)
    (copy / "config.toml").write_text(old_settings(text))
    finish(resume(copy))
    assert_equal_ends(straight, copy, 12)


def test_it_may_change_what_any_run_may_change(straight: Path, text: Path, tmp_path: Path) -> None:
    copy = cut_copy(straight, 8, tmp_path)
    (copy / "config.toml").write_text(old_settings(text))
    said: list[str] = []
    open_run(copy, overrides({"log": 3}), say=said.append, tick=silent)
    assert said == ["log changed from 1 to 3"]


def test_its_config_is_a_recipe_for_the_same_run(straight: Path, text: Path, tmp_path: Path) -> None:
    copy = cut_copy(straight, 12, tmp_path)
    (copy / "config.toml").write_text(old_settings(text))
    again = open_run(copy / "config.toml", {}, runs=tmp_path / "again", say=silent, tick=silent)
    assert (again.folder / "config.toml").read_text() == (straight / "config.toml").read_text()


def test_its_models_open_and_start_others(straight: Path, text: Path, tmp_path: Path) -> None:
    """Its saved model, its newest checkpoint, and a new run that begins with it."""
    source, target = torch.tensor([[7, 8, 9]]), torch.tensor([[5, 6]])
    expected = api.load(straight, device="cpu").logits(source, target)
    saved, unfinished = cut_copy(straight, 12, tmp_path), cut_copy(straight, 8, tmp_path)
    for run in (saved, unfinished):
        (run / "config.toml").write_text(old_settings(text))
    card = json.loads((straight / "model.json").read_text())
    card["config"] = tomllib.loads(old_settings(text))["model"]
    (saved / "model.json").write_text(json.dumps(card))
    for name in ("model.safetensors", "tokenizer.json"):
        (saved / name).write_bytes((straight / name).read_bytes())
    assert torch.equal(api.load(saved, device="cpu").logits(source, target), expected)
    assert api.show(saved)["parameters"] == api.show(unfinished)["parameters"] == api.show(straight)["parameters"]
    assert api.load(unfinished, device="cpu").config == api.load(straight, device="cpu").config
    for start in (saved, unfinished):
        values = {"start": str(start), "name": f"next-{start.parent.name}", "objective": "denoise"}
        begun = open_run(
            load(Recipe, overrides({**values, "device": "cpu", "data.paths": [str(text)], "budget.steps": 2})),
            {},
            runs=tmp_path / "runs",
            say=silent,
            tick=silent,
        )
        assert begun.recipe.model == api.load(straight, device="cpu").config
