"""Post-norm blocks in training on a GPU: one kernel computes all gradients of a norm and of the bias before it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor, nn

from trivium.fast.attention import FastAttention
from trivium.fast.feedforward import FastGlu, FastMlp
from trivium.fast.hooks import has_hooks
from trivium.fast.linear import is_fast
from trivium.kernels.hardware import can_launch, working
from trivium.models.block import StandardBlock
from trivium.parts.losses import Losses, WithLosses, merge, split, with_losses
from trivium.parts.mixers import Context
from trivium.parts.norms import LayerNorm
from trivium.parts.residual import PostConnection

_WIDEST = 4096  # of the kernel's rows


class TwoReaders:
    """The residual stream behind a post-norm as two autograd outputs: one for the next part, one for its residual.

    Both gradients reach the norm apart, and its kernel adds them.
    """

    def __init__(self) -> None:
        self._outputs: tuple[Tensor, Tensor] | None = None

    def outputs(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Both of them; `x` twice if it is not the first of those that were put here."""
        return self._outputs if self._outputs is not None and self._outputs[0] is x else (x, x)

    def put(self, residual: Tensor, part: Tensor) -> Tensor:
        """Remember both, and return the first."""
        self._outputs = residual, part
        return residual


@dataclass(kw_only=True)
class FastContext(Context):
    """`Context` with the two outputs of the last post-norm; None where a block is computed again going back."""

    readers: TwoReaders | None = None


@final
class FastBlock(StandardBlock):
    """`StandardBlock` whose post-norms have one kernel for the gradients of norm, residual and bias."""

    def forward(self, x: Tensor, ctx: Context) -> Tensor | WithLosses:
        x, losses = self.join(self.around_attention, self.attention, x, ctx)
        if self.cross is not None:
            x, more = self.join(self.around_cross, self.cross, x, ctx)
            losses = merge(losses, more)
        x, more = self.join(self.around_feedforward, self.feedforward, x, ctx)
        return with_losses(x, merge(losses, more))

    def join(self, connection: nn.Module, part: nn.Module, x: Tensor, ctx: Context) -> tuple[Tensor, Losses]:
        """The residual stream behind a part, and its losses."""
        readers = ctx.readers if isinstance(ctx, FastContext) else None
        last = _last_layer(part)
        # in float8 the compiler rounds the norm's output and its gradient: the kernel would read them once more
        fp8 = last is not None and is_fast(last) and last.fp8
        if readers is None or fp8 or not _applies(connection, x):
            return split(connection(x, lambda y: part(y, ctx)))
        from trivium.kernels import postnorm  # not above: without a GPU there is no Triton

        residual, into = readers.outputs(x)
        bias = last.bias if last is not None and is_fast(last) else None
        deferred: dict[str, Any] = {}
        if bias is not None and bias.requires_grad:
            deferred["bias_grad"] = False
        else:
            bias = None
        y, losses = split(part(into, ctx, **deferred))
        norm = connection.norm
        assert isinstance(norm, LayerNorm)
        return readers.put(*postnorm.normed(residual, y, bias, norm.weight, norm.bias, norm.eps)), losses


def is_known(block: nn.Module) -> bool:
    """Whether a block and its parts are the package's own."""
    if type(block) is not FastBlock or type(block.attention) is not FastAttention:
        return False
    if block.cross is not None and type(block.cross) is not FastAttention:
        return False
    return type(block.feedforward) is FastMlp or type(block.feedforward) is FastGlu


def _applies(connection: nn.Module, x: Tensor) -> bool:
    """Whether the kernel computes what the connection does: in training on a GPU with a bf16 residual stream."""
    if not can_launch(x) or not torch.is_grad_enabled():
        return False
    if type(connection) is not PostConnection or has_hooks(connection):
        return False
    norm = connection.norm
    if type(norm) is not LayerNorm or has_hooks(norm) or norm.weight.dtype != torch.float32:
        return False
    dropping = connection.training and (connection.dropout or connection.variational_dropout)
    return not dropping and x.dtype == working(x) == torch.bfloat16 and x.shape[-1] <= _WIDEST


def _last_layer(part: nn.Module) -> nn.Module | None:
    """The layer whose output is the part's; None if the part is not known or has hooks, which may change it."""
    if has_hooks(part):
        return None
    if type(part) is FastAttention:
        return part.out
    return part.down if type(part) is FastMlp or type(part) is FastGlu else None
