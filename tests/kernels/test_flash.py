"""The Triton kernels against attention written out; on a GPU, or in Triton's interpreter with TRITON_INTERPRET=1."""

# B rows, T queries, S keys, H query heads, G key/value heads, E head size

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

from tests.kernels.launch import DEVICE, needs_gpu, needs_triton

if TYPE_CHECKING:
    from trivium.kernels.flash import Plan

pytestmark = needs_triton


def plain(query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, seen: Tensor | None, causal: bool) -> Tensor:
    ratio = query.shape[1] // key.shape[1]
    scores = query @ key.repeat_interleave(ratio, 1).mT * 0.3
    scores = scores if bias is None else scores + bias
    queries, keys = scores.shape[-2:]
    allowed = torch.ones(1, 1, queries, keys, dtype=torch.bool, device=query.device)
    allowed = allowed.tril(keys - queries) if causal else allowed
    allowed = allowed if seen is None else allowed & seen[:, None, None, :]
    weights = scores.masked_fill(~allowed, torch.finfo(scores.dtype).min).softmax(-1).masked_fill(~allowed, 0.0)
    return weights @ value.repeat_interleave(ratio, 1)


@pytest.mark.parametrize(
    ("queries", "keys", "groups", "causal", "biased", "padded"),
    [
        (37, 37, 4, True, True, False),
        (37, 53, 4, False, False, True),
        (20, 45, 2, True, True, True),
        (40, 40, 1, False, True, True),
        (32, 64, 2, True, True, True),  # whole blocks
    ],
)
def test_values_and_gradients_are_those_of_the_formula(
    queries: int, keys: int, groups: int, causal: bool, biased: bool, padded: bool
) -> None:
    from trivium.kernels.flash import Block, Plan

    block = Block(16, 32, 4, 1)
    plan = Plan(
        forward=Block(32, 16, 4, 1), keys=block, queries=Block(16, 16, 4, 1), bias=block, parts=0 if groups == 1 else 2
    )
    compare(3, queries, keys, (4, groups), causal, biased, padded, plan)


@pytest.mark.parametrize(
    ("rows", "queries", "keys", "causal", "padded"),
    [
        (3, 64, 64, True, False),  # one whole block
        (2, 64, 64, False, True),
        (2, 65, 65, True, True),
        (9, 33, 77, True, False),  # more rows than parts, and parts without a row
        (2, 99, 99, False, False),
        (3, 114, 114, True, True),
        (2, 1, 127, False, True),
        (2, 128, 128, True, False),
        (2, 128, 128, False, True),
        (2, 129, 129, True, True),  # the first that is not short
        (2, 130, 130, False, True),
    ],
)
def test_texts_of_any_length_get_the_values_and_gradients_of_the_formula(
    rows: int, queries: int, keys: int, causal: bool, padded: bool
) -> None:
    compare(rows, queries, keys, (2, 1), causal, True, padded, None)


def test_short_texts_are_cut_into_smaller_blocks_and_few_parts() -> None:
    """The plans as measured: at 114 keys blocks of 64 x 64 and 8 parts, at 512 of 128 x 64."""
    from trivium.kernels.flash import planned

    for keys in (64, 114, 128):
        assert planned(keys).forward[:2] == (64, 64)
        assert planned(keys).parts == 8
    for keys in (129, 512):
        assert planned(keys).forward[:2] == (128, 64)
        assert planned(keys).parts == 0


@pytest.mark.parametrize(
    ("rows", "keys", "busy", "parts"),
    [(64, 512, 1536, 2), (64, 512, 3072, 4), (64, 512, 100, 1), (3, 512, 3072, 3), (64, 114, 1536, 8), (5, 114, 1, 5)],
)
def test_the_plan_alone_says_into_how_many_parts_the_bias_is_summed(
    rows: int, keys: int, busy: int, parts: int
) -> None:
    """12 heads of 8 x 8 blocks are 768 programs a part; short texts have 8 parts, and none has more than rows."""
    from trivium.kernels.flash import bias_sums, planned

    given = torch.empty(rows, 12, keys, 64, device="meta")
    bias, lse = torch.empty(1, 12, keys, keys, device="meta"), torch.empty(rows, 12, keys, device="meta")
    plan = planned(keys)._replace(busy=busy).numbers()
    sums = bias_sums(given.transpose(1, 2), given, given, given, bias, None, lse, lse, False, 1.0, plan)
    assert sums.shape == (parts, 12, keys, keys)


