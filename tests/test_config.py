"""The strict loader and its writer."""

from __future__ import annotations

import string
import time
import tomllib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trivium.config import (
    assignments,
    digest,
    flat,
    load,
    overrides,
    place,
    preset,
    read,
    variants,
    write,
)
from trivium.errors import ConfigError
from trivium.records import parse_toml
from trivium.training.recipe import Recipe


@dataclass(frozen=True, kw_only=True, slots=True)
class Round:
    radius: float = 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Square:
    side: int = 2
    tilted: bool = False

    def __post_init__(self) -> None:
        if self.side < 1:
            raise ConfigError(f"side: {self.side} is less than 1")


SHAPES: dict[str, type[Any]] = {"round": Round, "square": Square}


@dataclass(frozen=True, kw_only=True, slots=True)
class Inner:
    shape: Any = place(SHAPES, Round())
    depth: int = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class Outer:
    name: str = ""
    rate: float = 0.1
    count: int = 0
    on: bool = False
    mode: Literal["fast", "slow"] = "fast"
    paths: tuple[str, ...] = ()
    valid: float | str = 0.01
    inner: Inner = preset({"deep": lambda: Inner(depth=9), "square": lambda: Inner(shape=Square(side=7))}, Inner())
    others: dict[str, Inner] = variants("inner")


def problems(*layers: dict[str, Any]) -> tuple[str, ...]:
    with pytest.raises(ConfigError) as caught:
        load(Outer, *layers)
    return caught.value.problems


def test_all_problems_are_reported_at_once_with_the_nearest_name() -> None:
    found = problems({"raet": 1, "count": "x", "inner": {"dept": 1, "shape": "squar"}, "mode": "fats"})
    assert len(found) == 5
    assert "raet: is not a setting; did you mean rate?" in found
    assert "inner.dept: is not a setting; did you mean inner.depth?" in found
    assert "inner.shape.kind: there is no kind 'squar'; did you mean square?" in found
    assert any(line.startswith("count: expects a whole number") for line in found)
    assert any(line.startswith("mode: 'fats' is not one of fast, slow; did you mean fast?") for line in found)


def test_a_check_inside_a_part_is_reported_under_its_dotted_key() -> None:
    assert problems({"inner": {"shape": {"kind": "square", "side": 0}}}) == ("inner.shape.side: 0 is less than 1",)


def test_authority_grows_from_default_to_preset_to_file_to_command_line() -> None:
    file = {"inner": {"preset": "deep", "shape": {"kind": "square", "side": 4}}}
    assert load(Outer, {"inner": {"preset": "deep"}}).inner.depth == 9
    assert load(Outer, file).inner == Inner(depth=9, shape=Square(side=4))
    assert load(Outer, file, assignments(["inner.depth=5"])).inner == Inner(depth=5, shape=Square(side=4))
    assert load(Outer, file, assignments(["inner.preset=square"])).inner == Inner(depth=3, shape=Square(side=4))


def test_another_kind_resets_the_place_to_that_kinds_defaults() -> None:
    file = {"inner": {"shape": {"kind": "square", "side": 4, "tilted": True}}}
    assert load(Outer, file, assignments(["inner.shape=round"])).inner.shape == Round()
    assert load(Outer, file, assignments(["inner.shape.kind=square"])).inner.shape == Square(side=4, tilted=True)


def test_the_short_form_names_a_kind_or_a_preset() -> None:
    assert load(Outer, {"inner": "deep"}).inner == Inner(depth=9)
    for order in (["inner.shape=square", "inner.shape.side=5"], ["inner.shape.side=5", "inner.shape=square"]):
        assert load(Outer, assignments(order)).inner.shape == Square(side=5)
    assert load(Outer, assignments(["inner.depth=2", "inner=square"])).inner == Inner(depth=2, shape=Square(side=7))


def test_a_typed_value_takes_the_type_of_its_leaf() -> None:
    found = load(Outer, assignments(["name=2024", "rate=1e-3", "on=true", "paths=['a','b']", "valid=held.txt"]))
    assert found == Outer(name="2024", rate=1e-3, on=True, paths=("a", "b"), valid="held.txt")
    assert load(Outer, assignments(["valid=0.2"])).valid == 0.2
    assert load(Outer, assignments(["paths=one.txt"])).paths == ("one.txt",)
    assert load(Outer, assignments(["paths=2024"])).paths == ("2024",)
    assert load(Outer, assignments(['name="quoted text"'])).name == "quoted text"


@pytest.mark.parametrize(
    "layer",
    [
        {"count": True},
        {"count": 1.0},
        {"on": 1},
        {"rate": float("nan")},
        {"rate": float("inf")},
        {"name": "\ud800"},
        {"rate": "x"},
        {"name": 3},
        {"inner": 3},
    ],
)
def test_a_value_of_the_wrong_type_is_refused(layer: dict[str, Any]) -> None:
    assert problems(layer)[0].split(":")[0] in layer


