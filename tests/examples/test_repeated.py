"""The example of a stack from outside: one block, many times."""

from __future__ import annotations

import pytest
import torch

from examples.repeated import Repeated
from tests.generation.test_mixers import LENGTHS, greedily, ids_of, requests
from tests.oracle.copying import enliven
from trivium.fast.choose import for_inference
from trivium.generation.engine import stream
from trivium.models.config import ModelConfig, Stack
from trivium.models.options import Block
from trivium.models.transformer import Transformer, build
from trivium.parts.options.positions import ShawOptions


def config(layers: int = 3) -> ModelConfig:
    return ModelConfig(width=16, context=24, vocab=12, decoder=Repeated(layers=layers))


def model() -> Transformer:
    found = build(config())
    enliven(found, seed=1, spread=0.5)
    return found.eval()


def test_it_has_the_parameters_of_one_layer() -> None:
    one = build(ModelConfig(width=16, context=24, vocab=12, decoder=Stack(layers=1)))
    sizes = [sum(parameter.numel() for parameter in part.parameters()) for part in (model(), one)]
    assert sizes[0] == sizes[1] == config().parameters() == config(7).parameters()


def test_positions_of_every_layer_are_one_too() -> None:
    shaw = ModelConfig(width=16, context=24, vocab=12, decoder=Repeated(layers=3, block=Block(position=ShawOptions())))
    assert sum(parameter.numel() for parameter in build(shaw).parameters()) == shaw.parameters()


def test_it_computes_one_block_as_often_as_it_says() -> None:
    """A plain stack whose layers have the same weights is the oracle."""
    plain = build(ModelConfig(width=16, context=24, vocab=12, decoder=Stack(layers=3)))
    ours = model()
    state = dict(ours.state_dict())
    plain.load_state_dict(state)  # every name of the plain stack is a name of the shared block
    ids = torch.tensor([[1, 5, 2, 7, 3]])
    torch.testing.assert_close(ours(ids).hidden, plain.eval()(ids).hidden)


@pytest.mark.parametrize("fast", [False, True])
def test_every_pass_through_the_block_has_a_cache_of_its_own(fast: bool) -> None:
    writer = model()
    if fast:
        for_inference(writer)
    wishes = requests(writer, LENGTHS)
    found = ids_of(stream(writer, wishes, end=None), len(wishes))
    assert found == [greedily(writer, wish.prompt, wish.tokens) for wish in wishes]
