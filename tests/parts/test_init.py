"""Initialisations against the published deviations."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import ClassVar, cast

import pytest
import torch
from torch import Tensor, nn

from trivium.models.config import ModelConfig, Stack
from trivium.models.options import Block
from trivium.models.transformer import Transformer, build
from trivium.parts.declared import EMBEDDING, POSITION, VECTOR
from trivium.parts.init import T5, FanIn, Gpt, Gpt2, Init, Xavier
from trivium.parts.linear import Linear
from trivium.parts.norms import LayerNorm, RMSNorm
from trivium.parts.options.attention import MultiHeadOptions
from trivium.parts.options.embeddings import TokenEmbeddingOptions
from trivium.parts.options.feedforward import GluOptions, MlpOptions
from trivium.parts.options.positions import BucketOptions
from trivium.parts.positions import BucketPositions, LearnedPositions
from trivium.parts.roles import WRITERS

LAYERS = 8


def built(init: Init, *, seed: int = 0, tied: bool = True) -> Transformer:
    block = Block(
        attention=MultiHeadOptions(heads=4, bias="all", norm="rms"), feedforward=GluOptions(hidden=192, bias=True)
    )
    return build(
        ModelConfig(
            width=128,
            context=64,
            vocab=300,
            embedding=TokenEmbeddingOptions(tie="output" if tied else "none"),
            decoder=Stack(layers=LAYERS, block=block),
            init=init,
        ),
        seed=seed,
    )


def linears(model: nn.Module) -> list[Linear]:
    return [module for module in model.modules() if isinstance(module, Linear) and module.role != "head"]


def near(tensor: Tensor, std: float) -> bool:
    """Within five standard errors of a normal sample of this size, in mean and deviation."""
    slack = 5 / math.sqrt(tensor.numel())
    return abs(tensor.mean().item()) < slack * std and abs(tensor.std().item() / std - 1) < slack


@pytest.mark.parametrize("init", [Gpt(), Gpt2(), FanIn(), Xavier(), T5()], ids=lambda init: type(init).__name__)
def test_gains_are_one_and_biases_zero(init: Init) -> None:
    for module in built(init).modules():
        if isinstance(module, LayerNorm | RMSNorm):
            assert bool((module.weight == 1).all())
        if isinstance(module, Linear | LayerNorm) and module.bias is not None:
            assert bool((module.bias == 0).all())


def test_gpt_draws_all_matrices_alike() -> None:
    model = built(Gpt())
    assert near(model.embedding.weight, 0.02)
    assert all(near(layer.weight, 0.02) for layer in linears(model))


def test_gpt2_scales_what_writes_into_the_stream_by_depth() -> None:
    model = built(Gpt2())
    assert near(model.embedding.weight, 0.02)
    roles = {layer.role for layer in linears(model)}
    assert roles >= WRITERS
    for layer in linears(model):
        assert near(layer.weight, 0.02 / math.sqrt(2 * LAYERS) if layer.role in WRITERS else 0.02), layer.role
    tables = [module.table for module in model.modules() if isinstance(module, LearnedPositions)]
    assert len(tables) == 1
    assert near(tables[0], 0.02)


def test_fan_in_writes_nothing_at_first_and_scales_by_the_inputs() -> None:
    model = built(FanIn())
    for layer in linears(model):
        if layer.role in WRITERS:
            assert bool((layer.weight == 0).all())
        else:
            assert near(layer.weight, 1 / math.sqrt(128))
    tokens = torch.tensor([[1, 5, 7]])
    assert model.decoder is not None
    entered = model.decoder.embed(model.embedding.enter(tokens), torch.arange(3)[None])
    torch.testing.assert_close(model(tokens).hidden, model.decoder.final(entered))


def test_at_its_start_fan_in_gives_gradients_to_the_writers_only() -> None:
    model = built(FanIn(), tied=False)
    tokens, labels = torch.tensor([[1, 5, 7]]), torch.tensor([5, 7, 2])
    model.head.nll(model(tokens).hidden.flatten(0, 1), labels).sum().backward()  # type: ignore[no-untyped-call]
    for layer in linears(model):
        assert layer.weight.grad is not None
        assert bool((layer.weight.grad != 0).any()) == (layer.role in WRITERS)


def test_an_untied_head_is_drawn_too() -> None:
    model = built(Gpt2(), tied=False)
    (head,) = (module for module in model.modules() if isinstance(module, Linear) and module.role == "head")
    assert near(head.weight, 0.02)


def test_a_tied_matrix_is_drawn_once_as_the_embedding() -> None:
    assert torch.equal(built(FanIn(table=0.5)).embedding.weight, built(FanIn(table=0.5), tied=False).embedding.weight)
    assert near(built(FanIn(table=0.5)).embedding.weight, 0.5)


def test_every_weight_is_drawn() -> None:
    """Weights begin as whatever the memory holds: fill it with a mark before init and look for it afterwards."""
    for init in (Gpt(), Gpt2(), FanIn(), Xavier(), T5()):
        model = built(init)
        with torch.no_grad():
            for module in model.modules():
                if isinstance(module, Linear):
                    for parameter in module.parameters():
                        parameter.fill_(math.nan)
            for parameter in model.embedding.parameters():
                parameter.fill_(math.nan)
        init.apply(model, width=model.config.width, layers=LAYERS, generator=torch.Generator().manual_seed(0))
        assert all(bool(parameter.isfinite().all()) for parameter in model.parameters())


def test_xavier_draws_each_matrix_within_its_bound_as_torch_does() -> None:
    model = built(Xavier())
    for layer in linears(model):
        theirs = torch.empty(layer.out_features, layer.in_features)
        nn.init.xavier_uniform_(theirs, generator=torch.Generator().manual_seed(0))
        bound = math.sqrt(6 / (layer.in_features + layer.out_features))
        assert 0.99 * bound < layer.weight.abs().max().item() <= bound
        assert layer.weight.std().item() == pytest.approx(theirs.std().item(), rel=0.05)
    assert near(model.embedding.weight, 128**-0.5)  # times sqrt(width): tokens of size 1, as the sinusoids


def test_t5_folds_the_scale_of_its_scores_into_the_queries() -> None:
    block = Block(
        attention=MultiHeadOptions(heads=4, head=16, scale="none"), feedforward=MlpOptions(hidden=192, bias=False)
    )
    config = ModelConfig(
        width=128,
        context=64,
        vocab=300,
        embedding=TokenEmbeddingOptions(tie="none"),
        decoder=Stack(layers=LAYERS, block=replace(block, position=BucketOptions())),
        init=T5(),
    )
    model = build(config)
    expected = {"query": (128 * 16) ** -0.5, "attention-out": (4 * 16) ** -0.5, "down": 192**-0.5}
    for layer in linears(model):
        assert near(layer.weight, expected.get(layer.role, 128**-0.5)), layer.role
    assert near(model.embedding.weight, 1.0)
    assert model.decoder is not None
    (position,) = model.decoder.positions
    assert near(cast(BucketPositions, position).table, 128**-0.5)


def test_a_table_from_outside_is_drawn_by_its_kind() -> None:
    """Init knows no names: a module declares what its parameters are."""

    class Outside(nn.Module):
        declares: ClassVar = {"rows": EMBEDDING, "gain": VECTOR, "missing": POSITION}

        def __init__(self) -> None:
            super().__init__()
            self.rows = nn.Parameter(torch.full((200, 50), math.nan))
            self.gain = nn.Parameter(torch.full((3,), 7.0))
            self.missing = None

    module = Outside()
    Gpt(std=0.5).apply(module, width=50, layers=1, generator=torch.Generator().manual_seed(0))
    assert near(module.rows, 0.5)
    assert bool((module.gain == 7).all())
