"""Averaged weights are validated and delivered; the trained ones go on as if there were none."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from tests.training.conftest import create, finish, start
from trivium.checkpoints import format
from trivium.models.transformer import load_weights, weights
from trivium.training.build_job import build_job
from trivium.training.loop import updates
from trivium.training.recipe import Recipe
from trivium.training.validate import validate

Make = Callable[..., Recipe]
EMA = {"average.kind": "ema", "average.decay": 0.5, "average.warmup": "none"}


def test_the_average_does_not_touch_the_training(small: Make, tmp_path: Path) -> None:
    found = []
    for name, changes in (("none", {}), ("ema", EMA)):
        job = build_job(create(small(**changes), tmp_path / name), 6)
        found.append(([float(update.loss) for update in updates(job)], weights(job.model)))
    assert found[0][0] == found[1][0]
    assert all(torch.equal(found[0][1][name], tensor) for name, tensor in found[1][1].items())


def test_validation_and_the_finished_model_have_the_averaged_weights(small: Make, tmp_path: Path) -> None:
    """The oracle is the definition: half of the old average and half of the weights, step by step."""
    context = create(small(**EMA), tmp_path)
    job = build_job(context, 6)
    average = {name: tensor.clone() for name, tensor in weights(job.model).items()}
    for _ in updates(job):
        now = weights(job.model)
        average = {name: 0.5 * average[name] + 0.5 * now[name] for name in average}
    used = job.weights_for_use()
    raw = {name: tensor.clone() for name, tensor in weights(job.model).items()}
    for name, tensor in used.items():
        torch.testing.assert_close(tensor, average[name])
    assert any(not torch.equal(tensor, raw[name]) for name, tensor in used.items())
    scored = validate(job, context.valid, limit=0).loss
    assert all(torch.equal(tensor, raw[name]) for name, tensor in weights(job.model).items())  # back in training
    plain = build_job(create(small(), tmp_path / "plain"), 6)
    load_weights(plain.model, used)
    assert validate(plain, context.valid, limit=0).loss == scored
    load_weights(plain.model, raw)
    assert validate(plain, context.valid, limit=0).loss != scored


def test_a_run_delivers_the_average_of_its_checkpoint(small: Make, tmp_path: Path) -> None:
    session = start(small(**EMA, **{"checkpoint.use": "last"}), tmp_path)
    finish(session)
    last = session.folder / "checkpoints" / "step-00000020"
    delivered = format.read_tensors(session.folder / "model.safetensors")
    averaged, raw = format.tensors(last, "average"), format.tensors(last, "model")
    assert delivered.keys() == raw.keys()
    assert all(torch.equal(delivered[name], tensor) for name, tensor in averaged.items())
    assert any(not torch.equal(delivered[name], tensor) for name, tensor in raw.items())
