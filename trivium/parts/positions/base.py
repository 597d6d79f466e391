"""What a position scheme may offer to a stack and to its attention."""

# B batch (1 where all rows agree), T new tokens, S keys (cached and new), D width, H query heads, E head size

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from trivium.parts.declared import Declared


class Positions(nn.Module):
    """What a scheme may offer; this one offers nothing. `at` holds the position of every token."""

    declares: ClassVar[Mapping[str, Declared]] = {}
    values: bool = False  # whether `value` adds anything, so that attention must show its weights
    # the first and the number of the query heads that this process computes; None: all (tensor parallel divides them)
    own_heads: tuple[int, int] | None = None

    def embed(self, x_BTD: Tensor, at_BT: Tensor) -> Tensor:
        """The input with its positions added."""
        return x_BTD

    def prepare(self, at_BT: Tensor, keys_at_BS: Tensor) -> Any:
        """What the methods below need, computed once per forward and shared by all layers of this module."""
        return None

    def rotate(self, x_BHTE: Tensor, prepared: Any) -> Tensor:
        """The query or key of the new tokens turned by its position."""
        return x_BHTE

    def bias(self, prepared: Any) -> Tensor | None:
        """What is added to the scores after scaling, [1 or B, H, T, S], in float32 at least."""
        return None

    def score(self, query_BHTE: Tensor, prepared: Any) -> Tensor | None:
        """What is added to the products of query and key before scaling, [B, H, T, S]."""
        return None

    def value(self, weights_BHTS: Tensor, prepared: Any) -> Tensor | None:
        """What is added to the mixed values, [B, H, T, size of a value]."""
        return None

    def of_own_heads(self, by_head: Tensor, dim: int) -> Tensor:
        """The entries of this process's heads in something that has one for each head along `dim`."""
        return by_head if self.own_heads is None else by_head.narrow(dim, *self.own_heads)


class Computed(Positions):
    """The base of schemes with a constant tensor, which is computed where the model is, and never saved or rounded."""

    constant: Tensor

    def compute(self, device: torch.device) -> Tensor:
        raise NotImplementedError

    def settle(self) -> None:
        """Compute the constant for the first time, once the module knows what it needs."""
        self.register_buffer("constant", self.compute(torch.get_default_device()), persistent=False)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        # `model.to(bfloat16)` has rounded it (rotary frequencies: off by a radian within a few hundred positions),
        # and `to_empty` has left it without values
        self.constant = self.compute(self.constant.device)
        return self


def distances(at_BT: Tensor, keys_at_BS: Tensor) -> Tensor:
    """How far ahead of each query its keys lie, [1 or B, T, S]: memory minus query, so the past is negative."""
    return keys_at_BS[:, None, :] - at_BT[:, :, None]
