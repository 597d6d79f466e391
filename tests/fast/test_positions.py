"""Fast position schemes against the plain ones."""

from __future__ import annotations

from typing import Literal

import pytest
import torch

from tests.fast.compare import close, fast_copy, outcome
from tests.kernels.launch import needs_gpu
from tests.parts.drawing import drawn, random
from trivium.fast.positions import FastBucketPositions, FastRotaryPositions, sum_of_rows
from trivium.parts.options.positions import BucketOptions, RotaryOptions
from trivium.parts.options.scaling import NoScaling, Scaling, Yarn
from trivium.parts.positions import BucketPositions
from trivium.parts.site import Site

SITE = Site(width=16, context=12, heads=2, head=8, value=8)
Layout = Literal["halves", "interleaved"]


@pytest.mark.parametrize("layout", ["halves", "interleaved"])
@pytest.mark.parametrize("share", [1.0, 0.5])
@pytest.mark.parametrize("scaling", [NoScaling(), Yarn(attention=1.7)], ids=repr)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_turns_and_their_gradients_are_those_of_the_plain_way(
    layout: Layout, share: float, scaling: Scaling, dtype: torch.dtype
) -> None:
    plain = RotaryOptions(layout=layout, share=share, scaling=scaling).build(SITE)
    part, at = fast_copy(plain), torch.tensor([[3, 8, 0], [1, 2, 3]])
    assert isinstance(part, FastRotaryPositions)
    prepared = plain.prepare(at, at)
    assert torch.equal(part.prepare(at, at), prepared)
    x = random(2, 2, 3, 8).to(dtype)
    found = outcome(lambda x: part.rotate(x, prepared), x, [])
    expected = outcome(lambda x: plain.rotate(x, prepared), x, [])
    close(found, expected, {torch.float64: 1e-12, torch.float32: 1e-6, torch.bfloat16: 1e-2}[dtype])
    with torch.no_grad():
        assert torch.equal(part.rotate(x, prepared), plain.rotate(x, prepared))


@pytest.mark.parametrize("share", [1.0, 0.5])
def test_gradients_of_turns_are_those_of_finite_differences(share: float) -> None:
    part = fast_copy(RotaryOptions(share=share).build(SITE))
    prepared = part.prepare(torch.tensor([[3, 8]]), torch.tensor([[3, 8]]))
    x_BHTE = random(1, 2, 2, 8).double().requires_grad_()
    assert torch.autograd.gradcheck(lambda x: part.rotate(x, prepared), x_BHTE)


@pytest.mark.parametrize("share", [1.0, 0.5])
@pytest.mark.parametrize("learning", [True, False])
def test_a_head_of_another_size_is_never_turned_in_part(share: float, learning: bool) -> None:
    part, at = fast_copy(RotaryOptions(share=share).build(SITE)), torch.tensor([[3]])
    with pytest.raises(RuntimeError, match="size"), torch.set_grad_enabled(learning):
        part.rotate(random(1, 2, 1, 16), part.prepare(at, at))


def test_a_table_read_by_sums_is_a_lookup() -> None:
    """As a compiled step on a GPU does it, with its gradient, and with an entry that is no number."""
    generator = torch.Generator().manual_seed(0)
    places = torch.randint(0, 7, (2, 9, 11), generator=generator)
    table = torch.randn(7, 3, generator=generator).requires_grad_()
    lookup = torch.nn.functional.embedding(places, table).permute(0, 3, 1, 2)
    assert torch.equal(sum_of_rows(places, table), lookup)
    upstream = torch.randn(lookup.shape, generator=generator)
    grads = [torch.autograd.grad(one, table, upstream)[0] for one in (sum_of_rows(places, table), lookup)]
    torch.testing.assert_close(*grads)
    broken = table.detach().index_fill(0, torch.tensor([3]), float("inf"))
    assert torch.equal(sum_of_rows(places, broken)[:, 0], broken[places, 0])


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=needs_gpu)])
@pytest.mark.parametrize("compiled", [False, True])
def test_buckets_have_the_biases_and_gradients_of_the_plain_ones(device: str, compiled: bool) -> None:
    plain = drawn(BucketOptions().build(SITE)).to(device)
    part = fast_copy(plain)
    assert isinstance(part, FastBucketPositions)
    assert isinstance(plain, BucketPositions)
    at = torch.arange(40, device=device)[None]
    torch._dynamo.reset()
    read = torch.compile(part.prepare, backend="aot_eager", fullgraph=True) if compiled else part.prepare
    found, expected = read(at, at), plain.prepare(at, at)
    assert torch.equal(found, expected)
    upstream = random(*expected.shape).to(device)
    grads = [torch.autograd.grad(bias, one.table, upstream)[0] for bias, one in ((found, part), (expected, plain))]
    torch.testing.assert_close(*grads, rtol=1e-5, atol=1e-4)
    torch._dynamo.reset()
