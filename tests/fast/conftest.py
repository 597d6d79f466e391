"""What fast classes need in Triton's interpreter."""

from __future__ import annotations

import pytest

from tests.kernels.launch import in_small_parts


@pytest.fixture(autouse=True)
def _small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    in_small_parts(monkeypatch)
