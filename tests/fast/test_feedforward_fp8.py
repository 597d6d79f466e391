"""Feed-forward networks in float8: their products and their activation, rounded once on the way."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from tests.kernels.launch import needs_fp8
from tests.parts.drawing import drawn, random
from trivium.fast.choose import fast
from trivium.fast.feedforward import FastGlu, FastMlp
from trivium.fast.linear import use_fp8
from trivium.kernels import fp8
from trivium.kernels.hardware import INTERPRETED
from trivium.parts.linear import Linear
from trivium.parts.options.feedforward import GluOptions, MlpOptions
from trivium.parts.site import Site

NARROW = Site(width=32, context=16)


def taught(options: MlpOptions | GluOptions) -> FastMlp | FastGlu:
    """A part in training whose products are in float8."""
    part = drawn(options.build(NARROW)).train()
    fast(part)
    assert isinstance(part, FastMlp | FastGlu)
    for parameter in part.parameters():
        parameter.data *= 0.3
    use_fp8(part, True)
    return part


def outcome(part: nn.Module, rows: int = 16, call: Callable[[Tensor], Tensor] | None = None) -> list[Tensor]:
    """The result under autocast and all gradients."""
    x = random(2, rows // 2, 32, seed=5).requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        out = part(x) if call is None else call(x)
    moving = [parameter for parameter in part.parameters() if parameter.requires_grad]
    return [out.detach(), *torch.autograd.grad(out, (x, *moving), random(*out.shape, seed=6).to(out.dtype))]


def same(one: list[Tensor], other: list[Tensor]) -> bool:
    return len(one) == len(other) and all(equal(a, b) for a, b in zip(one, other, strict=True))


def equal(one: Tensor, other: Tensor) -> bool:
    """Bit for bit; within 2 % in Triton's interpreter, which does not round bfloat16 to the nearest."""
    if not INTERPRETED:
        return torch.equal(one, other)
    return one.dtype == other.dtype and bool((one.float() - other.float()).norm() <= 2e-2 * other.float().norm())


def made8(part: FastMlp | FastGlu, x: Tensor) -> Tensor:
    """The part by products in float8 alone, one after another."""
    dtype = torch.bfloat16
    if isinstance(part, FastGlu):
        weight, bias = torch.cat((part.gate.weight, part.up.weight)), torch.cat((part.gate.bias, part.up.bias))
        gate, up = fp8.product8(x, weight, bias, dtype).float().chunk(2, -1)
        hidden = part.activation(gate) * up
    else:
        hidden = part.activation(fp8.product8(x, part.up.weight, part.up.bias, dtype).float())
    return fp8.product8(hidden.to(dtype), part.down.weight, part.down.bias, dtype)


@pytest.mark.parametrize("way", ["eager", "compiled"])
@pytest.mark.parametrize(
    "options", [MlpOptions(activation="gelu"), MlpOptions(activation="relu2"), GluOptions(hidden=48, bias=True)]
)
def test_in_float8_a_part_is_its_products_and_its_activation(options: MlpOptions | GluOptions, way: str) -> None:
    part = taught(options)
    compiled = torch.compile(part, backend="aot_eager", fullgraph=True) if way == "compiled" else None
    found, expected = outcome(part, call=compiled), outcome(part, call=lambda x: made8(part, x))
    assert equal(found[0], expected[0])
    for (name, _), one, other in zip([("x", None), *part.named_parameters()], found[1:], expected[1:], strict=True):
        if name in ("up.bias", "gate.bias"):  # summed before the terms are rounded to bfloat16
            assert (one - other).norm() < (2e-2 if INTERPRETED else 4e-3) * other.norm()
        else:
            assert equal(one, other), name
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
    for loss, whole in ((0.0, 0.0), (0.5, 0.0), (0.0, 0.5)):
        for options in (
            MlpOptions(dropout=loss, variational_dropout=whole),
            GluOptions(hidden=48, dropout=loss, variational_dropout=whole),
        ):
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
    part = taught(GluOptions(hidden=48, bias=True))
    expected = outcome(part)
    setattr(part, name, Wrapped(getattr(part, name)))
    rounded.clear()
    found = outcome(part)
    assert rounded == ([False] if name == "down" else [False] * 3)  # in order: gate, up and down, or down alone
    # the gate's and the other's gradients have scales of their own then
    for one, other in zip(found[:1], expected[:1], strict=True):
        assert (one - other).norm() < 0.03 * other.norm()


