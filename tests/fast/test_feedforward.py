"""Fast feed-forward networks: bias, activation and their gradients in one kernel give what the plain ones give."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.testing import CompileCounterWithBackend
from torch._functorch._aot_autograd.utils import make_boxed_func
from torch.autograd.graph import saved_tensors_hooks

from tests.fast.compare import as_near, close, fast_copy, outcome
from tests.kernels.launch import DEVICE, needs_gpu, needs_triton
from tests.parts.drawing import FORMULAS, drawn, random
from trivium.fast.feedforward import FastGlu, FastMlp
from trivium.kernels import fp8
from trivium.parts.activations import ACTIVATIONS
from trivium.parts.options.feedforward import Activation, GluOptions, MlpOptions
from trivium.parts.site import Site

SITE = Site(width=16, context=8)
FUSED: tuple[Activation, ...] = ("gelu", "gelu-tanh", "silu", "relu2")


def test_the_activations_that_have_kernels_have_a_way_without_them_in_float8() -> None:
    assert set(FUSED) == set(FORMULAS) == set(fp8.VALUES) == set(fp8.SLOPES)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_values_and_gradients_are_those_of_the_plain_network(activation: Activation, bias: bool) -> None:
    for options in (
        MlpOptions(hidden=24, activation=activation, bias=bias),
        GluOptions(hidden=24, activation=activation, bias=bias),
    ):
        plain = drawn(options.build(SITE)).double().train()
        part, x = fast_copy(plain), random(2, 5, 16).double()
        assert type(part) is (FastMlp if isinstance(options, MlpOptions) else FastGlu)
        found, expected = (outcome(one, x, list(one.parameters())) for one in (part, plain))
        close(found, expected, 1e-12)
        with torch.no_grad():
            assert torch.equal(part(x), plain(x))


@pytest.mark.parametrize(
    "options",
    [
        MlpOptions(dropout=0.5),
        GluOptions(hidden=24, dropout=0.5),
        MlpOptions(variational_dropout=0.5),
        GluOptions(hidden=24, variational_dropout=0.5),
    ],
)
def test_dropout_falls_on_the_hidden_layer_as_in_the_plain_network(options: MlpOptions | GluOptions) -> None:
    plain = drawn(options.build(SITE)).train()
    part, x, results = fast_copy(plain), random(2, 5, 16), []
    for one in (part, plain):
        torch.manual_seed(3)
        results.append(outcome(one, x, list(one.parameters())))
    close(results[0], results[1], 1e-5)
    assert torch.equal(part.eval()(x), part(x))


def parts(bias: bool = True) -> list[nn.Module]:
    """Plain networks whose fast ones go by the kernels in bfloat16."""
    options = (MlpOptions(hidden=48, activation="gelu", bias=bias), GluOptions(hidden=48, bias=bias))
    return [drawn(one.build(SITE)).to(DEVICE).train() for one in options]


def in_bfloat16(part: nn.Module, x: Tensor) -> Tensor:
    with torch.autocast(DEVICE, torch.bfloat16, cache_enabled=False):
        result: Tensor = part(x)
    return result


@needs_triton
@pytest.mark.parametrize("way", ["eager", "compiled"])
@pytest.mark.parametrize("activation", ["gelu", "gelu-tanh", "silu", "relu2", "relu"])
@pytest.mark.parametrize("bias", [True, False])
def test_in_bfloat16_the_kernels_are_as_near_to_float64_as_the_plain_network(
    activation: Activation, bias: bool, way: str
) -> None:
    for options in (
        MlpOptions(hidden=48, activation=activation, bias=bias),
        GluOptions(hidden=48, activation=activation, bias=bias),
    ):
        plain = drawn(options.build(SITE)).to(DEVICE).train()
        part, x, wide = fast_copy(plain), random(4, 8, 16, seed=5).to(DEVICE), copy.deepcopy(plain).double()
        torch._dynamo.reset()
        call = torch.compile(part, backend="aot_eager", fullgraph=True) if way == "compiled" else part
        found = outcome(call, x, list(part.parameters()), autocast=True)
        expected = outcome(plain, x, list(plain.parameters()), autocast=True)
        exact = outcome(wide, x.double(), list(wide.parameters()))
        assert [one.dtype for one in found] == [one.dtype for one in expected]
        as_near(found, expected, exact, room=1.2)
        torch._dynamo.reset()


@needs_triton
def test_gradients_of_gate_and_up_need_not_be_laid_side_by_side() -> None:
    part, graphs = fast_copy(parts()[1]), []

    def kept(module: torch.fx.GraphModule, inputs: object) -> Any:
        graphs.append([node.target for node in module.graph.nodes if node.op == "call_function"])
        return make_boxed_func(module.forward)

    backend = aot_autograd(fw_compiler=lambda module, inputs: make_boxed_func(module.forward), bw_compiler=kept)
    torch._dynamo.reset()
    compiled = torch.compile(part, backend=backend, fullgraph=True)
    outcome(compiled, random(4, 8, 16).to(DEVICE), list(part.parameters()), autocast=True)
    torch._dynamo.reset()
    (back,) = graphs
    assert torch.ops.trivium.bent_backward.default in back
    assert torch.ops.aten.cat.default not in back


@needs_triton
def test_nothing_more_is_kept_for_the_way_back() -> None:
    for plain in parts():
        kept = []
        for part in (fast_copy(plain), plain):
            sizes: dict[int, int] = {}

            def pack(x: Tensor, sizes: dict[int, int] = sizes) -> Tensor:
                storage = x.untyped_storage()
                sizes[storage.data_ptr()] = storage.nbytes()
                return x

            with saved_tensors_hooks(pack, lambda x: x):
                out = in_bfloat16(part, random(4, 8, 16).to(DEVICE))
            kept.append(sum(sizes.values()))
            del out
        assert 0 < kept[0] <= kept[1]


@needs_triton
def test_a_frozen_bias_has_no_gradient_and_a_frozen_matrix_does_not_take_the_biass() -> None:
    part, x = fast_copy(parts()[0]), random(4, 16).to(DEVICE)
    assert isinstance(part.up, nn.Linear)
    part.up.bias.requires_grad_(False)
    in_bfloat16(part, x).sum().backward()  # type: ignore[no-untyped-call]
    assert part.up.bias.grad is None
    assert part.up.weight.grad is not None
    part.zero_grad()
    part.requires_grad_(False)
    part.up.bias.requires_grad_(True)
    in_bfloat16(part, x).sum().backward()  # type: ignore[no-untyped-call]
    assert part.up.weight.grad is None
    assert part.up.bias.grad is not None


@needs_triton
def test_one_program_is_for_any_number_of_rows() -> None:
    for plain in parts():
        part, counter = fast_copy(plain), CompileCounterWithBackend("aot_eager")
        torch._dynamo.reset()
        compiled = torch.compile(part, backend=counter, dynamic=True, fullgraph=True)
        programs = []
        for rows in (28, 45, 33, 57, 91):
            x = random(rows, 16).to(DEVICE)
            found = outcome(compiled, x, list(part.parameters()), autocast=True)
            close(found, outcome(part, x, list(part.parameters()), autocast=True), 1e-2)
            programs.append(counter.frame_count)
        assert programs == [programs[0]] * 5
        torch._dynamo.reset()


@needs_triton
def test_what_is_not_bfloat16_training_goes_the_plain_way() -> None:
    for plain in parts():
        part, x = fast_copy(plain), random(4, 8, 16).to(DEVICE)
        close(outcome(part, x, list(part.parameters())), outcome(plain, x, list(plain.parameters())), 1e-6)
        with torch.no_grad():
            assert torch.equal(in_bfloat16(part, x), in_bfloat16(plain, x))


@needs_gpu
@pytest.mark.parametrize(
    "options",
    [
        MlpOptions(hidden=208, activation="gelu"),
        MlpOptions(bias=False),
        MlpOptions(hidden=208, activation="relu"),
        MlpOptions(activation="relu", bias=False),
        GluOptions(bias=True),
    ],
)
def test_on_a_gpu_bits_repeat_and_steps_can_be_recorded(options: MlpOptions | GluOptions) -> None:
    plain = drawn(options.build(Site(width=64, context=50))).cuda().train()
    part, x, wide = fast_copy(plain), random(3, 50, 64).cuda(), copy.deepcopy(plain).double()
    leaves = list(part.parameters())

    def found(call: Callable[[Tensor], Tensor]) -> list[Tensor]:
        return outcome(call, x, leaves, autocast=True)

    exact = outcome(wide, x.double(), list(wide.parameters()))
    expected = outcome(plain, x, list(plain.parameters()), autocast=True)
    eager, again = found(part), found(part)
    assert all(torch.equal(one, other) for one, other in zip(eager, again, strict=True))
    torch._dynamo.reset()
    compiled = found(torch.compile(part, fullgraph=True))
    torch._dynamo.reset()
    graph, given = torch.cuda.CUDAGraph(), x.clone().requires_grad_()
    back = torch.randn(eager[0].shape, generator=torch.Generator().manual_seed(6)).cuda().bfloat16()
    with torch.cuda.graph(graph):
        with torch.autocast("cuda", torch.bfloat16, cache_enabled=False):
            out = part(given)
        replayed = [out.detach(), *torch.autograd.grad(out, (given, *leaves), back)]
    graph.replay()
    torch.cuda.synchronize()
    for way in (eager, compiled, replayed):
        as_near(way, expected, exact, room=1.2)
