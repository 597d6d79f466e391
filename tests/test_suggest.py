"""What is said of a name that is no setting: its key elsewhere, another library's word for it, or a near spelling."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase
from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trivium import suggest
from trivium.config import assignments, flat, load
from trivium.errors import ConfigError
from trivium.models.presets import PRESETS
from trivium.training.recipe import Recipe

FAMILIES = {
    "decoder": {"model": "gpt-mini"},
    "encoder": {"model": "bert-mini", "objective": "masked"},
    "both": {"model": "t5-mini", "objective": "seq2seq"},
}


def refusal(family: str, *pairs: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load(Recipe, FAMILIES[family], assignments(pairs))
    [problem] = caught.value.problems
    return problem


@pytest.mark.parametrize(
    ("family", "pair", "meant"),
    [
        ("decoder", "heads=6", "model.decoder.block.attention.heads"),
        ("encoder", "heads=6", "model.encoder.block.attention.heads"),
        ("decoder", "layers=6", "model.decoder.layers"),
        ("both", "num_layers=6", "model.encoder.layers or model.decoder.layers"),
        ("encoder", "model.decoder.layers=6", "model.encoder.layers"),
        ("encoder", "model.decoder.block.attention.heads=6", "model.encoder.block.attention.heads"),
        ("decoder", "lr=1e-3", "optim.rate"),
        ("decoder", "optim.lr=1e-3", "optim.rate"),
        ("decoder", "optimizer.lr=1e-3", "optim.rate"),
        ("decoder", "learningRate=1e-3", "optim.rate"),
        ("decoder", "batch_size=8", "batch.rows"),
        ("decoder", "hidden_size=8", "model.width"),
        ("decoder", "model.n_embd=8", "model.width"),
        ("decoder", "block_size=8", "model.context"),
        ("decoder", "epochs=3", "budget.steps, budget.tokens or budget.minutes"),
        ("decoder", "warmup_steps=3", "schedule.warmup"),
        ("both", "label_smoothing=0.1", "objective.smoothing"),
        ("decoder", "eval.every=3", "evaluate.every"),
        ("decoder", "model.decoder.block.atention.heads=6", "model.decoder.block.attention.heads"),
        ("decoder", "model.decoder.block.ffn.hidden=6", "model.decoder.block.feedforward.hidden"),
        ("decoder", "optim.raet=1", "optim.rate"),
        ("decoder", "data.path=x", "data.paths"),
        ("decoder", "model.decoder.layer=2", "model.decoder.layers"),
        ("decoder", "early_stopping=3", "evaluate.patience"),
        ("decoder", "evaluate.early_stopping=3", "evaluate.patience"),
        ("decoder", "gpu=1", "device"),
        ("decoder", "use_cuda=true", "device"),
        ("decoder", "sed=1", "seed"),
        ("decoder", "model=gpt3", "gpt or gpt2"),
    ],
)
def test_what_was_meant_is_named(family: str, pair: str, meant: str) -> None:
    assert refusal(family, pair).endswith(f"; did you mean {meant}?")


@pytest.mark.parametrize("pair", ["heads=6", "dropout=0.1", "hidden_size=3", "foo=1", "lr=1", "xy=1", "model=zzz"])
def test_a_suggestion_is_never_another_word_that_only_looks_alike(pair: str) -> None:
    said = refusal("decoder", pair)
    assert not any(word in said for word in ("threads", "recompute", "tokenizer?", "log?"))


def test_a_name_in_several_places_gives_all_of_them_up_to_a_few() -> None:
    said = refusal("decoder", "dropout=0.1")
    keys = [key for key in flat(load(Recipe, FAMILIES["decoder"])) if key.endswith(".dropout")]
    assert len(keys) > 2
    assert all(key in said for key in keys)
    assert "more)?" in refusal("both", "dropout=0.1")


def test_a_setting_of_another_kind_names_that_kind() -> None:
    assert refusal("decoder", "optim.momentum=0.9").endswith("first set optim=muon or optim=sgd")
    assert refusal("decoder", "average.decay=0.9").endswith("first set average=ema")


def test_a_number_for_a_table_is_answered_with_its_first_setting() -> None:
    assert refusal("decoder", "batch=32").endswith("; set batch.rows")
    assert refusal("decoder", "budget=100").endswith("; set budget.steps")


def test_the_preset_of_a_recipe_with_other_errors_decides_what_is_suggested() -> None:
    with pytest.raises(ConfigError) as caught:
        load(Recipe, FAMILIES["encoder"], assignments(["layers=3", "model.width=-1"]))
    assert any("did you mean model.encoder.layers?" in problem for problem in caught.value.problems)


def every_recipe() -> list[Recipe]:
    """Recipes that together have every kind of optimizer, schedule and objective, in every family."""
    kinds = [{"schedule": name} for name in ("linear", "wsd")] + [{"optim": name} for name in ("sgd", "adam")]
    return [load(Recipe, table, kind) for table in FAMILIES.values() for kind in [{}, *kinds]]


def test_every_synonym_leads_to_a_setting_and_is_none_itself() -> None:
    """The table cannot outlive a renamed setting."""
    keys = {key for recipe in every_recipe() for key in _places(flat(recipe))}
    roots = {key.split(".")[0] for key in keys}
    for word, patterns in suggest._SYNONYMS.items():
        assert all(any(fnmatchcase(key, pattern) for key in keys) for pattern in patterns), (word, patterns)
        assert word not in roots, word


def _places(leaves: dict[str, Any]) -> set[str]:
    parts = [key.split(".") for key in leaves]
    return {".".join(path[:length]) for path in parts for length in range(1, len(path) + 1)}


@cache
def _brute(one: str, other: str) -> int:
    """The definition of the distance, letter by letter."""
    if not one or not other:
        return len(one) + len(other)
    ways = [
        _brute(one[1:], other) + 1,
        _brute(one, other[1:]) + 1,
        _brute(one[1:], other[1:]) + (one[0] != other[0]),
    ]
    if one[:2] == other[:2][::-1] and len(one) > 1 and len(other) > 1:
        ways.append(_brute(one[2:], other[2:]) + 1)
    return min(ways)


@settings(max_examples=200, deadline=None)
@given(st.text("abc", max_size=6), st.text("abc", max_size=6))
def test_the_distance_is_that_of_its_definition(one: str, other: str) -> None:
    assert suggest._distance(one, other) == _brute(one, other)


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_a_preset_with_two_letters_exchanged_is_found(name: str) -> None:
    near: Sequence[str] = suggest._close(name[:-2] + name[-1] + name[-2], sorted(PRESETS))
    assert name in near or name[-1] == name[-2] or name[:-2] + name[-1] + name[-2] in PRESETS


def test_a_later_budget_replaces_an_earlier_one() -> None:
    file = {"budget": {"minutes": 10}}
    assert load(Recipe, file, assignments(["budget.steps=100"])).budget.steps == 100
    assert load(Recipe, file, assignments(["budget.steps=100"])).budget.minutes == 0
    assert load(Recipe, file, {"budget": {"tokens": 5}}, assignments(["budget.minutes=2"])).budget.minutes == 2
    assert load(Recipe, assignments(["budget.tokens=7"]), start=load(Recipe, file)).budget.tokens == 7
    unchanged = load(Recipe, file, assignments(["budget.steps=0"])).budget
    assert (unchanged.steps, unchanged.minutes) == (0, 10)
    with pytest.raises(ConfigError, match="not several; leave steps out"):
        load(Recipe, file, assignments(["budget.steps=100", "budget.tokens=5"]))
    with pytest.raises(ConfigError, match="not several"):
        load(Recipe, {"budget": {"steps": 5, "minutes": 1}})


def test_later_data_replaces_an_earlier_form_of_it() -> None:
    file = {"data": {"source": "a.en", "target": "a.de", "valid_source": "v.en", "valid_target": "v.de"}}
    found = load(Recipe, file, assignments(["data.pairs=b.tsv"])).data
    assert (found.pairs, found.source, found.valid_target) == ("b.tsv", "", "")
    text = {"data": {"paths": ["a.txt", "b.txt"], "weights": [0.5, 0.5]}}
    found = load(Recipe, text, assignments(["data.pairs=b.tsv"])).data
    assert (found.pairs, found.paths, found.weights) == ("b.tsv", (), ())
    with pytest.raises(ConfigError, match="text or pairs, not both"):
        load(Recipe, assignments(["data.pairs=b.tsv", "data.paths=a.txt"]))


@pytest.mark.parametrize(
    ("typed", "expected"),
    [
        ("a.txt,b.txt", ("a.txt", "b.txt")),
        ("a.txt, b.txt,", ("a.txt", "b.txt")),
        ("a.txt", ("a.txt",)),
        ('["a,b.txt"]', ("a,b.txt",)),
        ('["a.txt", "b.txt"]', ("a.txt", "b.txt")),
        ('"a,b.txt"', ("a,b.txt",)),
        ("2024,2025", ("2024", "2025")),
        ("", ()),
    ],
)
def test_a_list_is_typed_with_commas_or_as_in_a_file(typed: str, expected: tuple[str, ...]) -> None:
    assert load(Recipe, assignments([f"data.paths={typed}"])).data.paths == expected


def test_lists_of_numbers_and_of_choices_are_typed_with_commas() -> None:
    found = load(Recipe, assignments(["data.columns=2,0", "track=csv,tensorboard", "data.weights=0.5, 2"]))
    assert found.data.columns == (2, 0)
    assert found.data.weights == (0.5, 2.0)
    assert found.track == ("csv", "tensorboard")
    with pytest.raises(ConfigError, match="expects a whole number, not 'x'"):
        load(Recipe, assignments(["data.columns=1,x"]))
    with pytest.raises(ConfigError, match="'csw' is not one of csv, tensorboard; did you mean csv"):
        load(Recipe, assignments(["track=csw"]))


def test_python_names_the_full_key_too() -> None:
    with pytest.raises(ConfigError, match=r"^data\.path: is not a setting; did you mean data\.paths\?$"):
        Recipe(data={"path": "x"})  # type: ignore[arg-type]
