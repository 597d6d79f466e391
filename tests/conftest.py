"""What every test may ask for: the long counts of `--full`, the shared data beside the project, quiet threads."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

os.environ.setdefault("GOMP_SPINCOUNT", "2000")  # torch may come before trivium here, which says so on a busy machine


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    """Tiny models are faster on one thread, and the other core belongs to the next test run."""
    torch.set_num_threads(1)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--full", action="store_true", help="run the long counts (minutes to hours)")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "full: runs only under --full")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if os.environ.get("TRITON_INTERPRET") == "1":  # numpy warns where a power is endless or a number none
        for item in items:
            item.add_marker(pytest.mark.filterwarnings("ignore:overflow encountered"))
            item.add_marker(pytest.mark.filterwarnings("ignore:invalid value encountered"))
    if config.getoption("--full"):
        return
    for item in items:
        if item.get_closest_marker("full"):
            item.add_marker(pytest.mark.skip(reason="a long count: pytest --full"))


@pytest.fixture
def count(request: pytest.FixtureRequest) -> Callable[[int, int], int]:
    """How often a test repeats: a small number by default, the full one under --full."""
    full = bool(request.config.getoption("--full"))
    return lambda small, large: large if full else small


@pytest.fixture(scope="session")
def shared() -> Path:
    """The corpora and weights that are not shipped with the project."""
    folder = Path(__file__).resolve().parents[2] / "shared"
    if not folder.is_dir():
        pytest.skip("needs the shared data beside the project")
    return folder
