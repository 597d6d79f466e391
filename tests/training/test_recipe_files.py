"""The recipes in recipes/ say what docs/results.md says of them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
_WORDS = {"two": "2", "four": "4"}
_RECIPES = {path.stem: path.read_text() for path in sorted((ROOT / "recipes").glob("*.toml"))}
_EPOCHS = re.compile(r"^(?:steps|tokens) = .*# (\w+) epochs", re.MULTILINE)


@pytest.mark.parametrize("name", [name for name, text in _RECIPES.items() if _EPOCHS.search(text)])
def test_a_recipe_and_its_results_count_the_same_epochs(name: str) -> None:
    """multi30k: 9,000 steps of 32 of 3,801 packed rows; ptb: 19,000 of 16 times 512 of 929,589 words."""
    found = _EPOCHS.search(_RECIPES[name])
    assert found is not None
    results = (ROOT / "docs" / "results.md").read_text()
    rows = [line.split("|")[3] for line in results.splitlines() if line.startswith(f"| `{name}` |")]
    assert rows
    told = {re.sub(r"\.0$", "", re.sub(r"^.*?([\d.]+)( epochs\))?$", r"\1", cell.strip())) for cell in rows}
    assert told == {_WORDS.get(found[1], found[1])}
