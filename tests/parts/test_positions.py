"""Positions against worked numbers, complex multiplication and their invariances."""

from __future__ import annotations

import cmath
import copy
from typing import Literal

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from trivium.errors import ConfigError
from trivium.models.config import Block, ModelConfig, Stack
from trivium.models.transformer import build
from trivium.parts.positions import Learned, LearnedPositions, NoPositions, Positions, Rotary, RotaryPositions
from trivium.parts.site import Site

SITE = Site(width=16, context=12, head=8)
Layout = Literal["halves", "interleaved"]
LAYOUTS: tuple[Layout, ...] = ("halves", "interleaved")
layouts = pytest.mark.parametrize("layout", LAYOUTS)


def turned(part: Positions, x_E: Tensor, at: int) -> Tensor:
    """One vector at one position."""
    return part.rotate(x_E[None, None, None], part.prepare(torch.tensor([[at]])))[0, 0, 0]


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_rotation_gives_the_worked_numbers() -> None:
    x_E = torch.tensor([1.0, 0, 1, 0, 1, 0, 1, 0])
    worked = torch.tensor([0.540302, 0.841471, 0.995004, 0.099833, 0.999950, 0.010000, 1.0, 0.001])
    part = Rotary(layout="interleaved").build(SITE)
    torch.testing.assert_close(turned(part, x_E, 1), worked, atol=1e-6, rtol=0)


@layouts
def test_rotation_is_multiplication_by_complex_numbers(layout: Layout) -> None:
    x_E, at, theta = random(8), 5, 500.0
    actual = turned(Rotary(theta=theta, layout=layout).build(SITE), x_E, at)
    for pair in range(4):
        first, second = (pair, pair + 4) if layout == "halves" else (2 * pair, 2 * pair + 1)
        number = complex(x_E[first].item(), x_E[second].item()) * cmath.exp(1j * at * theta ** (-2 * pair / 8))
        assert actual[first].item() == pytest.approx(number.real, abs=1e-5)
        assert actual[second].item() == pytest.approx(number.imag, abs=1e-5)


@layouts
@settings(max_examples=25, deadline=None)
@given(m=st.integers(0, 60), n=st.integers(0, 60), shift=st.integers(0, 60), seed=st.integers(0, 99))
def test_scores_depend_on_the_distance_alone_and_norms_stay(
    layout: Layout, m: int, n: int, shift: int, seed: int
) -> None:
    part = Rotary(layout=layout).build(SITE)
    query_E, key_E = random(8, seed=seed), random(8, seed=seed + 1000)
    score = turned(part, query_E, m) @ turned(part, key_E, n)
    shifted = turned(part, query_E, m + shift) @ turned(part, key_E, n + shift)
    torch.testing.assert_close(score, shifted, atol=1e-4, rtol=0)
    torch.testing.assert_close(turned(part, query_E, m).norm(), query_E.norm())


@layouts
def test_position_zero_turns_nothing_and_others_do(layout: Layout) -> None:
    part, x_E = Rotary(layout=layout).build(SITE), random(8)
    assert torch.equal(turned(part, x_E, 0), x_E)
    assert (turned(part, x_E, 1) - x_E).abs().max() > 1e-2


def test_the_layouts_differ_by_a_permutation_of_each_head() -> None:
    halves, interleaved = (Rotary(layout=layout).build(SITE) for layout in LAYOUTS)
    order = torch.tensor([0, 2, 4, 6, 1, 3, 5, 7])
    x_E = random(8)
    assert torch.equal(turned(halves, x_E[order], 7), turned(interleaved, x_E, 7)[order])
    assert not torch.allclose(turned(halves, x_E, 7), turned(interleaved, x_E, 7))


def test_angles_are_exact_far_out_whatever_the_dtype_of_the_model() -> None:
    """bfloat16 has no 257: rounded positions or frequencies turn by another angle."""
    config = ModelConfig(width=16, context=8, vocab=5, decoder=Stack(layers=1, block=Block(position=Rotary())))
    exact = [4097 * 10_000.0 ** (-index / 4) for index in range(0, 4, 2)]
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        model = copy.deepcopy(build(config)).to(dtype)
        assert model.decoder is not None
        part = model.decoder.positions[0]
        assert isinstance(part, RotaryPositions)
        cos, sin = part.prepare(torch.tensor([[4097]]))
        for index, angle in enumerate(exact):
            number = complex(cos[0, 0, 0, index].item(), sin[0, 0, 0, index].item())
            assert abs(number - cmath.exp(1j * angle)) < 1e-3


def test_a_rotary_model_built_without_memory_finds_its_frequencies_when_it_gets_some() -> None:
    with torch.device("meta"):
        part = RotaryPositions(8, 10_000.0, "halves")
    expected = RotaryPositions(8, 10_000.0, "halves").frequencies
    assert torch.equal(part.to_empty(device="cpu").frequencies, expected)


def test_rotary_positions_are_not_saved() -> None:
    assert Rotary().build(SITE).state_dict() == {}


def test_an_odd_head_cannot_be_turned() -> None:
    with pytest.raises(ConfigError, match="a head of size 5 cannot be odd"):
        Rotary().build(Site(width=10, context=4, head=5))
    with pytest.raises(ConfigError, match="theta"):
        Rotary(theta=0.0)


def test_learned_positions_add_the_row_of_each_position() -> None:
    part = Learned().build(SITE)
    assert isinstance(part, LearnedPositions)
    with torch.no_grad():
        part.table.copy_(torch.arange(12.0)[:, None].expand(-1, 16))
    x_BTD = random(2, 3, 16)
    at = torch.tensor([[0, 4, 11], [2, 2, 0]])
    torch.testing.assert_close(part.embed(x_BTD, at) - x_BTD, at[..., None].float().expand(-1, -1, 16))
    assert torch.equal(part.rotate(x_BTD, part.prepare(at)), x_BTD)


def test_learned_positions_end_where_the_table_ends() -> None:
    part = Learned().build(SITE)
    with pytest.raises(IndexError):
        part.embed(random(1, 1, 16), torch.tensor([[12]]))


def test_no_positions_change_nothing() -> None:
    part, x_BTD = NoPositions().build(SITE), random(1, 3, 16)
    at = torch.tensor([[5, 6, 7]])
    assert part.embed(x_BTD, at) is x_BTD
    assert part.rotate(x_BTD, part.prepare(at)) is x_BTD


def test_only_learned_positions_have_parameters() -> None:
    assert [options.cost(SITE).parameters for options in (NoPositions(), Rotary(), Learned())] == [0, 0, 12 * 16]
