"""Norms against worked numbers and torch's own modules."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.parts.drawing import drawn, random
from trivium.errors import ConfigError
from trivium.parts.options.norms import LayerNormOptions, RMSNormOptions
from trivium.parts.site import Site

SITE = Site(width=4, context=8)
X = torch.tensor([1.0, 2.0, 3.0, 4.0])


def test_layer_norm_gives_the_worked_numbers() -> None:
    worked = torch.tensor([-1.341635, -0.447212, 0.447212, 1.341635])
    torch.testing.assert_close(LayerNormOptions(eps=1e-5).build(SITE)(X), worked, atol=1e-6, rtol=0)


def test_rms_norm_gives_the_worked_numbers() -> None:
    worked = torch.tensor([0.365148, 0.730297, 1.095445, 1.460593])
    torch.testing.assert_close(RMSNormOptions(eps=1e-6).build(SITE)(X), worked, atol=1e-6, rtol=0)


@pytest.mark.parametrize("bias", [True, False])
def test_layer_norm_equals_torchs_own(bias: bool) -> None:
    ours = drawn(LayerNormOptions(eps=1e-3, bias=bias).build(SITE))
    theirs = nn.LayerNorm(4, eps=1e-3, bias=bias)
    theirs.load_state_dict(ours.state_dict())
    torch.testing.assert_close(ours(random(3, 5, 4)), theirs(random(3, 5, 4)))


def test_rms_norm_equals_torchs_own() -> None:
    ours, theirs = drawn(RMSNormOptions(eps=1e-3).build(SITE)), nn.RMSNorm(4, eps=1e-3)
    theirs.load_state_dict(ours.state_dict())
    torch.testing.assert_close(ours(random(3, 5, 4)), theirs(random(3, 5, 4)))


def test_rms_norm_is_layer_norm_for_centred_input() -> None:
    x = random(5, 4)
    x = x - x.mean(-1, keepdim=True)
    torch.testing.assert_close(RMSNormOptions(eps=1e-5).build(SITE)(x), LayerNormOptions(eps=1e-5).build(SITE)(x))


def test_rms_statistics_are_never_taken_in_half_precision() -> None:
    """The squares of these overflow float16, and bfloat16 would stop counting at 256 of them."""
    large = torch.full((1, 4), 1000.0, dtype=torch.float16)
    torch.testing.assert_close(RMSNormOptions().build(SITE).half()(large), torch.ones(1, 4, dtype=torch.float16))
    wide = RMSNormOptions().build(Site(width=4096, context=1)).to(torch.bfloat16)
    ones = torch.ones(1, 4096, dtype=torch.bfloat16)
    assert torch.equal(wide(ones), ones)


def test_rms_norm_keeps_the_precision_of_float64() -> None:
    x = random(5, 4).double()
    expected = x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt()
    torch.testing.assert_close(RMSNormOptions().build(SITE).double()(x), expected, atol=1e-14, rtol=1e-14)


def test_cost_counts_gains_and_shifts() -> None:
    for options, count in ((LayerNormOptions(), 8), (LayerNormOptions(bias=False), 4), (RMSNormOptions(), 4)):
        assert options.cost(SITE).parameters == count
        built = options.build(SITE)
        assert sum(parameter.numel() for parameter in built.parameters()) == count


def test_an_eps_that_is_not_positive_is_refused() -> None:
    with pytest.raises(ConfigError, match="eps: 0 is not positive"):
        LayerNormOptions(eps=0)
    with pytest.raises(ConfigError, match="eps: -1 is not positive"):
        RMSNormOptions(eps=-1)
