"""The linear layer against torch's own, and what it leaves to others."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.parts.drawing import drawn, random
from trivium.parts.linear import Linear, give_bias


@pytest.mark.parametrize("bias", [True, False])
def test_it_is_torchs_own_layer_with_the_same_weights(bias: bool) -> None:
    ours, theirs = drawn(Linear(6, 8, bias=bias, role="up")), nn.Linear(6, 8, bias=bias)
    theirs.load_state_dict(ours.state_dict())
    x = random(2, 3, 6)
    assert torch.equal(ours(x), theirs(x))


def test_making_one_draws_nothing() -> None:
    before = torch.get_rng_state()
    layer = Linear(6, 8, bias=True, role="query", head=4)
    assert torch.equal(torch.get_rng_state(), before)
    assert (layer.role, layer.head) == ("query", 4)


def test_a_parameter_given_as_bias_is_trained_and_a_tensor_is_not() -> None:
    layer, x = drawn(Linear(6, 8, bias=False, role="head")), random(3, 6)
    plain = layer(x).detach()
    for bias in (nn.Parameter(random(8)), random(8, seed=1), None):
        give_bias(layer, bias)
        torch.testing.assert_close(layer(x), plain if bias is None else plain + bias)
        assert ("bias" in dict(layer.named_parameters())) == isinstance(bias, nn.Parameter)
        assert ("bias" in layer.state_dict()) == (bias is not None)
