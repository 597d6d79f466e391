"""The small run of the training tests, for what goes wrong in the middle of one."""

from __future__ import annotations

from tests.training.conftest import small, text

__all__ = ["small", "text"]
