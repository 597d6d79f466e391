"""Old names of settings: read in the files of runs, kept in their identity, answered with the new name when typed."""

from __future__ import annotations

import copy
import tomllib
from pathlib import Path
from typing import Any

import pytest

from trivium.config import assignments, dump, load, read, read_of
from trivium.errors import ConfigError
from trivium.models.config import ModelConfig, Stack, TiedStack
from trivium.renamed import KEYS_TO_KINDS, RENAMED, restore_old_keys, update
from trivium.training.recipe import Recipe

KEYS = {key for entry in RENAMED for key in entry.names} | {became.key for became in KEYS_TO_KINDS}
OLD = Path(__file__).parent / "assets" / "old-run" / "config.toml"


def old() -> dict[str, Any]:
    return tomllib.loads(OLD.read_text())


def names(table: dict[str, Any]) -> set[str]:
    """Every key at any depth."""
    inner = [names(value) for value in table.values() if isinstance(value, dict)]
    return set(table).union(*inner)


def test_the_old_run_holds_every_old_key() -> None:
    assert names(old()) >= KEYS


def test_an_old_file_is_read_by_its_new_names_and_written_back_by_the_old() -> None:
    table = update(old())
    recipe = load(Recipe, table)
    assert not names(table) & KEYS
    assert recipe.model.embedding.word_dropout == recipe.model.embedding.unigram_noise == 0.1  # type: ignore[attr-defined]
    assert isinstance(recipe.model.decoder, TiedStack)
    assert restore_old_keys(dump(recipe)) == old()
    assert update(copy.deepcopy(table)) == table


def test_a_model_whose_sides_share_nothing_is_written_back_too() -> None:
    table = old()
    table["model"]["share"] = "none"
    recipe = load(Recipe, update(copy.deepcopy(table)))
    assert isinstance(recipe.model.decoder, Stack)
    assert restore_old_keys(dump(recipe)) == table


@pytest.mark.parametrize("share", ["both", 1, {"kind": "stacks"}])
def test_a_value_that_never_was_is_left_to_the_loader(share: Any) -> None:
    assert update({"model": {"share": share, "decoder": {"kind": "plain"}}})["model"]["share"] == share


def test_a_part_from_outside_keeps_its_own_keys() -> None:
    model = {"embedding": {"kind": "Mine", "lock": 1}, "decoder": {"kind": "plain", "variants": {"lock": {"omit": 2}}}}
    assert update(copy.deepcopy({"model": model, "lock": 3})) == {"model": model, "lock": 3}


def test_an_old_key_beside_the_new_one_is_left_to_the_loader() -> None:
    both = {"model": {"embedding": {"kind": "tokens", "omit": 0.1, "word_dropout": 0.2}}}
    assert update(copy.deepcopy(both)) == both


def test_only_a_run_s_own_file_may_hold_old_keys(tmp_path: Path) -> None:
    file = tmp_path / "config.toml"
    file.write_text(OLD.read_text())
    assert read_of(tmp_path) == update(old())
    assert read(file) == old()
    (tmp_path / "metrics.jsonl").touch()
    assert read(file) == update(old())


@pytest.mark.parametrize(
    ("pair", "said"),
    [
        ("model.embedding.omit=0.1", "model.embedding.omit: is called model.embedding.word_dropout now"),
        ("model.embedding.swap=0.1", "model.embedding.swap: is called model.embedding.unigram_noise now"),
        ("model.embedding.lock=0.1", "model.embedding.lock: is called model.embedding.variational_dropout now"),
        ("model.decoder.lock=0.1", "model.decoder.lock: is called model.decoder.variational_dropout now"),
        (
            "model.decoder.block.feedforward.lock=0.1",
            "model.decoder.block.feedforward.lock: is called model.decoder.block.feedforward.variational_dropout now",
        ),
        (
            "model.share=stacks",
            "model.share: is a kind of decoder now; leave it out, or set model.decoder.kind=tied",
        ),
        ("stream=fp32", "stream: is called residual_dtype now"),
    ],
)
def test_an_old_key_that_is_typed_is_answered_with_the_new_one(pair: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(Recipe, assignments([pair]))
    assert caught.value.problems == (said,)


@pytest.mark.parametrize(
    ("pairs", "said"),
    [
        (["lock=0.1"], "lock: is not a setting; did you mean model.embedding.variational_dropout, model.decoder.var"),
        (["model.decoder.block.attention.lock=0.1"], "model.decoder.block.variational_dropout or model.decoder.block."),
        (
            ["model.encoder.lock=0.1"],
            "model.encoder.lock: is not a setting of its present kind (it is called variational_dropout now); "
            "first set model.encoder=plain or model.encoder=tied",
        ),
        (["omit=0.1"], "omit: is not a setting; did you mean model.embedding.word_dropout?"),
        (["model.stream=fp32"], "model.stream: is not a setting; did you mean residual_dtype?"),
        (
            ["model.decoder.block.kind=parallel", "model.decoder.block.lock=0.1"],
            "model.decoder.block.lock: is not a setting of its present kind (it is called variational_dropout now); "
            "first set model.decoder.block=standard",
        ),
    ],
)
def test_an_old_key_in_another_place_is_answered_with_the_new_one(pairs: list[str], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(Recipe, assignments(pairs))
    assert said in str(caught.value)


@pytest.mark.parametrize("preset", ["t5-mini", "t5-small"])
def test_the_decoder_of_a_preset_is_tied_by_naming_the_kind(preset: str) -> None:
    pairs = [f"model.preset={preset}", "objective=denoise", "model.decoder.kind=tied"]
    tied = load(Recipe, assignments(pairs)).model
    plain = load(Recipe, assignments(pairs[:2])).model
    assert isinstance(tied.decoder, TiedStack)
    assert tied.decoder.block == plain.decoder.block  # type: ignore[attr-defined]
    assert tied.parameters() < plain.parameters()


def test_python_and_a_model_alone_are_answered_too() -> None:
    with pytest.raises(ConfigError, match=r"^stream: is called residual_dtype now$"):
        Recipe(stream="fp32")  # type: ignore[call-arg]
    with pytest.raises(ConfigError, match=r"^decoder\.block\.lock: is called decoder\.block\.variational_dropout now$"):
        load(ModelConfig, {"decoder": {"block": {"lock": 0.1}}})
