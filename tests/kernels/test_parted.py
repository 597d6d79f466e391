"""Gradients laid together by the Triton kernel against `cat` and `sum`; on a GPU, or in Triton's interpreter."""

# B rows, T tokens, H heads, E head size, C columns: 3 H E

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from tests.kernels.launch import DEVICE, needs_gpu, needs_triton
from tests.parts.drawing import LAYOUTS, random

pytestmark = needs_triton


def draw(*shape: int, seed: int = 0) -> Tensor:
    return random(*shape, seed=seed).to(DEVICE)


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts and blocks of which even small tensors have several; the interpreter is slow."""
    from trivium.kernels import parted

    monkeypatch.setattr(parted, "LAUNCH", parted.Launch(tokens=16, columns=32, parts=3))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    ("rows", "length", "heads", "size"), [(2, 24, 2, 32), (3, 37, 4, 16), (1, 5, 3, 24), (2, 40, 6, 20)]
)
def test_gradients_are_laid_side_by_side_and_summed(
    rows: int, length: int, heads: int, size: int, layout: str, few: None
) -> None:
    from trivium.kernels.parted import together

    grads = [LAYOUTS[layout](draw(rows, heads, length, size, seed=seed)) for seed in range(3)]
    packed, sums = together(*grads, 3)
    expected = torch.cat(grads, 1).transpose(1, 2).flatten(2)
    assert torch.equal(packed, expected)
    torch.testing.assert_close(sums.sum(0), expected.sum((0, 1)), atol=1e-5, rtol=1e-5)
    for one, two in zip(together(*grads, 3), (packed, sums), strict=True):
        assert torch.equal(one, two)  # the same bits again


@pytest.mark.parametrize("way", ["eager", "compiled", "recomputed"])
def test_a_product_that_is_cut_has_the_gradients_of_one_that_is_split(way: str, few: None) -> None:
    from trivium.kernels.parted import cut

    heads, size, length = 4, 16, 21
    columns = 3 * heads * size
    leaves = [draw(2, length, 24), draw(columns, 24, seed=1), draw(columns, seed=2)]
    x, weight, bias = (leaf.requires_grad_() for leaf in leaves)

    def mixed(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(query, key, value, is_causal=True)

    def layer(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return mixed(*cut(F.linear(x, weight, bias.detach()), bias, heads))

    def recomputed(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        result: Tensor = checkpoint(layer, x, weight, bias, use_reentrant=False)
        return result

    run = recomputed if way == "recomputed" else layer
    run = run if way == "eager" else torch.compile(run, backend="aot_eager", fullgraph=True)
    parts = torch.split(F.linear(x, weight, bias).view(2, length, -1, size), heads, 2)
    slow = mixed(*(part.transpose(1, 2) for part in parts))
    fast = run(x, weight, bias)
    close = 1e-2 if DEVICE == "cuda" else 1e-4  # a GPU multiplies in TF32
    torch.testing.assert_close(fast, slow, atol=close, rtol=close)
    upstream = draw(*slow.shape, seed=3)
    for one, two in zip(*(torch.autograd.grad(out, leaves, upstream) for out in (fast, slow)), strict=True):
        torch.testing.assert_close(one, two, atol=close, rtol=close)
    torch._dynamo.reset()


@needs_gpu
def test_a_step_can_be_recorded() -> None:
    from trivium.kernels.parted import cut

    packed = draw(3, 200, 12 * 64).to(torch.bfloat16)
    bias, upstream = draw(12 * 64, seed=1), draw(3, 4, 200, 64, seed=2).to(torch.bfloat16)

    def step() -> list[Tensor]:
        leaves = [one.detach().requires_grad_() for one in (packed, bias)]
        query, key, value = cut(leaves[0], leaves[1], 4)
        mixed = F.scaled_dot_product_attention(query, key, value)
        return list(torch.autograd.grad(mixed, leaves, upstream))

    expected = step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        recorded = step()
    graph.replay()
    torch.cuda.synchronize()
    torch.testing.assert_close(recorded[0], expected[0], rtol=0.02, atol=0.02)  # attention may add in any order
    torch.testing.assert_close(recorded[1], recorded[0].float().sum((0, 1)), rtol=1e-3, atol=1e-3)
