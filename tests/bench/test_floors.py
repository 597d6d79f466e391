"""The floors that the documentation prints are those of the formulas."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench import floors
from bench.measure import Ceilings

PAGE = Path(__file__).resolve().parents[2] / "docs" / "performance.md"


def test_the_page_on_performance_has_the_floors_as_they_are_computed(capsys: pytest.CaptureFixture[str]) -> None:
    floors.main([])
    page = PAGE.read_text().splitlines()
    lines = [line for line in capsys.readouterr().out.splitlines() if line]
    assert len(lines) == 2 * 2 + len(floors.ROWS) + len(floors.DECODED)
    assert [line for line in lines if line not in page] == []


def test_a_floor_by_hand() -> None:
    # bytes: 2 of each weight that is multiplied by, and for each token and layer a key and a value of 768
    [_, _, first, *_] = floors.decoding(Ceilings(1e12, 1e9))
    weights = 2 * (12 * (12 * 768**2 + 13 * 768) + 2 * 768 + 50_304 * 768)
    moved = weights + 2 * 256 * 12 * 2 * 768
    assert first == (f"| gpt2 | 1 | {moved / 1e9:.3f} | {moved / 1e6:.3f} | {weights / 1e9:.3f} | {1e9 / moved:,.0f} |")
