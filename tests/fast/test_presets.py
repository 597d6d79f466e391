"""The golden table of the class that every preset's modules get, so that nothing turns slow without a word."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

import trivium as tv
from trivium.fast.choose import FAST, fast
from trivium.models.transformer import shapes_of

GOLDEN = Path(__file__).with_name("classes.json")  # made by: python -m tests.fast.test_presets
NAMES = tv.presets()


def classes(preset: str) -> dict[str, int]:
    """How many modules of a fast preset have each class of the package."""
    config = tv.preset(preset)
    model = shapes_of(config if config.vocab else tv.build(preset, device="meta").config)
    fast(model)
    kinds = Counter(
        type(module).__name__ for module in model.modules() if type(module).__module__.startswith("trivium")
    )
    return dict(sorted(kinds.items()))


@pytest.mark.parametrize("preset", NAMES)
def test_every_preset_gets_the_classes_of_the_golden_table(preset: str) -> None:
    assert classes(preset) == json.loads(GOLDEN.read_text())[preset]


def test_no_preset_keeps_a_module_plain_that_has_a_fast_class() -> None:
    plain = {kind.__name__ for kind in FAST}
    golden: dict[str, dict[str, int]] = json.loads(GOLDEN.read_text())
    assert set(golden) == set(NAMES)
    assert not {kind for kinds in golden.values() for kind in kinds} & plain


if __name__ == "__main__":
    GOLDEN.write_text(json.dumps({name: classes(name) for name in NAMES}, indent=1) + "\n")
