"""The one switch: `fast = "off"` in a recipe, `tv.load(fast="off")`, and `trivium show --fast`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import trivium as tv
from tests.training.conftest import create, finish, start
from trivium.cli.main import app
from trivium.errors import ConfigError, RequestError
from trivium.fast.choose import FAST, PLAIN, fast
from trivium.parts.output import VocabularyOutput
from trivium.training.build_job import build_job
from trivium.training.loop import updates
from trivium.training.machine import Gpu, Machine
from trivium.training.recipe import Recipe

Make = Callable[..., Recipe]


@pytest.mark.parametrize("kind", ["decoder", "encoder", "encoder-decoder"])
def test_a_run_without_fast_modules_has_the_same_losses(small: Make, tmp_path: Path, kind: str) -> None:
    """To 1e-4 in float32, where only the order of sums differs."""
    losses = {}
    for how in ("on", "off"):
        job = build_job(create(small(kind, precision="fp32", fast=how), tmp_path / how), 12)
        kinds = {type(module) for module in job.model.modules()}
        assert bool(kinds & set(PLAIN)) == (how == "on")
        assert bool(kinds & set(FAST)) == (how == "off")
        losses[how] = [float(update.loss) for update in updates(job)]
    assert losses["on"] == pytest.approx(losses["off"], rel=1e-4)


def test_a_loaded_model_is_fast_unless_it_is_told(small: Make, tmp_path: Path) -> None:
    finish(session := start(small(), tmp_path))
    folder = session.folder
    loaded, plain = tv.load(folder), tv.load(folder, fast="off")
    assert {type(module) for module in loaded.module.modules()} & set(PLAIN)
    assert not {type(module) for module in plain.module.modules()} & set(PLAIN)
    ids = torch.tensor([[1, 2, 3, 4]])
    torch.testing.assert_close(loaded.logits(ids), plain.logits(ids), rtol=1e-4, atol=1e-5)
    with pytest.raises(RequestError, match="fast: 'no' is neither on nor off"):
        tv.load(folder, fast="no")  # type: ignore[arg-type]
    shown = CliRunner().invoke(app, ["show", str(folder), "--fast"])
    assert shown.exit_code == 0
    assert "FastAttention" in shown.stdout
    assert "fast MultiHeadAttention" in shown.stdout


def test_what_only_fast_modules_have_is_refused_without_them(small: Make) -> None:
    machine = Machine(gpus=(Gpu("H200", (9, 0)),), bf16=True, mps=False, cores=2)
    for changes, words in (
        ({"precision": "fp8"}, "fast: fp8 products"),
        ({"precision": "bf16", "residual_dtype": "bf16"}, "residual_dtype: a bf16 residual stream"),
    ):
        with pytest.raises(ConfigError, match=words):
            machine.settle(small(device="cuda", fast="off", **changes))
    assert machine.settle(small(device="cuda", fast="off", precision="bf16")).residual_dtype == "fp32"
    assert machine.settle(small(device="cuda", precision="bf16")).residual_dtype == "bf16"


def test_a_wrapper_of_the_output_need_not_know_its_size() -> None:
    model = tv.build("gpt-mini", vocab=300)
    fast(model)
    output = model.output
    assert isinstance(output, VocabularyOutput)
    output.project = nn.Sequential(output.project)  # type: ignore[assignment]
    hidden, labels = torch.randn(4, model.config.width), torch.arange(4)
    expected = torch.nn.functional.cross_entropy(model.head.logits(hidden), labels, reduction="sum")
    torch.testing.assert_close(model.head.loss(hidden, labels), expected)
