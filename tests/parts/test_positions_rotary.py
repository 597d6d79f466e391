"""Rotary positions against worked numbers, complex multiplication and their invariances."""

# B batch, T tokens, H heads, E head size

from __future__ import annotations

import cmath
import copy
import itertools
import math
from typing import Literal

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.parts.drawing import random
from trivium.config import load
from trivium.errors import ConfigError
from trivium.parts.options.positions import RotaryOptions
from trivium.parts.options.scaling import LinearScaling, Llama3, NoScaling, Ntk, Scaling, Yarn
from trivium.parts.positions import Positions, RotaryPositions
from trivium.parts.site import Site

SITE = Site(width=16, context=12, heads=2, head=8, value=8)
Layout = Literal["halves", "interleaved"]
LAYOUTS: tuple[Layout, ...] = ("halves", "interleaved")
layouts = pytest.mark.parametrize("layout", LAYOUTS)


def turned(part: Positions, x_E: Tensor, at: int) -> Tensor:
    """One vector at one position."""
    where = torch.tensor([[at]])
    return part.rotate(x_E[None, None, None], part.prepare(where, where))[0, 0, 0]


def test_rotation_gives_the_worked_numbers() -> None:
    x_E = torch.tensor([1.0, 0, 1, 0, 1, 0, 1, 0])
    worked = torch.tensor([0.540302, 0.841471, 0.995004, 0.099833, 0.999950, 0.010000, 1.0, 0.001])
    part = RotaryOptions(layout="interleaved").build(SITE)
    torch.testing.assert_close(turned(part, x_E, 1), worked, atol=1e-6, rtol=0)


@layouts
def test_rotation_is_multiplication_by_complex_numbers(layout: Layout) -> None:
    x_E, at, theta = random(8), 5, 500.0
    actual = turned(RotaryOptions(theta=theta, layout=layout).build(SITE), x_E, at)
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
    part = RotaryOptions(layout=layout).build(SITE)
    query_E, key_E = random(8, seed=seed), random(8, seed=seed + 1000)
    score = turned(part, query_E, m) @ turned(part, key_E, n)
    shifted = turned(part, query_E, m + shift) @ turned(part, key_E, n + shift)
    torch.testing.assert_close(score, shifted, atol=1e-4, rtol=0)
    torch.testing.assert_close(turned(part, query_E, m).norm(), query_E.norm())


@layouts
def test_position_zero_turns_nothing_and_others_do(layout: Layout) -> None:
    part, x_E = RotaryOptions(layout=layout).build(SITE), random(8)
    assert torch.equal(turned(part, x_E, 0), x_E)
    assert (turned(part, x_E, 1) - x_E).abs().max() > 1e-2


def test_the_layouts_differ_by_a_permutation_of_each_head() -> None:
    halves, interleaved = (RotaryOptions(layout=layout).build(SITE) for layout in LAYOUTS)
    order = torch.tensor([0, 2, 4, 6, 1, 3, 5, 7])
    x_E = random(8)
    assert torch.equal(turned(halves, x_E[order], 7), turned(interleaved, x_E, 7)[order])
    assert not torch.allclose(turned(halves, x_E, 7), turned(interleaved, x_E, 7))


@layouts
def test_a_share_turns_the_first_dimensions_as_a_smaller_head_and_leaves_the_rest(layout: Layout) -> None:
    x_E = random(16)
    part = RotaryOptions(layout=layout, share=0.5).build(Site(width=16, context=12, heads=1, head=16))
    whole = RotaryOptions(layout=layout).build(SITE)
    actual = turned(part, x_E, 9)
    assert torch.equal(actual[:8], turned(whole, x_E[:8], 9))
    assert torch.equal(actual[8:], x_E[8:])


