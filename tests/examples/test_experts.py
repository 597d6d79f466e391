"""The example of a feed-forward part with stacked matrices and a loss of its own."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import trivium as tv
from examples.experts import ExpertFeedForward, Experts
from trivium.models.config import ModelConfig, NoStack, Stack
from trivium.models.options import Block
from trivium.models.transformer import build
from trivium.objectives.options import Masked
from trivium.optim.groups import trainable
from trivium.optim.options import Muon
from trivium.parts.init import FanIn
from trivium.parts.losses import WithLosses
from trivium.parts.masks import Mask, ScoreMask
from trivium.parts.mixers import Context
from trivium.parts.positions import Positions

CONFIG = ModelConfig(
    width=16, context=24, vocab=64, decoder=Stack(layers=2, block=Block(feedforward=Experts(experts=3)))
)


def test_stacked_matrices_are_drawn_by_their_inputs_and_counted() -> None:
    model = build(ModelConfig(width=64, context=8, vocab=64, init=FanIn(), decoder=CONFIG.decoder))
    assert model.decoder is not None
    part = model.decoder.blocks[0].feedforward
    assert isinstance(part, ExpertFeedForward)
    assert float(part.up_EFD.detach().std()) == pytest.approx(64**-0.5, rel=0.05)
    assert not part.down_EDF.detach().any()  # it writes into the residual stream
    assert sum(parameter.numel() for parameter in model.parameters()) == model.config.parameters()


def test_muon_orthogonalises_every_expert_alone() -> None:
    model = build(CONFIG)
    assert {weight.kind for weight in trainable(model) if "_E" in weight.name} == {"matrix"}
    assert model.decoder is not None
    part = model.decoder.blocks[0].feedforward
    assert isinstance(part, ExpertFeedForward)
    optimizer = Muon(rate=0.1, decay=0.0).build(model)
    before = part.up_EFD.detach().clone()
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(parameter.numel()))
    optimizer.step(1.0, torch.tensor(True))
    for moved in part.up_EFD.detach() - before:
        singular = torch.linalg.svdvals(moved)
        assert float(singular.max() / singular.min()) < 3  # a drawn matrix of this shape has some 3.5


def test_the_balance_of_even_experts_is_one() -> None:
    part = ExpertFeedForward(Experts(experts=4), 8, 8)
    with torch.no_grad():
        part.router.weight.zero_()
        part.up_EFD.normal_()
        part.down_EDF.normal_()
    output = part(torch.randn(2, 5, 8))
    assert isinstance(output, WithLosses)
    assert output.losses["balance"].over == "sequences"
    assert float(output.losses["balance"].sum.detach()) / 2 == pytest.approx(1.0)


def test_a_masked_objective_reports_the_balance_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A statistic of the batch is not divided by the labels, which are 15 % of the positions here."""
    monkeypatch.chdir(tmp_path)
    text = tmp_path / "play.txt"
    text.write_text("to be or not to be that is the question " * 100)
    experts = Stack(layers=1, block=Block(feedforward=Experts(experts=1, hidden=8)))
    model = ModelConfig(width=16, context=24, vocab=0, encoder=experts, decoder=NoStack())
    small = {"data.paths": [str(text)], "budget.steps": 3, "batch.rows": 6, "batch.micro": 4, "tokenizer": "bytes"}
    more = {"device": "cpu", "threads": 1, "precision": "fp32", "sample.every": 0}
    run = tv.train(tv.Recipe(name="masked", model=model, objective=Masked()), overrides={**small, **more})
    assert run.metrics
    for row in run.metrics:
        assert row["losses"]["balance"] == pytest.approx(1.0)  # of a single expert, whatever the batch


def test_padding_does_not_count_in_the_balance() -> None:
    part = ExpertFeedForward(Experts(experts=4), 8, 8)
    with torch.no_grad():
        for parameter in part.parameters():
            parameter.normal_()
    x_BTD = torch.randn(2, 5, 8)
    real_BT = torch.tensor([[True] * 5, [True, True, False, False, False]])
    mask = ScoreMask(Mask(padding=real_BT), 5, 5, x_BTD.device)
    ctx = Context(mask=mask, position=Positions(), at=torch.arange(5)[None])
    other = x_BTD.masked_fill(~real_BT[..., None], 100.0)
    assert ctx.real is not None
    assert torch.equal(ctx.real, real_BT)
    losses = [float(part(x, ctx).losses["balance"].sum.detach()) for x in (x_BTD, other)]
    assert losses[0] == pytest.approx(losses[1])
    assert losses[0] != pytest.approx(float(part(other).losses["balance"].sum.detach()))


def test_its_loss_reaches_the_log_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    text = tmp_path / "play.txt"
    text.write_text("".join(chr(97 + number % 26) for number in range(4000)))
    recipe = tv.Recipe(name="experts", model=ModelConfig(width=16, context=24, vocab=0, decoder=CONFIG.decoder))
    small = {"data.paths": [str(text)], "budget.steps": 4, "batch.rows": 4, "tokenizer": "bytes", "device": "cpu"}
    run = tv.train(recipe, overrides={**small, "threads": 1, "precision": "fp32", "sample.every": 0})
    steps = [row for row in run.metrics if row["kind"] == "train"]
    assert len(steps) == 4
    for row in steps:
        assert list(row["losses"]) == ["tokens", "balance"]
        assert row["loss"] == pytest.approx(row["losses"]["tokens"] + 0.01 * row["losses"]["balance"], rel=1e-5)
    assert all(0.9 < row["losses"]["balance"] < 8 for row in steps)
