"""Packed weights: as near as their levels allow, exact where they can be, and the same layer in every use."""

from __future__ import annotations

from copy import deepcopy
from typing import cast

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from trivium.parts.linear import Linear
from trivium.parts.quantized import GROUP, Bits, Packed, QuantizedLinear, pack, unpack, unpack_into

BITS: tuple[Bits, ...] = (8, 4)


def drawn(outputs: int, inputs: int, seed: int = 0, size: float = 1.0) -> Tensor:
    return torch.randn(outputs, inputs, generator=torch.Generator().manual_seed(seed)) * size


def slow(packed: Packed, inputs: int) -> Tensor:
    """The matrix, number by number in float64, from what the format says."""
    wide = packed.levels.shape[1] * (1 if packed.levels.dtype == torch.int8 else 2)
    group = wide // packed.scales.shape[1]
    rows = []
    for levels, scales in zip(packed.levels.tolist(), packed.scales.double().tolist(), strict=True):
        if packed.levels.dtype == torch.uint8:
            nibbles = [byte % 16 for byte in levels] + [byte // 16 for byte in levels]
            levels = [nibble - 16 if nibble > 7 else nibble for nibble in nibbles]
        rows.append([levels[i] * scales[i // group] for i in range(inputs)])
    return torch.tensor(rows, dtype=torch.float64)


def layer(weight: Tensor, bits: Bits, *, bias: bool = True) -> tuple[Linear, QuantizedLinear]:
    plain = Linear(weight.shape[1], weight.shape[0], bias=bias, role="up", head=4)
    plain.weight.data = weight
    if bias:
        plain.bias.data = drawn(1, weight.shape[0], seed=5)[0].to(weight.dtype)
    new = QuantizedLinear(plain, bits)
    new.fill(plain.weight)
    return plain, new


@settings(max_examples=60, deadline=None)
@given(
    bits=st.sampled_from(BITS),
    outputs=st.integers(1, 5),
    inputs=st.integers(1, 150),
    seed=st.integers(0, 2**31),
    power=st.integers(-30, 30),
)
def test_a_weight_is_off_by_at_most_half_a_level(bits: Bits, outputs: int, inputs: int, seed: int, power: int) -> None:
    weight = drawn(outputs, inputs, seed, 10.0**power)
    packed = pack(weight, bits)
    scale = packed.scales.double().abs().repeat_interleave(GROUP[bits], 1)[:, :inputs]
    error = (unpack(packed, inputs).double() - weight.double()).abs()
    # The largest of 4 bits is 7 where the largest weight is -8: its mirror image lies a whole level away, and the
    # scale's rounding adds 8 * 2**-9 of one.
    top = unpack(packed, inputs).double().abs() >= 7 * scale
    limit = torch.where(top & (bits == 4), 1.02, 0.5 + 1e-4) * scale
    assert bool((error <= limit).all())


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("inputs", [1, 31, 32, 64, 100, 192])
def test_the_matrix_is_level_times_scale_number_by_number(bits: Bits, inputs: int) -> None:
    packed = pack(drawn(7, inputs), bits)
    assert torch.equal(unpack(packed, inputs).double(), slow(packed, inputs))


@settings(max_examples=40, deadline=None)
@given(bits=st.sampled_from(BITS), inputs=st.integers(1, 130), seed=st.integers(0, 2**31))
def test_what_the_levels_can_say_is_kept_exactly(bits: Bits, inputs: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    group, extreme = GROUP[bits], 127 if bits == 8 else -8
    groups = -(-inputs // group)
    levels = torch.randint(-7, 8, (3, groups, group), generator=generator).float()
    levels[..., 0] = extreme  # every group has its largest level
    scales = torch.rand(3, groups, 1, generator=generator).bfloat16().float()
    weight = (levels * scales).flatten(1)[:, :inputs]
    packed = pack(weight, bits)
    assert torch.equal(unpack(packed, inputs), weight)
    again = pack(unpack(packed, inputs), bits)
    assert torch.equal(again.levels, packed.levels)
    assert torch.equal(again.scales, packed.scales)


@settings(max_examples=40, deadline=None)
@given(bits=st.sampled_from(BITS), inputs=st.integers(1, 130), seed=st.integers(0, 2**31))
def test_a_packed_matrix_packs_to_itself(bits: Bits, inputs: int, seed: int) -> None:
    packed = pack(drawn(4, inputs, seed), bits)
    again = pack(unpack(packed, inputs), bits)
    assert torch.equal(again.levels, packed.levels)
    assert torch.equal(again.scales, packed.scales)


@pytest.mark.parametrize("bits", BITS)
def test_zeros_stay_zeros(bits: Bits) -> None:
    weight = drawn(4, 96)
    weight[1] = 0
    weight[2, :64] = 0
    found = unpack(pack(weight, bits), 96)
    assert torch.equal(found[weight == 0], torch.zeros(int((weight == 0).sum())))


def test_eight_bits_are_those_of_torch() -> None:
    weight = drawn(50, GROUP[8])  # one group: a scale per row, as torch has them
    packed = pack(weight, 8)
    scales, zeros = packed.scales[:, 0].float(), torch.zeros(50, dtype=torch.int32)
    theirs = torch.fake_quantize_per_channel_affine(weight, scales, zeros, 0, -127, 127)
    off = (unpack(packed, GROUP[8]) - theirs).abs() / scales[:, None]
    assert float(off.max()) <= 1.001
    assert float((off > 1e-3).float().mean()) < 1e-3  # a tie that falls to the other side


def test_four_bits_are_as_near_as_those_of_gguf() -> None:
    gguf = pytest.importorskip("gguf")
    weight = drawn(64, 256, size=0.05)
    kind = gguf.GGMLQuantizationType.Q4_0
    theirs = torch.from_numpy(gguf.quants.dequantize(gguf.quants.quantize(weight.numpy(), kind), kind))
    ours = unpack(pack(weight, 4), 256)
    assert (ours - weight).norm() <= 1.005 * (theirs - weight).norm()


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("shape", [(40, 100), (33, 64), (1100, 1024)], ids=["padded", "whole groups", "in chunks"])
@pytest.mark.parametrize("bias", [True, False])
def test_a_quantised_layer_is_the_linear_layer_of_its_matrix(bits: Bits, shape: tuple[int, int], bias: bool) -> None:
    plain, new = layer(drawn(*shape).double(), bits, bias=bias)
    dense = unpack(Packed(new.levels, new.scales), shape[1]).double()
    assert torch.equal(new.dense().double(), dense)
    for leading in ((1, 1), (3, 2)):
        x = torch.randn(*leading, shape[1], dtype=torch.float64, requires_grad=True)
        torch.testing.assert_close(new(x), F.linear(x, dense, plain.bias))
        gradient = torch.autograd.grad(new(x).square().sum(), x)[0]
        expected = torch.autograd.grad(F.linear(x, dense, plain.bias).square().sum(), x)[0]
        torch.testing.assert_close(gradient, expected)
    error = (dense - plain.weight).norm() / plain.weight.norm()
    assert float(error.detach()) < (0.01 if bits == 8 else 0.11)


@pytest.mark.parametrize("bits", BITS)
def test_a_matrix_laid_out_by_columns_has_the_same_levels(bits: Bits) -> None:
    weight = drawn(96, 64)
    assert all(torch.equal(a, b) for a, b in zip(pack(weight.T.contiguous().T, bits), pack(weight, bits), strict=True))


@pytest.mark.parametrize("bits", BITS)
def test_a_copy_a_dtype_and_a_state_dict_keep_the_matrix(bits: Bits) -> None:
    _, new = layer(drawn(20, 70), bits)
    dense = new.dense()
    assert torch.equal(deepcopy(new).dense(), dense)
    for dtype in (torch.float64, torch.bfloat16, torch.float32):
        moved = deepcopy(new).to(dtype)
        assert torch.equal(moved.dense(), dense)
        assert moved(torch.ones(2, 70, dtype=dtype)).dtype == dtype
    _, other = layer(drawn(20, 70, seed=1), bits)
    assert not torch.equal(other.dense(), dense)
    other.load_state_dict(new.state_dict())
    assert torch.equal(other.dense(), dense)


@pytest.mark.parametrize("bits", BITS)
def test_a_packed_matrix_takes_its_bits_and_a_scale_per_group(bits: Bits) -> None:
    packed = pack(drawn(128, 1024), bits)
    assert packed.levels.nbytes == 128 * 1024 * bits // 8
    assert packed.scales.nbytes == 2 * 128 * 1024 // GROUP[bits]


@pytest.mark.parametrize("bits", BITS)
def test_a_matrix_is_unpacked_into_its_place(bits: Bits) -> None:
    packed = pack(drawn(1100, 1000), bits)
    target = torch.empty(1100, 1000, dtype=torch.float64)
    unpack_into(target, packed)
    assert torch.equal(target, unpack(packed, 1000).double())


@pytest.mark.parametrize("bits", [8, pytest.param(4, marks=pytest.mark.full)])  # compiling takes seconds
def test_a_compiled_layer_gives_what_it_gives_in_eager_mode(bits: Bits) -> None:
    _, new = layer(drawn(40, 100), bits)
    x = drawn(3, 100)
    torch._dynamo.reset()
    compiled = cast(nn.Module, torch.compile(new, backend="aot_eager", fullgraph=True))
    torch.testing.assert_close(compiled(x), new(x))
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), new(x))


@pytest.mark.parametrize("bits", BITS)
def test_arithmetic_in_bfloat16_by_autocast_stays_in_bfloat16(bits: Bits) -> None:
    _, new = layer(drawn(40, 100), bits)
    x = drawn(3, 100)
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        found = new(x)
    assert found.dtype == torch.bfloat16
    exact = new(x).detach()
    assert float((found.float() - exact).norm() / exact.norm()) < 0.01
