"""What fast classes need in Triton's interpreter."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.kernels.launch import in_small_parts
from trivium.kernels.hardware import INTERPRETED


@pytest.fixture(autouse=True)
def _small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    in_small_parts(monkeypatch)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The interpreter warns where a power is endless or a number none."""
    if not INTERPRETED:
        return
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.filterwarnings("ignore:overflow encountered"))
            item.add_marker(pytest.mark.filterwarnings("ignore:invalid value encountered"))