@layouts
@pytest.mark.parametrize("share", [1.0, 0.5])
@pytest.mark.parametrize("scaling", [NoScaling(), Yarn(attention=1.7)], ids=repr)
def test_gradients_are_those_of_finite_differences(layout: Layout, share: float, scaling: Scaling) -> None:
    part = RotaryOptions(layout=layout, share=share, scaling=scaling).build(SITE)
    prepared = part.prepare(torch.tensor([[3, 8]]), torch.tensor([[3, 8]]))
    x_BHTE = random(1, 2, 2, 8).double().requires_grad_()
    assert torch.autograd.gradcheck(lambda x: part.rotate(x, prepared), x_BHTE)
    with torch.no_grad():  # without gradients the plain version answers
        plain = part.rotate(x_BHTE, prepared)
    torch.testing.assert_close(part.rotate(x_BHTE, prepared), plain)


def test_angles_are_exact_far_out_whatever_the_dtype_of_the_model() -> None:
    """bfloat16 has no 257: rounded positions or frequencies turn by another angle."""
    exact = [4097 * 10_000.0 ** (-index / 4) for index in range(0, 4, 2)]
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        part = copy.deepcopy(RotaryOptions().build(Site(width=16, context=8, heads=4, head=4))).to(dtype)
        cos, sin = part.prepare(torch.tensor([[4097]]), torch.tensor([[4097]]))
        for index, angle in enumerate(exact):
            number = complex(cos[0, 0, 0, index].item(), sin[0, 0, 0, index].item())
            assert abs(number - cmath.exp(1j * angle)) < 1e-3


# scalings; tests/oracle compares them with another library


def test_linear_scaling_reads_every_position_as_a_nearer_one() -> None:
    x_E = random(8)
    scaled = RotaryOptions(scaling=LinearScaling(factor=4)).build(SITE)
    torch.testing.assert_close(turned(scaled, x_E, 4 * 7), turned(RotaryOptions().build(SITE), x_E, 7))


@settings(max_examples=30, deadline=None)
@given(
    factor=st.floats(1, 64),
    theta=st.floats(100, 1e6),
    size=st.sampled_from([4, 8, 64, 128]),
    original=st.integers(64, 100_000),
    kind=st.sampled_from(["ntk", "yarn", "llama3"]),
)
def test_every_frequency_lies_between_kept_and_divided_and_they_fall(
    factor: float, theta: float, size: int, original: int, kind: str
) -> None:
    scalings: dict[str, Scaling] = {
        "ntk": Ntk(factor=factor),
        "yarn": Yarn(factor=factor, original=original),
        "llama3": Llama3(factor=factor, original=original),
    }
    plain, scaled = NoScaling().frequencies(theta, size), scalings[kind].frequencies(theta, size)
    assert len(scaled) == size // 2
    for kept, actual in zip(plain, scaled, strict=True):
        assert kept / factor * (1 - 1e-9) <= actual <= kept * (1 + 1e-9)
    assert all(later < earlier for earlier, later in itertools.pairwise(scaled))


def test_ntk_keeps_the_highest_frequency_and_divides_the_lowest() -> None:
    plain, scaled = NoScaling().frequencies(10_000, 64), Ntk(factor=8).frequencies(10_000, 64)
    assert scaled[0] == plain[0] == 1
    assert scaled[-1] == pytest.approx(plain[-1] / 8)


@pytest.mark.parametrize("scaling", [Yarn(factor=8, original=4096), Llama3(factor=8, original=4096)], ids=repr)
def test_pairs_that_turn_often_are_kept_and_those_that_turn_seldom_divided(scaling: Scaling) -> None:
    plain, scaled = NoScaling().frequencies(10_000, 128), scaling.frequencies(10_000, 128)
    between = 0
    for kept, actual in zip(plain, scaled, strict=True):
        turns = 4096 * kept / (2 * math.pi)
        if turns > 40:
            assert actual == pytest.approx(kept)
        elif turns < 0.8:
            assert actual == pytest.approx(kept / 8)
        else:
            between += kept / 8 * 1.001 < actual < kept * 0.999
    assert between > 3


