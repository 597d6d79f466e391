"""The batch with the last, shorter row of a text gets no compiled program of its own, unless it comes often."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.training.conftest import create
from trivium.training.build_job import build_job
from trivium.training.loop import updates
from trivium.training.recipe import Recipe

Shapes = tuple[tuple[str, torch.Size], ...]


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[Shapes]:
    """The shapes of all batches that a compiled program has been given."""
    seen: list[Shapes] = []

    def compile(function: Callable[..., Tensor], **_: Any) -> Callable[..., Tensor]:
        def program(inputs: dict[str, Tensor], targets: dict[str, Tensor]) -> Tensor:
            seen.append(tuple((name, tensor.shape) for name, tensor in (inputs | targets).items()))
            return function(inputs, targets)

        return program

    monkeypatch.setattr(torch, "compile", compile)
    return seen


@pytest.mark.parametrize("kind", ["encoder", "encoder-decoder", "decoder"])
def test_one_program_is_enough_for_an_epoch(
    kind: str, small: Callable[..., Recipe], compiled: list[Shapes], tmp_path: Path
) -> None:
    """A mask for one short row would make another program of the same step; a decoder needs none for it."""
    context = create(small(kind, compile="on", **{"batch.micro": 6}), tmp_path / "run")
    steps = len(context.train) // 6 + 1  # the whole epoch
    job = build_job(context, steps)
    assert all(torch.isfinite(update.loss) for update in updates(job))
    assert len(compiled) == steps - (kind != "decoder")
    assert len(set(compiled)) == 1


def test_where_it_comes_in_most_batches_it_is_compiled(
    small: Callable[..., Recipe], compiled: list[Shapes], tmp_path: Path
) -> None:
    context = create(small("encoder", compile="on", **{"batch.micro": 64, "batch.rows": 64}), tmp_path / "run")
    assert len(context.train) < 10 * 64
    list(updates(build_job(context, 8)))
    assert len(compiled) == 8
    assert any("padding" in dict(shapes) for shapes in compiled)
