"""Feed-forward parts against the table of activations, their formulas and LLaMA's published sizes."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from tests.parts.drawing import drawn, random
from trivium.errors import ConfigError
from trivium.parts.activations import ACTIVATIONS
from trivium.parts.feedforward import GluFeedForward, MlpFeedForward
from trivium.parts.options.feedforward import Activation, GluOptions, MlpOptions
from trivium.parts.site import Site

SITE = Site(width=6, context=8)


@pytest.mark.parametrize(
    ("name", "at_minus_one", "at_one"),
    [
        ("relu", 0, 1),
        ("gelu", -0.158655, 0.841345),
        ("gelu-tanh", -0.158808, 0.841192),
        ("silu", -0.268941, 0.731059),
        ("relu2", 0, 1),
        ("elu", -0.632121, 1),
        ("selu", -1.111331, 1.050701),
        ("sigmoid", 0.268941, 0.731059),
        ("tanh", -0.761594, 0.761594),
        ("softplus", 0.313262, 1.313262),
        ("identity", -1, 1),
    ],
)
def test_activations_give_the_worked_numbers(name: str, at_minus_one: float, at_one: float) -> None:
    values = ACTIVATIONS[name](torch.tensor([-1.0, 1.0])).tolist()
    assert values == pytest.approx([at_minus_one, at_one], abs=1e-6)


def test_squared_relu_squares() -> None:
    assert ACTIVATIONS["relu2"](torch.tensor([-3.0, 3.0])).tolist() == [0, 9]


def test_the_two_gelus_are_their_formulas_and_differ_as_published() -> None:
    x = torch.linspace(-6, 6, 120_001, dtype=torch.float64)
    erf = x * 0.5 * (1 + torch.erf(x / math.sqrt(2)))
    tanh = 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
    torch.testing.assert_close(ACTIVATIONS["gelu"](x), erf)
    torch.testing.assert_close(ACTIVATIONS["gelu-tanh"](x), tanh)
    gap = (ACTIVATIONS["gelu"](x) - ACTIVATIONS["gelu-tanh"](x)).abs()
    assert gap.max().item() == pytest.approx(4.73e-4, abs=1e-6)
    assert abs(x[gap.argmax()].item()) == pytest.approx(2.70, abs=0.01)


def test_mlp_has_no_activation_after_its_second_matrix() -> None:
    part = drawn(MlpOptions(activation="relu").build(SITE))
    assert isinstance(part, MlpFeedForward)
    x = random(5, 6)
    expected = torch.relu(x @ part.up.weight.T + part.up.bias) @ part.down.weight.T + part.down.bias
    torch.testing.assert_close(part(x), expected)
    assert bool((part(x) < 0).any())


def test_glu_gates_with_the_activated_half() -> None:
    part = drawn(GluOptions(hidden=7, bias=True).build(SITE))
    assert isinstance(part, GluFeedForward)
    x = random(5, 6)
    gate, up = x @ part.gate.weight.T + part.gate.bias, x @ part.up.weight.T + part.up.bias
    expected = (gate * torch.sigmoid(gate) * up) @ part.down.weight.T + part.down.bias
    torch.testing.assert_close(part(x), expected)


def test_reglu_is_zero_where_the_gate_is_negative() -> None:
    part = drawn(GluOptions(hidden=1, activation="relu").build(SITE))
    assert isinstance(part, GluFeedForward)
    x = random(50, 6)
    shut = (x @ part.gate.weight.T)[:, 0] < 0
    assert bool((part(x)[shut] == 0).all())
    assert bool((part(x)[~shut] != 0).all())


@pytest.mark.parametrize(("width", "hidden"), [(4096, 11008), (5120, 13824), (6656, 17920), (8192, 22016)])
def test_the_hidden_size_of_swiglu_is_llamas(width: int, hidden: int) -> None:
    assert GluOptions().size(Site(width=width, context=1)) == hidden


def test_a_position_is_treated_alone() -> None:
    for options in (MlpOptions(), GluOptions(hidden=8)):
        part = drawn(options.build(SITE))
        x = random(1, 4, 6)
        torch.testing.assert_close(part(x)[:, 2], part(x[:, 2]))


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("activation", list(ACTIVATIONS))
def test_cost_counts_the_parameters(bias: bool, activation: Activation) -> None:
    mlp, glu = MlpOptions(activation=activation, bias=bias), GluOptions(hidden=9, activation=activation, bias=bias)
    assert mlp.cost(SITE).parameters == sum(p.numel() for p in mlp.build(SITE).parameters())
    assert glu.cost(SITE).parameters == sum(p.numel() for p in glu.build(SITE).parameters())
    assert mlp.cost(SITE).flops == 2 * 2 * 6 * 24
    assert glu.cost(SITE).flops == 2 * 3 * 6 * 9


def test_dropout_falls_on_the_hidden_layer_in_training_only() -> None:
    for options in (MlpOptions(dropout=0.5), GluOptions(hidden=8, dropout=0.5)):
        part, x = drawn(options.build(SITE)), random(5, 6)
        assert torch.equal(part(x), part(x))
        part.train()
        torch.manual_seed(0)
        assert not torch.equal(part(x), part(x))


def test_impossible_sizes_are_refused() -> None:
    with pytest.raises(ConfigError, match="hidden: -1 is negative"):
        MlpOptions(hidden=-1)
    with pytest.raises(ConfigError, match="multiple: 0 is less than 1"):
        GluOptions(multiple=0)
    with pytest.raises(ConfigError, match="dropout"):
        GluOptions(dropout=1.5)


def test_a_gate_without_activation_is_bilinear() -> None:
    part = drawn(GluOptions(hidden=5, activation="identity").build(SITE)).double()
    x = random(3, 6).double()  # sums that cancel differ in float32
    with torch.no_grad():
        torch.testing.assert_close(part(3 * x), 9 * part(x))


def test_the_first_glu_is_torchs_with_its_halves_in_the_other_order() -> None:
    """`F.glu` takes first * sigmoid(second); here the gate is a matrix of its own."""
    part = drawn(GluOptions(hidden=5, activation="sigmoid").build(SITE))
    assert isinstance(part, GluFeedForward)
    x = random(3, 6)
    with torch.no_grad():
        expected = part.down(F.glu(torch.cat((part.up(x), part.gate(x)), -1)))
        torch.testing.assert_close(part(x), expected)