def test_yarn_sharpens_by_its_factor_and_the_others_do_not() -> None:
    at, x_E = 5, random(8)
    assert Yarn(factor=math.e**10).strength == pytest.approx(2)
    assert [scaling.strength for scaling in (NoScaling(), LinearScaling(), Ntk(), Llama3())] == [1] * 4
    part = RotaryOptions(scaling=Yarn(attention=1.5)).build(SITE)
    torch.testing.assert_close(turned(part, x_E, at).norm(), 1.5 * x_E.norm())


@pytest.mark.parametrize(
    "scaling", [LinearScaling(factor=1), Ntk(factor=1), Yarn(factor=1), Llama3(factor=1)], ids=repr
)
def test_a_factor_of_one_changes_nothing(scaling: Scaling) -> None:
    assert scaling.frequencies(10_000, 64) == pytest.approx(NoScaling().frequencies(10_000, 64))
    assert scaling.strength == 1


# refusals


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        ({"theta": 0}, "theta"),
        ({"share": 0}, "share"),
        ({"share": 1.5}, "share"),
        ({"scaling": {"kind": "linear", "factor": 0.5}}, "scaling.factor"),
        ({"scaling": {"kind": "ntk", "factor": 0}}, "scaling.factor"),
        ({"scaling": {"kind": "yarn", "factor": 0}}, "scaling.factor"),
        ({"scaling": {"kind": "yarn", "original": 0}}, "scaling.original"),
        ({"scaling": {"kind": "yarn", "slow": 40}}, "scaling.slow"),
        ({"scaling": {"kind": "yarn", "attention": -1}}, "scaling.attention"),
        ({"scaling": {"kind": "llama3", "factor": 0}}, "scaling.factor"),
        ({"scaling": {"kind": "llama3", "original": 0}}, "scaling.original"),
        ({"scaling": {"kind": "llama3", "low": 4}}, "scaling.low"),
        ({"scaling": "yearn"}, "scaling.kind"),
    ],
)
def test_a_wrong_setting_is_refused_by_its_key(settings: dict[str, object], key: str) -> None:
    with pytest.raises(ConfigError, match=f"^{key}:"):
        load(RotaryOptions, settings)


def test_theta_is_finite() -> None:
    with pytest.raises(ConfigError, match="theta"):
        RotaryOptions(theta=math.inf)


@pytest.mark.parametrize(
    ("options", "head", "message"),
    [
        (RotaryOptions(), 5, "a head of size 5 cannot be odd"),
        (RotaryOptions(share=0.25), 12, "0.25 of a head of size 12 cannot be odd"),
        (RotaryOptions(share=0.01), 12, "0.01 of a head of size 12 cannot be empty"),
        (RotaryOptions(scaling=Ntk()), 2, "2 rotated dimensions are too few"),
        (RotaryOptions(theta=1.0, scaling=Yarn()), 8, "must be above 1"),
    ],
)
def test_a_head_that_cannot_be_turned_is_refused(options: RotaryOptions, head: int, message: str) -> None:
    for ask in (options.build, options.cost):
        with pytest.raises(ConfigError, match=message):
            ask(Site(width=10, context=4, heads=1, head=head))


def test_rotary_positions_keep_their_frequencies_as_computed() -> None:
    part = RotaryOptions(theta=500_000.0, scaling=Llama3()).build(SITE)
    assert isinstance(part, RotaryPositions)
    assert list(part.frequencies) == Llama3().frequencies(500_000.0, 8)


@pytest.mark.parametrize("share", [1.0, 0.5])
def test_a_head_of_another_size_is_never_turned_in_part(share: float) -> None:
    part, at = RotaryOptions(share=share).build(SITE), torch.tensor([[3]])
    with pytest.raises(RuntimeError, match="size"), torch.no_grad():
        part.rotate(random(1, 2, 1, 16), part.prepare(at, at))
