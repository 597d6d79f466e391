"""Parts that nobody in the package knows: built in Python, trained, stopped and resumed, saved and reopened."""

from __future__ import annotations

import gzip
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

import trivium as tv
from trivium.errors import CheckpointError, ConfigError
from trivium.models.config import ModelConfig, Stack
from trivium.models.options import Block
from trivium.models.transformer import build
from trivium.parts.declared import VECTOR
from trivium.parts.linear import Linear
from trivium.parts.mixers import Context
from trivium.parts.site import Cost, Site, matrix
from trivium.training.recipe import Recipe

ASSETS = Path(__file__).resolve().parents[1] / "trivium" / "assets"


@dataclass(frozen=True, kw_only=True, slots=True)
class ScaleNorm:
    """The vector divided by its length, times one learned number: the example of CONTRIBUTING."""

    eps: float = 1e-5

    def build(self, site: Site) -> nn.Module:
        return ScaleNormed(site.width, self.eps)

    def cost(self, site: Site) -> Cost:
        return Cost(1)


class ScaleNormed(nn.Module):
    declares: ClassVar = {"gain": VECTOR}

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.tensor(width**0.5))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = x / x.norm(dim=-1, keepdim=True).clamp(min=self.eps) * self.gain
        return result


@dataclass(frozen=True, kw_only=True, slots=True)
class Maxout:
    """The larger of two linear maps, and back."""

    hidden: int = 24

    def build(self, site: Site) -> nn.Module:
        return MaxoutNetwork(site.width, self.hidden)

    def cost(self, site: Site) -> Cost:
        return matrix(site.width, 2 * self.hidden).plus(matrix(self.hidden, site.width))


class MaxoutNetwork(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.up = Linear(width, 2 * hidden, bias=False, role="up")
        self.down = Linear(hidden, width, bias=False, role="down")

    def forward(self, x: Tensor, ctx: Context) -> Tensor:
        one, other = self.up(x).chunk(2, dim=-1)
        result: Tensor = self.down(torch.maximum(one, other))
        return result


PARTS: list[type[Any]] = [ScaleNorm, Maxout]


def test_parts_from_outside_train_save_and_reopen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    text = tmp_path / "play.txt"
    text.write_bytes(gzip.decompress((ASSETS / "shakespeare-train.txt.gz").read_bytes())[:6000])
    settings = {
        "name": "outside",
        "device": "cpu",
        "threads": 1,
        "precision": "fp32",
        "data.paths": str(text),
        "data.valid": 0.1,
        "tokenizer": "bytes",
        "model.width": 16,
        "model.context": 16,
        "model.decoder.layers": 2,
        "model.decoder.block.attention.heads": 2,
        "model.decoder.block.norm": ScaleNorm(eps=1e-6),
        "model.decoder.block.feedforward": Maxout(),
        "budget.steps": 30,
        "optim.rate": 1e-2,
    }
    run = tv.train(Recipe(), overrides=settings, quiet=True)
    losses = [row["loss"] for row in run.metrics if row.get("kind") == "train"]
    assert losses[-1] < losses[0] - 0.5

    with pytest.raises(CheckpointError, match="there is no kind 'ScaleNorm'"):
        tv.load(run.path)
    model = tv.load(run.path, parts=PARTS)
    config = model.config
    assert "ScaleNorm(eps=1e-06)" in repr(config)
    assert config.parameters() == sum(parameter.numel() for parameter in model.module.parameters())

    model.save(tmp_path / "copy")
    again = tv.load(tmp_path / "copy", parts=PARTS)
    ids = [1, 5, 9, 200]
    assert torch.equal(model.logits(ids), again.logits(ids))

    longer = tv.train(run.path, overrides={"budget.steps": 40}, parts=PARTS, quiet=True)
    assert max(row["step"] for row in longer.metrics) == 40


def test_a_network_that_does_not_take_the_context_is_refused_when_it_is_built() -> None:
    class Forgetful(Maxout):
        def build(self, site: Site) -> nn.Module:
            return nn.Sequential(Linear(site.width, site.width, bias=False, role="up"))

    config = ModelConfig(width=8, context=4, vocab=9, decoder=Stack(layers=1, block=Block(feedforward=Forgetful())))
    with pytest.raises(ConfigError, match=r"^model: Sequential is called as forward\(x, ctx\)"):
        build(config)
