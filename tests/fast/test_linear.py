"""Every matmul path of `FastLinear` gives the output and the gradients of `Linear`."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrize import register_parametrization

from tests.fast.compare import close, fast_copy, outcome
from tests.kernels.launch import DEVICE, needs_gpu
from tests.parts.drawing import drawn, random
from trivium.fast.choose import fast
from trivium.fast.linear import (
    FastLinear,
    bias_of,
    column_major,
    fast_layers,
    fused_linear,
    in_float8,
    is_fast,
    linear,
    use_fp8,
    weight_of,
)
from trivium.parts.linear import Linear
from trivium.parts.roles import Role


@pytest.fixture
def two_threads() -> Iterator[None]:
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(1)


def made(inputs: int, outputs: int, *, bias: bool = True, role: Role = "up", seed: int = 0) -> FastLinear:
    layer = drawn(Linear(inputs, outputs, bias=bias, role=role), seed)
    fast(layer)
    assert isinstance(layer, FastLinear)
    return layer


@pytest.mark.parametrize("shape", [(640, 320), (320, 640), (321, 320)])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.usefixtures("two_threads")
def test_a_shared_product_is_the_product(shape: tuple[int, int], bias: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(shape, generator=generator, dtype=torch.float64)
    offset = torch.randn(shape[0], generator=generator, dtype=torch.float64) if bias else None
    for rows in (1, 3):
        x = torch.randn(rows, 1, shape[1], generator=generator, dtype=torch.float64)
        for layout in (weight, column_major(weight)):
            with torch.no_grad():
                torch.testing.assert_close(linear(x, layout, offset), F.linear(x, weight, offset))


@pytest.mark.usefixtures("two_threads")
def test_a_single_row_has_a_gradient_all_the_same() -> None:
    layer = made(320, 640).double()
    x = torch.randn(1, 320, dtype=torch.float64, requires_grad=True)
    layer(x).sum().backward()
    torch.testing.assert_close(x.grad, layer.weight.detach().sum(0, keepdim=True))


@pytest.mark.parametrize("shape", [(8, 3), (3, 8), (4, 4)])
def test_columns_change_the_layout_and_nothing_else(shape: tuple[int, int]) -> None:
    weight = torch.randn(shape)
    arranged = column_major(weight)
    assert torch.equal(arranged, weight)
    assert arranged.stride() == ((1, shape[0]) if shape[0] > shape[1] else (shape[1], 1))


@pytest.mark.parametrize("rows", [1, 3, 700])  # of the last torch's own library multiplies none
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("columns", [True, False])
def test_a_fast_layer_gives_values_and_gradients_of_the_plain_one(rows: int, bias: bool, columns: bool) -> None:
    plain = drawn(Linear(160, 240, bias=bias, role="up"))
    layer = fast_copy(plain)
    assert type(layer) is FastLinear
    if columns:
        layer.weight.data = column_major(layer.weight.data)
    x = random(rows, 160)
    found, expected = (outcome(one, x, list(one.parameters())) for one in (layer, plain))
    close(found, expected, 1e-6)
    with torch.no_grad():
        close([layer(x)], [plain(x)], 1e-6)


def test_products_in_float8_are_those_of_training_under_autocast_that_fit() -> None:
    x = torch.empty(2, 8, 32)
    assert not in_float8(x, 48)
    with torch.autocast("cpu", torch.bfloat16):
        assert in_float8(x, 48)
        assert not in_float8(x, 40)
        assert not in_float8(x[:1], 48)
        assert not in_float8(x[:0], 48)
        assert not in_float8(x[..., :24], 48)
        with torch.no_grad():
            assert not in_float8(x, 48)


@pytest.mark.parametrize(("rows", "inputs", "outputs"), [(15, 32, 48), (16, 30, 48), (16, 32, 40), (16, 32, 48)])
def test_sizes_that_the_kernels_lack_stay_as_they_are(rows: int, inputs: int, outputs: int) -> None:
    x, weight = random(rows, inputs).requires_grad_(), random(outputs, inputs, seed=1)
    with torch.autocast("cpu", torch.bfloat16):
        found, plain = linear(x, weight, None, narrow=True), linear(x, weight, None)
    assert torch.equal(found, plain) == (rows % 16 + inputs % 16 + outputs % 16 > 0)


def test_no_rows_at_all_have_a_product_too() -> None:
    x, weight = random(0, 32).requires_grad_(), random(48, 32, seed=1).requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        found = linear(x, weight, None, narrow=True)
    assert found.shape == (0, 48)
    found.sum().backward()  # type: ignore[no-untyped-call]
    assert weight.grad is not None
    assert not weight.grad.any()


def test_only_training_is_in_float8_and_only_the_large_products() -> None:
    up, transform = made(32, 48), made(32, 32, role="transform")
    model = nn.Sequential(up, transform)
    use_fp8(model, True)
    assert (up.fp8, transform.fp8) == (True, False)
    x = random(16, 32)
    with torch.autocast("cpu", torch.bfloat16):
        plain = F.linear(x, up.weight, up.bias)
        assert not torch.equal(up(x), plain)
        with torch.no_grad():
            assert torch.equal(up(x), plain)
    assert torch.equal(up(x), F.linear(x, up.weight, up.bias))  # float32 was asked for
    use_fp8(model, False)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(up(x), plain)


def side_by_side(bias: bool, device: str) -> tuple[list[FastLinear], Tensor, list[Tensor]]:
    layers = [made(6, size, bias=bias, seed=10 * size).double().to(device) for size in (8, 4, 2)]
    x = random(2, 3, 6).double().to(device).requires_grad_()
    return layers, x, [x, *(one for layer in layers for one in layer.parameters())]


@pytest.mark.parametrize("bias", [True, False])
def test_one_product_of_several_layers_gives_what_each_gives(bias: bool) -> None:
    """Values and gradients, in the order of the layers."""
    layers, x, leaves = side_by_side(bias, "cpu")
    whole = linear(x, weight_of(x, *layers), bias_of(*layers))
    apart = torch.cat([layer(x) for layer in layers], -1)
    torch.testing.assert_close(whole, apart)
    upstream = random(2, 3, 14).double()
    for one, two in zip(*(torch.autograd.grad(out, leaves, upstream) for out in (whole, apart)), strict=True):
        torch.testing.assert_close(one, two)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=needs_gpu)])
def test_layers_of_one_input_give_what_each_gives(bias: bool, device: str) -> None:
    layers, x, leaves = side_by_side(bias, device)
    whole, apart = torch.cat(list(fused_linear(x, *layers)), -1), torch.cat([layer(x) for layer in layers], -1)
    torch.testing.assert_close(whole, apart)
    upstream = random(2, 3, 14).double().to(device)
    for one, two in zip(*(torch.autograd.grad(out, leaves, upstream) for out in (whole, apart)), strict=True):
        torch.testing.assert_close(one, two)


def test_the_bf16_copy_is_taken_in_training_under_autocast_and_only_whole() -> None:
    one, two = made(6, 8), made(6, 8, seed=3)
    copy = torch.cat((one.weight, two.weight)).detach().bfloat16().requires_grad_()
    x = random(3, 6)
    one.bf16_copy = two.bf16_copy = copy
    assert weight_of(x, one) is one.weight
    assert torch.equal(weight_of(x, one, two), torch.cat((one.weight, two.weight)))
    with torch.autocast("cpu", torch.bfloat16):
        assert weight_of(x, one, two) is copy
        assert weight_of(x, one) is one.weight  # its copy has another layer's rows too
        with torch.no_grad():
            assert weight_of(x, one, two) is not copy


class Doubled(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * x


def test_a_layer_with_something_around_it_is_not_its_weights_alone() -> None:
    plain, layer = Linear(6, 8, bias=True, role="up"), made(6, 8)
    assert not is_fast(plain)
    assert not is_fast(None)
    assert not is_fast(nn.Linear(6, 8))
    assert not is_fast(nn.Sequential(layer))
    assert is_fast(layer)
    assert fast_layers(layer, layer) == (layer, layer)
    assert fast_layers(layer, plain) == ()
    for register in (
        layer.register_forward_hook,
        layer.register_forward_pre_hook,
        layer.register_full_backward_hook,
        layer.register_full_backward_pre_hook,
    ):
        handle = register(lambda *given: None)
        assert not is_fast(layer)
        handle.remove()
        assert is_fast(layer)
    register_parametrization(layer, "weight", Doubled())
    assert not is_fast(layer)


@needs_gpu
@pytest.mark.parametrize("bias", [True, False])
def test_on_a_gpu_a_fast_layer_gives_the_values_of_the_plain_one(bias: bool) -> None:
    plain = drawn(Linear(160, 240, bias=bias, role="up")).to(DEVICE)
    layer, x = fast_copy(plain), random(3, 160).to(DEVICE)
    for autocast in (False, True):
        ways = [outcome(one, x, list(one.parameters()), autocast=autocast) for one in (layer, plain)]
        assert all(torch.equal(one, other) for one, other in zip(*ways, strict=True))