def compare(
    rows: int,
    queries: int,
    keys: int,
    heads: tuple[int, int],
    causal: bool,
    biased: bool,
    padded: bool,
    plan: Plan | None,
) -> None:
    """Values and all gradients, of our kernels and of the formula; `heads` of queries, and of keys and values."""
    from trivium.kernels.flash import attend

    generator = torch.Generator().manual_seed(queries)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(DEVICE)

    query = draw(rows, queries, heads[0], 16).transpose(1, 2).requires_grad_()  # as it comes out of a projection
    key, value = (draw(rows, heads[1], keys, 16).requires_grad_() for _ in range(2))
    bias = draw(1, heads[0], queries, keys).requires_grad_() if biased else None
    seen = draw(rows, keys) < 0.5 if padded else None
    if seen is not None:
        seen[0] = False  # a row in which nothing is seen
    inputs = [one for one in (query, key, value, bias) if one is not None]
    fast = attend(query, key, value, bias, seen, causal=causal, scale=0.3, plan=plan)
    slow = plain(query, key, value, bias, seen, causal)
    close = 5e-3 if DEVICE == "cuda" else 1e-5  # a GPU multiplies in TF32
    torch.testing.assert_close(fast, slow, atol=close, rtol=close)
    upstream = draw(*slow.shape)
    for one, two in zip(*(torch.autograd.grad(out, inputs, upstream) for out in (fast, slow)), strict=True):
        torch.testing.assert_close(one, two, atol=close, rtol=close)


def test_a_compiled_model_gets_the_same() -> None:
    """Two layers that share a table of biases, as in T5, with the three parts in one tensor."""
    from trivium.kernels.flash import Block, Plan, attend

    block, generator = Block(16, 16, 4, 1), torch.Generator().manual_seed(0)
    plan = Plan(forward=block, keys=block, queries=block, bias=block, parts=2)
    x, weight, table = (torch.randn(*shape, generator=generator) for shape in ((2, 24, 32), (96, 32), (5, 2)))
    places = torch.randint(0, 5, (24, 24), generator=generator).to(DEVICE)
    leaves = [one.to(DEVICE).requires_grad_() for one in (x, weight, table)]

    def layers(x: Tensor, weight: Tensor, table: Tensor) -> Tensor:
        bias = torch.nn.functional.embedding(places, table).permute(2, 0, 1)[None].contiguous()
        for _ in range(2):
            query, key, value = (
                part.view(2, 24, 2, 16).transpose(1, 2) for part in torch.split(x @ weight.t() * 0.1, 32, dim=-1)
            )
            x = x + attend(query, key, value, bias, None, causal=True, scale=0.3, plan=plan).transpose(1, 2).flatten(2)
        return x

    plain = layers(leaves[0], leaves[1], leaves[2])
    compiled = torch.compile(layers, backend="aot_eager", fullgraph=True)(leaves[0], leaves[1], leaves[2])
    torch.testing.assert_close(compiled, plain)
    upstream = torch.randn(plain.shape, generator=generator).to(DEVICE)
    for one, two in zip(*(torch.autograd.grad(out, leaves, upstream) for out in (compiled, plain)), strict=True):
        torch.testing.assert_close(one, two)


def test_one_program_is_for_many_lengths() -> None:
    """Although the rows are summed in 8 parts at 20 keys and in 2 at 40."""
    from trivium.kernels.flash import Block, Plan, attend

    block, generator = Block(32, 32, 4, 1), torch.Generator().manual_seed(0)
    plan = Plan(forward=block, keys=block, queries=block, bias=block, busy=8)

    def mix(query: Tensor, key: Tensor, value: Tensor, bias: Tensor) -> Tensor:
        return attend(query, key, value, bias, None, causal=True, scale=0.3, plan=plan)

    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(mix, backend=counter, dynamic=True, fullgraph=True)
    for length in (20, 40, 17):
        shapes = (*((8, 1, length, 16) for _ in range(3)), (1, 1, length, length))
        query, key, value, bias = (
            torch.randn(*shape, generator=generator).to(DEVICE).requires_grad_() for shape in shapes
        )
        leaves = (query, key, value, bias)
        fast, slow = compiled(*leaves), mix(*leaves)
        upstream = torch.randn(slow.shape, generator=generator).to(DEVICE)
        for one, two in zip(*(torch.autograd.grad(out, leaves, upstream) for out in (fast, slow)), strict=True):
            torch.testing.assert_close(one, two)
    assert counter.frame_count == 1
    torch._dynamo.reset()


