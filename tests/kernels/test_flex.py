"""FlexAttention over the blocks of a mask against SDPA over the same mask written out, on a GPU."""

# B rows, T queries, S keys, H query heads, E head size

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from trivium.kernels import flex
from trivium.parts.masks import Mask

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU: there is no way back on a CPU")


def test_values_and_gradients_of_packed_documents_are_those_of_the_dense_mask() -> None:
    generator = torch.Generator("cuda").manual_seed(0)
    numbers = (torch.rand(2, 700, generator=generator, device="cuda") < 0.01).long().cumsum(1)
    inputs = [
        torch.randn(2, heads, 700, 64, generator=generator, device="cuda").requires_grad_() for heads in (4, 2, 2)
    ]

    def fast(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        blocks = Mask(causal=True, documents=numbers, window=300).blocks(700, 700, query.device)
        return flex.attend(query, key, value, blocks, scale=0.3)

    def plain(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        allowed = Mask(causal=True, documents=numbers, window=300).dense(700, 700, query.device)
        return F.scaled_dot_product_attention(query, key, value, attn_mask=allowed, scale=0.3, enable_gqa=True)

    results: list[list[Tensor]] = []
    for way in (torch.compile(fast, fullgraph=True), plain):
        out = way(inputs[0], inputs[1], inputs[2])
        real = torch.where((numbers > 0)[:, None, :, None], out, 0.0)  # SDPA's kernels differ where nothing is seen
        upstream = torch.randn(out.shape, generator=torch.Generator("cuda").manual_seed(1), device="cuda")
        results.append([real, *torch.autograd.grad(real, inputs, upstream)])
    for one, two in zip(*results, strict=True):
        torch.testing.assert_close(one, two, atol=1e-2, rtol=1e-2)  # products in TF32
