"""A loss that only one part knows by name: in the total, in every log and in validation."""

from __future__ import annotations

import csv
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.training.conftest import create, finish, start
from tests.training.test_resume import assert_goes_on_exactly
from tests.training.test_second import speeches, two_heads  # noqa: F401
from trivium.models.transformer import States, Transformer
from trivium.parts.losses import Loss
from trivium.training.build_job import build_job
from trivium.training.events import Progress, Validated, line
from trivium.training.loop import updates
from trivium.training.metrics import rows
from trivium.training.readout import ReadOut
from trivium.training.recipe import Recipe
from trivium.training.validate import validate

Make = Callable[..., Recipe]


@pytest.fixture
def balanced(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model with a part whose loss is the mean square of the states, at a hundredth; another is only reported."""
    forward = Transformer.forward

    def with_losses(self: Transformer, *args: Any, **kwargs: Any) -> States:
        states = forward(self, *args, **kwargs)
        tokens = states.hidden.shape[0] * states.hidden.shape[1]
        balance = Loss(states.hidden.float().square().mean() * tokens, weight=0.01)
        return States(states.hidden, {"balance": balance, "size": balance._replace(weight=0.0)})

    monkeypatch.setattr(Transformer, "forward", with_losses)


@pytest.mark.usefixtures("balanced")
@pytest.mark.parametrize("micro", [0, 2])
def test_the_loss_of_a_part_is_in_the_total_and_in_every_log(small: Make, tmp_path: Path, micro: int) -> None:
    session = start(small(track="csv", **{"batch.micro": micro}), tmp_path)
    told = finish(session)
    lines = rows(session.folder / "metrics.jsonl")
    assert {row["kind"] for row in lines} == {"train", "valid"}
    for row in lines:
        means = row["losses"]
        assert list(means) == ["tokens", "balance", "size"]
        assert means["size"] == means["balance"] > 0
        assert row["loss"] == pytest.approx(means["tokens"] + 0.01 * means["balance"], rel=1e-6)
    with (session.folder / "metrics.csv").open(newline="", encoding="utf-8") as file:
        table = list(csv.DictReader(file))
    assert [float(row["losses/balance"]) for row in table] == [row["losses"]["balance"] for row in lines]
    shown = [event for event in told if isinstance(event, Progress | Validated)]
    assert all(
        f"(tokens {event.losses['tokens']:.4f}, balance {event.losses['balance']:.4f}" in line(event) for event in shown
    )
    bits = [row["bits_per_byte"] / row["losses"]["tokens"] for row in lines if row["kind"] == "valid"]
    assert bits == pytest.approx([bits[0]] * len(bits))  # bits are those of the tokens alone


@pytest.mark.usefixtures("balanced")
def test_its_gradient_reaches_the_weights(small: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    context = create(small(), tmp_path)
    job = build_job(context, 30)
    pending = ReadOut()
    for update in updates(job):
        pending.add(update)
    sizes = [read.losses["balance"] for read in pending.read()]
    monkeypatch.undo()
    plain = build_job(context, 30)
    list(updates(plain))
    assert validate(job, context.valid, limit=4).loss == validate(job, context.valid, limit=4).losses["tokens"]
    assert not torch.equal(job.model.embedding.weight, plain.model.embedding.weight)
    assert len(set(sizes)) == 30


def test_one_loss_alone_is_told_as_ever(small: Make, tmp_path: Path) -> None:
    session = start(small(), tmp_path)
    told = finish(session)
    assert not any("losses" in row for row in rows(session.folder / "metrics.jsonl"))
    assert not any(event.losses for event in told if isinstance(event, Progress | Validated))


@pytest.mark.usefixtures("balanced")
def test_a_run_with_several_losses_goes_on_exactly(small: Make, tmp_path: Path) -> None:
    recipe = small(**{"checkpoint.every": 1, "checkpoint.keep": 30, "budget.steps": 12})
    straight = start(recipe, tmp_path / "straight")
    finish(straight)
    assert_goes_on_exactly(straight.folder, 5, tmp_path, 12)


@pytest.mark.parametrize(("kind", "name"), [("pairs", "sentences"), ("spans", "boundary")])
def test_the_losses_of_two_heads_are_told_apart(
    two_heads: Make,  # noqa: F811
    tmp_path: Path,
    kind: str,
    name: str,
) -> None:
    session = start(two_heads(kind), tmp_path)
    finish(session)
    for row in rows(session.folder / "metrics.jsonl"):
        assert list(row["losses"]) == ["tokens", name]
        assert row["loss"] == pytest.approx(sum(row["losses"].values()), rel=1e-5)
