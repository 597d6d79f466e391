"""FlexAttention over a block mask: blocks of pairs in which nothing may be seen cost nothing."""

# B batch, T queries, S keys, H query heads, G key/value heads, E head size

from __future__ import annotations

from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention


def attend(query_BHTE: Tensor, key_BGSE: Tensor, value_BGSE: Tensor, blocks: BlockMask, *, scale: float) -> Tensor:
    """Scaled dot-product attention where `blocks` allow it; zeros for a query that may see nothing."""
    grouped = query_BHTE.shape[1] != key_BGSE.shape[1]
    return flex_attention(query_BHTE, key_BGSE, value_BGSE, block_mask=blocks, scale=scale, enable_gqa=grouped)