def test_an_argument_that_is_no_assignment_is_refused() -> None:
    with pytest.raises(ConfigError, match="not of the form key=value"):
        assignments(["rate"])


def test_python_may_put_any_part_into_a_place_and_files_may_name_it_when_told() -> None:
    @dataclass(frozen=True, kw_only=True, slots=True)
    class Star:
        points: int = 5

    mine = load(Outer, overrides({"inner.shape": Star(points=6)}))
    assert mine.inner.shape == Star(points=6)
    text = write(mine)
    assert 'kind = "Star"' in text
    assert load(Outer, tomllib.loads(text), parts=[Star]) == mine
    with pytest.raises(ConfigError, match="there is no kind 'Star'"):
        load(Outer, tomllib.loads(text))


def test_variants_are_laid_over_their_sibling() -> None:
    found = load(Outer, {"inner": {"depth": 4}, "others": {"wide": {"shape": {"kind": "square"}}}})
    assert found.others == {"wide": Inner(depth=4, shape=Square())}
    assert load(Outer, tomllib.loads(write(found))) == found


TEXTS = st.text(max_size=20)
OUTERS = st.builds(
    Outer,
    name=TEXTS,
    rate=st.floats(allow_nan=False, allow_infinity=False),
    count=st.integers(-(2**63), 2**63 - 1),
    on=st.booleans(),
    mode=st.sampled_from(["fast", "slow"]),
    paths=st.lists(TEXTS, max_size=3).map(tuple),
    valid=st.one_of(st.floats(allow_nan=False, allow_infinity=False), TEXTS),
    inner=st.builds(Inner, depth=st.integers(0, 9), shape=st.one_of(st.builds(Round), st.builds(Square))),
    others=st.dictionaries(st.text(string.ascii_letters + " .ü", min_size=1, max_size=4), st.builds(Inner), max_size=2),
)


@settings(max_examples=150, deadline=None)
@given(OUTERS)
def test_what_is_written_loads_to_the_same_configuration(value: Outer) -> None:
    assert load(Outer, tomllib.loads(write(value))) == value


@settings(max_examples=50, deadline=None)
@given(OUTERS, OUTERS)
def test_two_configurations_have_one_digest_exactly_when_they_are_equal(one: Outer, two: Outer) -> None:
    assert (digest(one) == digest(two)) == (write(one) == write(two))


def test_flat_names_every_leaf_by_its_dotted_key() -> None:
    leaves = flat(Outer())
    assert leaves["inner.shape.kind"] == "round"
    assert leaves["inner.shape.radius"] == 1.0
    assert replace(Outer(), count=3) != Outer()


@pytest.mark.parametrize(("content", "word"), [(b"\xff\xfe", "not UTF-8"), (b"a = ", "not TOML")])
def test_a_file_that_is_not_toml_is_named_in_a_sentence(tmp_path: Path, content: bytes, word: str) -> None:
    path = tmp_path / "bad.toml"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=word):
        read(path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="does not exist"):
        read(tmp_path / "none.toml")


@settings(max_examples=200, deadline=None)
@given(
    st.recursive(
        st.one_of(st.none(), st.booleans(), st.integers(), TEXTS), lambda c: st.dictionaries(TEXTS, c), max_leaves=8
    )
)
def test_any_layer_gives_a_configuration_or_a_sentence(junk: Any) -> None:
    for layer in ({"inner": junk}, {"count": junk}, {"others": junk}, junk if isinstance(junk, dict) else {}):
        try:
            load(Outer, layer)
        except ConfigError as error:
            found = error.problems
        else:
            found = ("none",)
        assert found


QUOTES = 3 * chr(34)


@pytest.mark.parametrize(
    "text",
    [
        "paths = [" + ", ".join(f'"{name}.txt"' for name in range(200)) + "]",
        "# " + "." * 500,
        f"text = {QUOTES}\n" + ".a" * 300 + f"\n{QUOTES}",
        'name = "' + "a." * 300 + '"',
        ".".join("a" * 90) + " = 1",
    ],
)
def test_dots_outside_keys_are_no_parts(text: str) -> None:
    parse_toml(text)


@pytest.mark.parametrize("text", [".".join("a" * 20_000) + " = 1", "x = {" + " . ".join("a" * 20_000) + " = 1}"])
def test_a_key_of_many_parts_is_refused_at_once(text: str) -> None:
    began = time.monotonic()
    with pytest.raises(ValueError, match="a key of more than 100 parts"):
        parse_toml(text)
    assert time.monotonic() - began < 1


def test_overrides_that_are_no_mapping_of_names_are_refused() -> None:
    with pytest.raises(ConfigError, match="1: is not a setting"):
        load(Recipe, {"model": {1: 2}})
