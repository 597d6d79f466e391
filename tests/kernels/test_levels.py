"""The C program: the plain way's numbers from the levels themselves, and nothing at all where it cannot be built."""

from __future__ import annotations

import platform
import shutil
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from tests.kernels.launch import GPU
from trivium.fast.choose import fast
from trivium.kernels import levels
from trivium.kernels.hardware import TRITON
from trivium.kernels.levels import Product
from trivium.parts.linear import Linear
from trivium.parts.quantized import Bits, Packed, QuantizedLinear, TiedLinear, pack, unpack

BITS: tuple[Bits, ...] = (8, 4)
COMPILER = next(filter(None, map(shutil.which, levels.COMPILERS)), "")

needs_compiler = pytest.mark.skipif(not COMPILER, reason="no C compiler")


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def wanted(packed: Packed, bias: Tensor | None, x: Tensor) -> Tensor:
    """In float64, from the matrix made whole."""
    result = x.double() @ unpack(packed, x.shape[-1]).double().T
    return result if bias is None else result + bias.double()


def close(found: Tensor, expected: Tensor, terms: Tensor | None = None) -> None:
    """Within rounding; `terms` are the sums of absolute values, where a few outputs may be near 0 by cancellation."""
    size = (expected if terms is None else terms).norm()
    assert float((found.double() - expected).norm() / size) < 1e-6


@pytest.fixture
def product() -> Product:
    found = levels.product()
    assert found is not None, "there is a compiler, but what it builds is not used"
    return found


@pytest.fixture
def no_compiler(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("PATH", "")
    levels.product.cache_clear()
    yield
    levels.product.cache_clear()


@needs_compiler
@settings(max_examples=60, deadline=None)
@given(
    bits=st.sampled_from(BITS),
    rows=st.integers(1, 9),
    outputs=st.integers(1, 20),
    inputs=st.integers(1, 260),
    biased=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_it_is_the_product_with_the_matrix_made_whole(
    bits: Bits, rows: int, outputs: int, inputs: int, biased: bool, seed: int
) -> None:
    layer = Linear(inputs, outputs, bias=biased, role="up")
    layer.weight.data, x = drawn(outputs, inputs, seed=seed), drawn(rows, inputs, seed=seed + 1)
    if biased:
        layer.bias.data = drawn(outputs, seed=seed + 2)
    new = QuantizedLinear(layer, bits)
    new.fill(layer.weight)
    fast(new)
    packed = Packed(new.levels, new.scales)
    terms = x.double().abs() @ unpack(packed, inputs).double().abs().T
    with torch.no_grad():
        close(new(x), wanted(packed, new.bias, x), terms)


@needs_compiler
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize(
    "flags",
    [
        pytest.param([], id="any processor"),
        pytest.param(
            ["-mavx2", "-mfma"],
            id="AVX2",
            marks=pytest.mark.skipif(platform.machine() != "x86_64", reason="no AVX2 on this processor"),
        ),
    ],
)
def test_older_processors_get_the_same(flags: list[str], bits: Bits) -> None:
    if flags and torch.backends.cpu.get_cpu_capability() == "DEFAULT":
        pytest.skip("this processor has no AVX2")
    found = levels.built(COMPILER, flags)
    assert found is not None
    packed, bias, x = pack(drawn(70, 192), bits), drawn(70, seed=1), drawn(7, 192, seed=2)
    close(found(packed.levels, packed.scales, bias, x), wanted(packed, bias, x))


@needs_compiler
@pytest.mark.parametrize("bits", BITS)
def test_a_row_gets_the_same_bits_whatever_stands_beside_it(product: Product, bits: Bits) -> None:
    packed, x = pack(drawn(50, 320), bits), drawn(11, 320, seed=2)
    together = product(packed.levels, packed.scales, None, x)
    for row in range(11):
        alone = product(packed.levels, packed.scales, None, x[row, None].contiguous())
        assert torch.equal(alone[0], together[row])


@needs_compiler
def test_the_number_of_threads_changes_no_bit(product: Product) -> None:
    packed, x = pack(drawn(101, 128), 8), drawn(2, 128, seed=2)
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            found.append(product(packed.levels, packed.scales, None, x))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(result, found[0]) for result in found)


@needs_compiler
def test_what_cannot_be_read_as_it_lies_is_not_read(product: Product) -> None:
    packed, x = pack(drawn(8, 64), 8), drawn(2, 64)
    for wrong in (x.double(), drawn(64, 2).T):
        with pytest.raises(AssertionError):
            product(packed.levels, packed.scales, None, wrong)


def test_without_a_compiler_the_plain_way_is_taken(no_compiler: None) -> None:
    assert levels.product() is None
    layer = Linear(96, 40, bias=True, role="up")
    layer.weight.data, layer.bias.data, x = drawn(40, 96), drawn(40, seed=1), drawn(1, 96, seed=2)
    new, tied = QuantizedLinear(layer, 8), TiedLinear(layer)
    new.fill(layer.weight)
    fast(nn.ModuleList((new, tied)))
    with torch.no_grad():
        close(new(x), wanted(Packed(new.levels, new.scales), new.bias, x))
        assert torch.equal(tied(x), layer(x))


def test_a_compiler_that_fails_is_as_good_as_none() -> None:
    assert levels.built("/bin/false", []) is None
    assert levels.built("/no/such/compiler", []) is None


@needs_compiler
def test_a_program_that_computes_something_else_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(levels: Tensor, scales: Tensor, bias: Tensor | None, x: Tensor) -> Tensor:
        return torch.zeros(len(x), len(levels))

    monkeypatch.setattr(levels, "built", lambda compiler, flags: wrong)
    levels.product.cache_clear()
    try:
        assert levels.product() is None
    finally:
        levels.product.cache_clear()


@needs_compiler
def test_nothing_is_built_where_no_folder_can_be_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", "/there/is/no/such/folder")
    assert levels.built(COMPILER, []) is None


def test_kernels_of_a_gpu_that_compute_something_else_are_not_used() -> None:
    def right(x: Tensor, packed: tuple[Tensor, Tensor], bias: Tensor | None) -> Tensor:
        return (x.float() @ unpack(Packed(*packed), x.shape[1]).T).bfloat16()

    def wrong(x: Tensor, packed: tuple[Tensor, Tensor], bias: Tensor | None) -> Tensor:
        return right(x, packed, bias) * (1.02 if len(x) > 1 else 1)  # several rows alone

    here = torch.device("cpu")
    for sample in levels._samples():
        assert levels._right_there(sample, here, right)
        assert not levels._right_there(sample, here, wrong)


@pytest.mark.skipif(TRITON or GPU, reason="there is Triton")
def test_without_triton_there_are_no_kernels_for_a_gpu() -> None:
    levels.gpu.cache_clear()
    assert not levels.gpu(0)
