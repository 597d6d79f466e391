"""The one switch: `fast = "off"` in a recipe, `tv.load(fast="off")`, and `trivium show --fast`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import trivium as tv
from tests.training.conftest import create, finish, start
from trivium.cli.main import app
from trivium.errors import RequestError
from trivium.fast.choose import FAST, PLAIN
from trivium.training.build_job import build_job
from trivium.training.loop import updates
from trivium.training.recipe import Recipe

Make = Callable[..., Recipe]


@pytest.mark.parametrize("kind", ["decoder", "encoder", "encoder-decoder"])
def test_a_run_without_fast_modules_has_the_same_losses(small: Make, tmp_path: Path, kind: str) -> None:
    """To 1e-4 in float32, where only the order of sums differs."""
    losses = {}
    for fast in ("on", "off"):
        job = build_job(create(small(kind, precision="fp32", fast=fast), tmp_path / fast), 12)
        kinds = {type(module) for module in job.model.modules()}
        assert bool(kinds & set(PLAIN)) == (fast == "on")
        assert bool(kinds & set(FAST)) == (fast == "off")
        losses[fast] = [float(update.loss) for update in updates(job)]
    assert losses["on"] == pytest.approx(losses["off"], rel=1e-4)


def test_a_loaded_model_is_fast_unless_it_is_told(small: Make, tmp_path: Path) -> None:
    finish(session := start(small(), tmp_path))
    folder = session.folder
    fast, plain = tv.load(folder), tv.load(folder, fast="off")
    assert {type(module) for module in fast.module.modules()} & set(PLAIN)
    assert not {type(module) for module in plain.module.modules()} & set(PLAIN)
    ids = torch.tensor([[1, 2, 3, 4]])
    torch.testing.assert_close(fast.logits(ids), plain.logits(ids), rtol=1e-4, atol=1e-5)
    with pytest.raises(RequestError, match="fast: 'no' is neither on nor off"):
        tv.load(folder, fast="no")  # type: ignore[arg-type]
    shown = CliRunner().invoke(app, ["show", str(folder), "--fast"])
    assert shown.exit_code == 0
    assert "FastAttention" in shown.stdout
    assert "fast MultiHeadAttention" in shown.stdout