def test_sizes_that_do_not_fit_and_no_rows_go_in_bfloat16(rounded: list[bool]) -> None:
    for options in (MlpOptions(), GluOptions(hidden=48)):
        part = taught(options)
        for rows in (0, 10):
            use_fp8(part, False)
            plain = outcome(part, rows)
            use_fp8(part, True)
            assert same(outcome(part, rows), plain)
    odd = taught(MlpOptions(hidden=40))  # neither product fits
    plain = outcome(odd)
    use_fp8(odd, False)
    assert same(outcome(odd), plain)
    assert not rounded


def test_without_a_gradient_or_autocast_nothing_is_in_float8(rounded: list[bool]) -> None:
    part, x = taught(GluOptions(hidden=48)), random(2, 8, 32)
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        quiet = part(x)
    loud = part(x)
    use_fp8(part, False)
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        assert torch.equal(quiet, part(x))
    assert torch.equal(loud, part(x))
    assert not rounded


@pytest.mark.parametrize("options", [MlpOptions(), GluOptions(hidden=48, bias=True)])
def test_frozen_weights_leave_the_other_gradients_as_they_are(options: MlpOptions | GluOptions) -> None:
    part = taught(options)
    result, grad_x, *grads = outcome(part)
    for frozen, _ in list(part.named_parameters()):
        part.get_parameter(frozen).requires_grad_(False)
        kept = [grad for (name, _), grad in zip(part.named_parameters(), grads, strict=True) if name != frozen]
        assert same(outcome(part), [result, grad_x, *kept])
        part.get_parameter(frozen).requires_grad_(True)


def errors(found: list[Tensor], exact: list[Tensor]) -> list[float]:
    return [float((one.double() - other).norm() / other.norm()) for one, other in zip(found, exact, strict=True)]


@needs_fp8
@pytest.mark.parametrize(
    "options", [MlpOptions(hidden=208), MlpOptions(activation="silu"), GluOptions(hidden=208, bias=True)]
)
def test_on_a_gpu_the_kernels_are_as_near_to_float64_as_one_product_after_another(
    options: MlpOptions | GluOptions,
) -> None:
    part = drawn(options.build(Site(width=64, context=48))).cuda().train()
    fast(part)
    assert isinstance(part, FastMlp | FastGlu)
    use_fp8(part, True)
    wide, x = copy.deepcopy(part).double(), random(4, 48, 64).cuda().double().requires_grad_()
    out = wide(x)
    back = random(*out.shape, seed=1).cuda().bfloat16()
    exact = [out.detach(), *torch.autograd.grad(out, (x, *wide.parameters()), back.double())]

    def found(call: Callable[[Tensor], Tensor]) -> list[Tensor]:
        given = x.detach().float().requires_grad_()
        with torch.autocast("cuda", torch.bfloat16, cache_enabled=False):
            out = call(given)
        return [out.detach(), *torch.autograd.grad(out, (given, *part.parameters()), back)]

    room = [1.1 * error + 1e-4 for error in errors(found(lambda x: made8(part, x)), exact)]
    eager, again = found(part), found(part)
    assert all(torch.equal(one, other) for one, other in zip(eager, again, strict=True))  # bits repeat
    torch._dynamo.reset()
    compiled = found(torch.compile(part, fullgraph=True))
    torch._dynamo.reset()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        replayed = found(part)
    graph.replay()
    torch.cuda.synchronize()
    for way in (eager, compiled, replayed):
        assert all(error < most for error, most in zip(errors(way, exact), room, strict=True))
