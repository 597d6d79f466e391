"""Residual schemes against their formulas."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tests.parts.drawing import random
from trivium.models.config import ModelConfig, Stack
from trivium.models.options import Block
from trivium.models.transformer import build
from trivium.parts.linear import Linear
from trivium.parts.options.attention import MultiHeadOptions
from trivium.parts.options.norms import LayerNormOptions
from trivium.parts.options.positions import NoPositionOptions
from trivium.parts.options.residual import PostOptions, PreOptions, Residual, SandwichOptions
from trivium.parts.roles import WRITERS
from trivium.parts.site import Site

SITE = Site(width=6, context=8)
NORM = LayerNormOptions()


def joined(options: Residual, x: Tensor, weight: Tensor) -> Tensor:
    """The sub-layer F(x) = x W in this scheme."""
    result: Tensor = options.build(SITE, NORM, 0.0)(x, lambda y: y @ weight)
    return result


def test_pre_norm_and_post_norm_are_their_formulas() -> None:
    x, weight, norm = random(3, 6), random(6, 6, seed=1), nn.LayerNorm(6)
    torch.testing.assert_close(joined(PreOptions(), x, weight), x + norm(x) @ weight)
    torch.testing.assert_close(joined(PostOptions(), x, weight), norm(x + x @ weight))


def states(residual: Residual) -> tuple[Tensor, Tensor]:
    """The states after a stack whose layers write nothing, and what went into it."""
    block = Block(attention=MultiHeadOptions(heads=2, bias="all"), residual=residual, position=NoPositionOptions())
    model = build(ModelConfig(width=6, context=8, vocab=9, decoder=Stack(layers=3, block=block))).double()
    with torch.no_grad():
        for layer in model.modules():
            if isinstance(layer, Linear) and layer.role in WRITERS:
                layer.weight.zero_()
        tokens = torch.tensor([[1, 4, 2, 2]])
        return model(tokens).hidden, model.embedding.weight[tokens]


def test_a_pre_norm_stack_that_writes_nothing_is_the_identity_before_its_final_norm() -> None:
    out, entered = states(PreOptions())
    torch.testing.assert_close(out, nn.LayerNorm(6).double()(entered))


def test_a_post_norm_stack_norms_every_time_and_not_at_the_end() -> None:
    out, expected = states(PostOptions())
    for _ in range(6):
        expected = nn.LayerNorm(6).double()(expected)
    torch.testing.assert_close(out, expected)


def test_dropout_falls_on_the_sub_layers_output_and_spares_the_stream() -> None:
    around = PreOptions().build(SITE, NORM, 0.5)
    x = random(200, 6)
    torch.manual_seed(0)
    change = around(x, torch.ones_like) - x
    assert set(change.round(decimals=4).flatten().tolist()) == {0.0, 2.0}
    assert around.eval()(x, torch.ones_like).equal(x + 1)


def test_cost_counts_one_norm_per_sub_layer_and_the_final_one() -> None:
    assert [scheme.cost(SITE, NORM).parameters for scheme in (PreOptions(), PostOptions())] == [12, 12]
    assert [scheme.final_cost(SITE, NORM).parameters for scheme in (PreOptions(), PostOptions())] == [12, 0]


def test_a_sandwich_norms_what_goes_in_and_what_comes_out() -> None:
    x, weight, norm = random(3, 6), random(6, 6, seed=1), nn.LayerNorm(6)
    torch.testing.assert_close(joined(SandwichOptions(), x, weight), x + norm(norm(x) @ weight))
    assert SandwichOptions().cost(SITE, NORM).parameters == 4 * 6
    assert SandwichOptions().final_cost(SITE, NORM).parameters == 2 * 6
