"""The architectures and objectives of the T5 table, every cell built and trained a little (spec: objectives §8)."""

from __future__ import annotations

import gzip
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.objectives.samples import octets, stream
from trivium.data.packing import Rows
from trivium.models.config import AnyStack, ModelConfig, NoStack, Stack, TiedStack
from trivium.models.options import Block
from trivium.models.transformer import build
from trivium.objectives.options import Causal, Denoise, Objective, Prefix
from trivium.parts.init import T5
from trivium.parts.options.attention import MultiHeadOptions
from trivium.parts.options.norms import RMSNormOptions
from trivium.parts.options.positions import BucketOptions

LAYERS, CONTEXT, VOCAB = 2, 48, 400
BLOCK = Block(norm=RMSNormOptions(), position=BucketOptions(buckets=16, distance=32))
TEXT = Path(__file__).resolve().parents[2] / "trivium" / "assets" / "shakespeare-train.txt.gz"


def _model(encoder: int, decoder: int, kind: type[Stack | TiedStack] = Stack) -> ModelConfig:
    """`encoder` and `decoder` layers of T5's kind; none is no side at all."""
    crossed = replace(BLOCK, cross=MultiHeadOptions())
    first: AnyStack = Stack(layers=encoder, block=BLOCK) if encoder else NoStack()
    second: AnyStack = kind(layers=decoder, block=crossed if encoder else BLOCK)
    return ModelConfig(width=32, context=CONTEXT, vocab=VOCAB, encoder=first, decoder=second, init=T5())


ARCHITECTURES = {
    "encoder-decoder": _model(LAYERS, LAYERS),
    "shared": _model(LAYERS, LAYERS, TiedStack),
    "half depth": _model(LAYERS // 2, LAYERS // 2),
    "language model": _model(0, LAYERS),
    "prefix LM": _model(0, LAYERS),
}


def _objective(architecture: str, kind: str) -> Objective:
    """What the table means by it, for each architecture."""
    if kind == "LM":
        return Causal() if architecture == "language model" else Prefix()
    noise = Denoise(noise="iid" if kind == "denoising, iid" else "span")
    return replace(noise, attention="prefix") if architecture == "prefix LM" else noise


CELLS = [(architecture, kind) for architecture in ARCHITECTURES for kind in ("LM", "denoising, iid", "denoising, span")]


@pytest.fixture(scope="module")
def text() -> list[int]:
    return list(gzip.decompress(TEXT.read_bytes())[:100_000])


@pytest.mark.parametrize(("architecture", "kind"), CELLS, ids=[f"{a}: {k}" for a, k in CELLS])
def test_every_cell_of_the_table_learns(architecture: str, kind: str, text: list[int]) -> None:
    config, objective = ARCHITECTURES[architecture], _objective(architecture, kind)
    assert config.family in objective.families
    tokenizer = octets(objective)
    task, model = objective.bind(tokenizer, config), build(config, seed=0)
    rows = Rows(stream([text], end=tokenizer.end), task.length)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3, fused=True)
    losses = []
    for step in range(30):
        rng = np.random.default_rng(step)
        batch = task.inputs(rows.take(rng.integers(0, len(rows), 6)), rng)
        loss = task.loss(model, model(**batch.inputs), batch.targets)["tokens"].sum / batch.counts["tokens"]
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        losses.append(loss.item())
    first, last = np.mean(losses[:3]), np.mean(losses[-5:])
    assert last < first - 0.5
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_parameters_and_work_are_those_of_the_table() -> None:
    """P for a stack of twelve layers (here two), M for its work: 2P and M, P and M, P and M/2, P and M, P and M.

    An encoder-decoder reads a token in one of its stacks, so that its work for one is half of the sum of both. What
    it has across is its own and not in the table's P; the shared one has it for all its decoder layers.
    """
    alone = ARCHITECTURES["language model"].costs()
    unit = sum(alone[part].parameters for part in ("attention", "feedforward"))
    work = sum(alone[part].flops for part in ("attention", "feedforward"))
    for name, parameters, cost in (
        ("encoder-decoder", 2, 1.0),
        ("shared", 1, 1.0),
        ("half depth", 1, 0.5),
        ("language model", 1, 1.0),
        ("prefix LM", 1, 1.0),
    ):
        config = ARCHITECTURES[name]
        costs, sides = config.costs(), 2 if config.family == "encoder-decoder" else 1
        assert sum(costs[part].parameters for part in ("attention", "feedforward")) == parameters * unit
        assert sum(costs[part].flops for part in ("attention", "feedforward")) / sides == cost * work
        assert config.parameters() == sum(parameter.numel() for parameter in build(config).parameters())
    across = {
        name: ARCHITECTURES[name].costs()["cross"].parameters for name in ("shared", "encoder-decoder", "half depth")
    }
    assert across["shared"] == across["encoder-decoder"] == 2 * across["half depth"] == alone["attention"].parameters
