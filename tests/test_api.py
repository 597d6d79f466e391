"""What `import trivium as tv` gives, wherever its pieces live."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import trivium as tv
from trivium import api, handle

# the surface that people and checks rely on; what is promised for later is not here yet
PROMISED = {"presets", "preset", "build", "load", "train", "recipe", "show", "Model", "Run", "Recipe", "neighbours"}
METHODS = {"logits", "generate", "stream", "fill", "translate", "classify", "embed", "score", "save", "export"}


def test_everything_promised_is_there_under_its_name() -> None:
    assert set(api.__all__) >= PROMISED
    assert set(tv.__all__) == {*api.__all__, "__version__"}
    for name in api.__all__:
        assert getattr(tv, name) is getattr(api, name)


def test_a_type_checker_sees_the_names_that_a_program_gets() -> None:
    imports = [node for node in ast.walk(ast.parse(Path(tv.__file__).read_text())) if isinstance(node, ast.ImportFrom)]
    (seen,) = [{alias.name for alias in node.names} for node in imports if node.module == "trivium.api"]
    assert seen == set(api.__all__)


def test_the_object_that_load_gives_has_one_class_and_its_methods() -> None:
    assert tv.Model is api.Model is handle.Model
    assert set(vars(tv.Model)) >= METHODS


def test_a_name_that_is_not_there_is_an_ordinary_error() -> None:
    with pytest.raises(AttributeError, match="'trivium' has no attribute 'lod'"):
        tv.lod  # noqa: B018
