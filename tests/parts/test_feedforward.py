"""Feed-forward parts against the table of activations, their formulas and LLaMA's published sizes."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.parts.drawing import drawn, random
from trivium.errors import ConfigError
from trivium.kernels import fp8
from trivium.parts import feedforward
from trivium.parts.feedforward import ACTIVATIONS, BENT, GluFeedForward, MlpFeedForward
from trivium.parts.linear import Linear, narrowed
from trivium.parts.options.feedforward import Activation, Glu, Mlp
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
    part = drawn(Mlp(activation="relu").build(SITE))
    assert isinstance(part, MlpFeedForward)
    x = random(5, 6)
    expected = torch.relu(x @ part.up.weight.T + part.up.bias) @ part.down.weight.T + part.down.bias
    torch.testing.assert_close(part(x), expected)
    assert bool((part(x) < 0).any())


def test_glu_gates_with_the_activated_half() -> None:
    part = drawn(Glu(hidden=7, bias=True).build(SITE))
    assert isinstance(part, GluFeedForward)
    x = random(5, 6)
    gate, up = x @ part.gate.weight.T + part.gate.bias, x @ part.up.weight.T + part.up.bias
    expected = (gate * torch.sigmoid(gate) * up) @ part.down.weight.T + part.down.bias
    torch.testing.assert_close(part(x), expected)


def test_reglu_is_zero_where_the_gate_is_negative() -> None:
    part = drawn(Glu(hidden=1, activation="relu").build(SITE))
    assert isinstance(part, GluFeedForward)
    x = random(50, 6)
    shut = (x @ part.gate.weight.T)[:, 0] < 0
    assert bool((part(x)[shut] == 0).all())
    assert bool((part(x)[~shut] != 0).all())


@pytest.mark.parametrize(("width", "hidden"), [(4096, 11008), (5120, 13824), (6656, 17920), (8192, 22016)])
def test_the_hidden_size_of_swiglu_is_llamas(width: int, hidden: int) -> None:
    assert Glu().size(Site(width=width, context=1)) == hidden


def test_a_position_is_treated_alone() -> None:
    for options in (Mlp(), Glu(hidden=8)):
        part = drawn(options.build(SITE))
        x = random(1, 4, 6)
        torch.testing.assert_close(part(x)[:, 2], part(x[:, 2]))


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("activation", list(ACTIVATIONS))
def test_cost_counts_the_parameters(bias: bool, activation: Activation) -> None:
    mlp, glu = Mlp(activation=activation, bias=bias), Glu(hidden=9, activation=activation, bias=bias)
    assert mlp.cost(SITE).parameters == sum(p.numel() for p in mlp.build(SITE).parameters())
    assert glu.cost(SITE).parameters == sum(p.numel() for p in glu.build(SITE).parameters())
    assert mlp.cost(SITE).flops == 2 * 2 * 6 * 24
    assert glu.cost(SITE).flops == 2 * 3 * 6 * 9


def test_dropout_falls_on_the_hidden_layer_in_training_only() -> None:
    for options in (Mlp(dropout=0.5), Glu(hidden=8, dropout=0.5)):
        part, x = drawn(options.build(SITE)), random(5, 6)
        assert torch.equal(part(x), part(x))
        part.train()
        torch.manual_seed(0)
        assert not torch.equal(part(x), part(x))


def test_impossible_sizes_are_refused() -> None:
    with pytest.raises(ConfigError, match="hidden: -1 is negative"):
        Mlp(hidden=-1)
    with pytest.raises(ConfigError, match="multiple: 0 is less than 1"):
        Glu(multiple=0)
    with pytest.raises(ConfigError, match="dropout"):
        Glu(dropout=1.5)


def test_a_gate_without_activation_is_bilinear() -> None:
    part = drawn(Glu(hidden=5, activation="identity").build(SITE)).double()
    x = random(3, 6).double()  # sums that cancel differ in float32
    with torch.no_grad():
        torch.testing.assert_close(part(3 * x), 9 * part(x))


def test_the_first_glu_is_torchs_with_its_halves_in_the_other_order() -> None:
    """`F.glu` takes first * sigmoid(second); here the gate is a matrix of its own."""
    part = drawn(Glu(hidden=5, activation="sigmoid").build(SITE))
    assert isinstance(part, GluFeedForward)
    x = random(3, 6)
    with torch.no_grad():
        expected = part.down(F.glu(torch.cat((part.up(x), part.gate(x)), -1)))
        torch.testing.assert_close(part(x), expected)


def test_kernels_are_for_plain_layers_in_training_on_a_gpu_in_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, narrow = (Linear(6, 8, bias=True, role="up") for _ in range(2))
    narrow.narrow = True
    for there in (True, False):
        monkeypatch.setattr(feedforward, "BEND", there)
        with FakeTensorMode():  # tensors of a GPU that need not be there
            x = torch.empty(2, 6, device="cuda", dtype=torch.bfloat16)
            assert feedforward._by_kernel(x, plain, plain) == there
            with torch.no_grad():
                assert not feedforward._by_kernel(x, plain)
            for other in (x.float(), x.half(), torch.empty(2, 6, dtype=torch.bfloat16)):
                assert not feedforward._by_kernel(other, plain)
            for layer in (narrow, nn.Linear(6, 8), nn.Sequential(plain)):  # an adapter is another class around one
                assert not feedforward._by_kernel(x, plain, layer)


def test_the_activations_that_have_kernels_have_a_way_without_them_in_float8() -> None:
    assert set(BENT) == set(fp8.VALUES) == set(fp8.SLOPES)


NARROW = Site(width=32, context=16)


def taught(options: Mlp | Glu) -> MlpFeedForward | GluFeedForward:
    """A part in training whose products are in float8."""
    part = drawn(options.build(NARROW)).train()
    assert isinstance(part, MlpFeedForward | GluFeedForward)
    for parameter in part.parameters():
        parameter.data *= 0.3
    narrowed(part, True)
    return part


def outcome(part: nn.Module, rows: int = 16, call: Callable[[Tensor], Tensor] | None = None) -> list[Tensor]:
    """The result under autocast and all gradients."""
    x = random(2, rows // 2, 32, seed=5).requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        out = part(x) if call is None else call(x)
    moving = [parameter for parameter in part.parameters() if parameter.requires_grad]
    return [out.detach(), *torch.autograd.grad(out, (x, *moving), random(*out.shape, seed=6).to(out.dtype))]


def same(one: list[Tensor], other: list[Tensor]) -> bool:
    return len(one) == len(other) and all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def made8(part: MlpFeedForward | GluFeedForward, x: Tensor) -> Tensor:
    """The part by products in float8 alone, one after another."""
    dtype = torch.bfloat16
    if isinstance(part, GluFeedForward):
        weight, bias = torch.cat((part.gate.weight, part.up.weight)), torch.cat((part.gate.bias, part.up.bias))
        gate, up = fp8.product8(x, weight, bias, dtype).float().chunk(2, -1)
        hidden = part.activation(gate) * up
    else:
        hidden = part.activation(fp8.product8(x, part.up.weight, part.up.bias, dtype).float())
    return fp8.product8(hidden.to(dtype), part.down.weight, part.down.bias, dtype)


@pytest.mark.parametrize("way", ["eager", "compiled"])
@pytest.mark.parametrize("options", [Mlp(activation="gelu"), Mlp(activation="relu2"), Glu(hidden=48, bias=True)])
def test_in_float8_a_part_is_its_products_and_its_activation(options: Mlp | Glu, way: str) -> None:
    part = taught(options)
    compiled = torch.compile(part, backend="aot_eager", fullgraph=True) if way == "compiled" else None
    found, expected = outcome(part, call=compiled), outcome(part, call=lambda x: made8(part, x))
    assert torch.equal(found[0], expected[0])
    for (name, _), one, other in zip([("x", None), *part.named_parameters()], found[1:], expected[1:], strict=True):
        if name in ("up.bias", "gate.bias"):  # summed before the terms are rounded to bfloat16
            assert (one - other).norm() < 4e-3 * other.norm()
        else:
            assert torch.equal(one, other), name
    torch._dynamo.reset()


@pytest.fixture
def rounded(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """For each product in float8 whether its rows came rounded."""
    seen: list[bool] = []
    whole = fp8.product8

    def product8(
        x: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype, ready: fp8.Scaled | None = None
    ) -> Tensor:
        seen.append(ready is not None)
        return whole(x, weight, bias, dtype, ready)

    monkeypatch.setattr(fp8, "product8", product8)
    return seen


def test_a_hidden_layer_is_rounded_once_unless_it_is_dropped_from(rounded: list[bool]) -> None:
    for loss, lock in ((0.0, 0.0), (0.5, 0.0), (0.0, 0.5)):
        for options in (Mlp(dropout=loss, lock=lock), Glu(hidden=48, dropout=loss, lock=lock)):
            part = taught(options)
            torch.manual_seed(0)
            outcome(part.eval())
            outcome(part.train())
    assert rounded == [True] * 5 + [False, True, False] + [True, False, True, False]


class Wrapped(nn.Module):
    """As an adapter does it: another class around a layer."""

    def __init__(self, inner: Linear) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.inner(x)
        return result


@pytest.mark.parametrize("name", ["up", "down", "gate"])
def test_layers_with_something_around_them_are_called_in_float8_too(name: str, rounded: list[bool]) -> None:
    part = taught(Glu(hidden=48, bias=True))
    expected = outcome(part)
    setattr(part, name, Wrapped(getattr(part, name)))
    rounded.clear()
    found = outcome(part)
    assert rounded == ([False] if name == "down" else [False] * 3)  # in order: gate, up and down, or down alone
    # the gate's and the other's gradients have scales of their own then
    for one, other in zip(found[:1], expected[:1], strict=True):
        assert (one - other).norm() < 0.03 * other.norm()


def test_sizes_that_do_not_fit_and_no_rows_go_in_bfloat16(rounded: list[bool]) -> None:
    for options in (Mlp(), Glu(hidden=48)):
        part = taught(options)
        for rows in (0, 10):
            narrowed(part, False)
            plain = outcome(part, rows)
            narrowed(part, True)
            assert same(outcome(part, rows), plain)
    odd = taught(Mlp(hidden=40))  # neither product fits
    plain = outcome(odd)
    narrowed(odd, False)
    assert same(outcome(odd), plain)
    assert not rounded


def test_without_a_gradient_or_autocast_nothing_is_in_float8(rounded: list[bool]) -> None:
    part, x = taught(Glu(hidden=48)), random(2, 8, 32)
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        quiet = part(x)
    loud = part(x)
    narrowed(part, False)
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        assert torch.equal(quiet, part(x))
    assert torch.equal(loud, part(x))
    assert not rounded


@pytest.mark.parametrize("options", [Mlp(), Glu(hidden=48, bias=True)])
def test_frozen_weights_leave_the_other_gradients_as_they_are(options: Mlp | Glu) -> None:
    part = taught(options)
    result, grad_x, *grads = outcome(part)
    for frozen, _ in list(part.named_parameters()):
        part.get_parameter(frozen).requires_grad_(False)
        kept = [grad for (name, _), grad in zip(part.named_parameters(), grads, strict=True) if name != frozen]
        assert same(outcome(part), [result, grad_x, *kept])
        part.get_parameter(frozen).requires_grad_(True)


def bf16_gradients(part: nn.Module, call: Callable[[Tensor], Tensor]) -> list[Tensor]:
    """The result in bfloat16 and all gradients."""
    x = random(3, 50, 64).cuda().requires_grad_()
    with torch.autocast("cuda", torch.bfloat16):
        out = call(x)
    gradients = torch.autograd.grad(out, (x, *part.parameters()), random(3, 50, 64).cuda().bfloat16())
    return [out.detach(), *gradients]  # the graph behind it would tie the leaves to this stream


def errors(found: list[Tensor], exact: list[Tensor]) -> list[float]:
    return [float((one.double() - other).norm() / other.norm()) for one, other in zip(found, exact, strict=True)]


@pytest.mark.skipif(not torch.cuda.is_available() or not feedforward.BEND, reason="needs a GPU and Triton")
@pytest.mark.parametrize(
    "options",
    [
        Mlp(hidden=208, activation="gelu"),
        Mlp(bias=False),
        Mlp(hidden=208, activation="relu"),
        Mlp(activation="relu", bias=False),
        Glu(bias=True),
    ],
)
def test_on_a_gpu_the_kernels_are_as_near_to_float64_as_the_plain_way(
    options: Mlp | Glu, monkeypatch: pytest.MonkeyPatch
) -> None:
    part = drawn(options.build(Site(width=64, context=50))).cuda().train()
    twin, x = copy.deepcopy(part).double(), random(3, 50, 64).cuda().double().requires_grad_()
    out = twin(x)
    back = random(3, 50, 64).cuda().bfloat16()
    exact = [out.detach(), *torch.autograd.grad(out, (x, *twin.parameters()), back.double())]
    monkeypatch.setattr(feedforward, "BEND", False)
    room = [1.2 * error + 1e-4 for error in errors(bf16_gradients(part, part), exact)]
    monkeypatch.setattr(feedforward, "BEND", True)
    eager = bf16_gradients(part, part)
    compiled = bf16_gradients(part, torch.compile(part, fullgraph=True))
    torch._dynamo.reset()
    again = bf16_gradients(part, part)
    assert all(torch.equal(one, other) for one, other in zip(eager, again, strict=True))  # bits repeat
    graph = torch.cuda.CUDAGraph()
    given = random(3, 50, 64).cuda().requires_grad_()
    with torch.cuda.graph(graph), torch.autocast("cuda", torch.bfloat16, cache_enabled=False):
        out = part(given)
        replayed = [out.detach(), *torch.autograd.grad(out, (given, *part.parameters()), back)]
    graph.replay()
    torch.cuda.synchronize()
    for found in (eager, compiled, replayed):
        assert all(error < most for error, most in zip(errors(found, exact), room, strict=True))


@pytest.mark.skipif(
    not (torch.cuda.is_available() and fp8.available(torch.device("cuda")) and fp8.KERNELS),
    reason="needs a GPU with products in float8, and Triton",
)
@pytest.mark.parametrize("options", [Mlp(hidden=208), Mlp(activation="relu"), Glu(bias=True), Glu()])
def test_on_a_gpu_in_float8_the_kernels_are_as_near_to_float64_as_the_plain_way(
    options: Mlp | Glu, monkeypatch: pytest.MonkeyPatch
) -> None:
    part = drawn(options.build(Site(width=64, context=48))).cuda().train()
    narrowed(part, True)
    twin, x = copy.deepcopy(part).double(), random(4, 48, 64).cuda().double().requires_grad_()
    out = twin(x)
    back = random(*out.shape, seed=1).cuda().bfloat16()
    exact = [out.detach(), *torch.autograd.grad(out, (x, *twin.parameters()), back.double())]

    def found(call: Callable[[Tensor], Tensor]) -> list[Tensor]:
        given = x.detach().float().requires_grad_()
        with torch.autocast("cuda", torch.bfloat16, cache_enabled=False):
            out = call(given)
        return [out.detach(), *torch.autograd.grad(out, (given, *part.parameters()), back)]

    monkeypatch.setattr(fp8, "KERNELS", False)
    room = [1.1 * error + 1e-4 for error in errors(found(part), exact)]
    monkeypatch.setattr(fp8, "KERNELS", True)
    eager, again = found(part), found(part)
    assert all(torch.equal(one, other) for one, other in zip(eager, again, strict=True))  # bits repeat
    compiled = found(torch.compile(part, fullgraph=True))
    torch._dynamo.reset()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        replayed = found(part)
    graph.replay()
    torch.cuda.synchronize()
    for way in (eager, compiled, replayed):
        assert all(error < most for error, most in zip(errors(way, exact), room, strict=True))