def test_gradients_of_one_product_need_no_copy() -> None:
    """Queries, keys and values out of one product: their gradients lie as those of the product do."""
    from trivium.kernels.flash import Block, Plan, attend

    block, generator = Block(16, 16, 4, 1), torch.Generator().manual_seed(0)
    plan = Plan(forward=block, keys=block, queries=block, bias=block, parts=1)
    whole = torch.randn(2, 24, 6, 16, generator=generator).to(DEVICE)
    parts = [part.transpose(1, 2).requires_grad_() for part in torch.split(whole, 2, dim=2)]
    mixed = attend(parts[0], parts[1], parts[2], None, None, causal=True, scale=0.3, plan=plan)
    grads = torch.autograd.grad(mixed.square().sum(), parts)
    for part, (one, grad) in enumerate(zip(parts, grads, strict=True)):
        assert grad.stride() == one.stride()
        assert grad.storage_offset() == one.storage_offset() == part * 32
        assert grad.untyped_storage().data_ptr() == grads[0].untyped_storage().data_ptr()


@needs_gpu
@pytest.mark.parametrize(
    ("queries", "size", "causal"),
    [(512, 64, False), (114, 64, True), (256, 128, True), (64, 32, False), (128, 128, True)],
)
def test_bfloat16_is_as_near_as_bfloat16_can_be(queries: int, size: int, causal: bool) -> None:
    from trivium.kernels.flash import able, attend

    generator = torch.Generator(DEVICE).manual_seed(0)
    query, key, value = (
        torch.randn(2, queries, 8, size, generator=generator, device=DEVICE, dtype=torch.bfloat16).transpose(1, 2)
        for _ in range(3)
    )
    bias = torch.randn(1, 8, queries, queries, generator=generator, device=DEVICE, dtype=torch.bfloat16)
    inputs = [one.requires_grad_() for one in (query, key, value, bias)]
    assert able(query, value)
    fast = attend(query, key, value, bias, None, causal=causal, scale=0.3)
    exact = [one.detach().double().requires_grad_() for one in inputs]
    slow = plain(exact[0], exact[1], exact[2], exact[3], None, causal)
    upstream = torch.randn_like(fast)
    results = torch.autograd.grad(fast, inputs, upstream), torch.autograd.grad(slow, exact, upstream.double())
    for one, two in zip((fast, *results[0]), (slow, *results[1]), strict=True):
        assert (one.double() - two).norm() / two.norm() < 1e-2


@needs_gpu
@pytest.mark.parametrize("length", [114, 256])
def test_a_step_can_be_recorded(length: int) -> None:
    """Into a CUDA graph, forward and backward, the gradient of the bias included."""
    from trivium.kernels.flash import attend

    generator = torch.Generator(DEVICE).manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device=DEVICE, dtype=torch.bfloat16)

    whole, bias, upstream = draw(2, length, 3 * 8, 64), draw(1, 8, length, length), draw(2, 8, length, 64)

    def step() -> list[Tensor]:
        # leaves of its own: a node of an older step that still lived would wait for that one's stream
        leaves = [one.detach().requires_grad_() for one in (whole, bias)]
        query, key, value = (part.transpose(1, 2) for part in torch.split(leaves[0], 8, dim=2))
        mixed = attend(query, key, value, leaves[1], None, causal=False, scale=0.3)
        return [mixed.detach(), *torch.autograd.grad(mixed, leaves, upstream)]

    expected = step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        recorded = step()
    graph.replay()
    torch.cuda.synchronize()
    for one, two in zip(recorded, expected, strict=True):
        assert (one.double() - two.double()).norm() / two.double().norm() < 1e-2
