"""How a sub-layer joins the residual stream (spec: architecture §3)."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Protocol

import torch
from torch import Tensor, nn

from trivium.kernels.hardware import working
from trivium.parts.dropout import dropout
from trivium.parts.hooks import has_hooks
from trivium.parts.norms import LayerNormed

# Whether the kernel of kernels/postnorm.py makes the gradients of a norm behind a part, in training on a GPU.
FORKED = find_spec("triton") is not None
WIDEST = 4096  # of its rows


class Connection(Protocol):
    """The two ends of a sub-layer: what it reads, and how its output returns to the stream."""

    def enter(self, x: Tensor) -> Tensor: ...
    def leave(self, x: Tensor, y: Tensor) -> Tensor: ...


class PreConnection(nn.Module):
    def __init__(self, norm: nn.Module, rate: float) -> None:
        super().__init__()
        self.norm = norm
        self.dropout = rate

    def enter(self, x: Tensor) -> Tensor:
        result: Tensor = self.norm(x)
        return result

    def leave(self, x: Tensor, y: Tensor) -> Tensor:
        return x + dropout(y, self.dropout, self.training)


class Fork:
    """The stream behind a post-norm as two tensors of the same numbers: the next part reads one, the other goes past.

    So their gradients come apart to the norm, whose kernel adds them up in passing.
    """

    def __init__(self) -> None:
        self._ends: tuple[Tensor, Tensor] | None = None

    def ends(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Both of them; `x` twice if it is not the first of those that were left here."""
        return self._ends if self._ends is not None and self._ends[0] is x else (x, x)

    def put(self, past: Tensor, into: Tensor) -> Tensor:
        """Leave both here, and give back the first."""
        self._ends = past, into
        return past


class PostConnection(nn.Module):
    def __init__(self, norm: nn.Module, rate: float) -> None:
        super().__init__()
        self.norm = norm
        self.dropout = rate

    def enter(self, x: Tensor) -> Tensor:
        return x

    def leave(self, x: Tensor, y: Tensor) -> Tensor:
        result: Tensor = self.norm(x + dropout(y, self.dropout, self.training))
        return result.to(x.dtype)  # autocast makes every norm float32

    def forks(self, x: Tensor) -> bool:
        """Whether `fork` takes the place of `leave`: where gradients are made on a GPU, if it does the same.

        The stream is of bfloat16 then, the norm's weights are not, and there is neither dropout nor a hook on the norm.
        """
        if not FORKED or x.device.type != "cuda" or not torch.is_grad_enabled() or (self.training and self.dropout):
            return False
        if type(self.norm) is not LayerNormed or has_hooks(self.norm) or self.norm.weight.dtype != torch.float32:
            return False
        return x.dtype == working(x) == torch.bfloat16 and x.shape[-1] <= WIDEST

    def fork(self, x: Tensor, y: Tensor, bias: Tensor | None, fork: Fork) -> Tensor:
        """As `leave`; the gradients of the norm and of the `bias`, a constant inside `y`, are made by one kernel."""
        from trivium.kernels import postnorm  # not above: without a GPU there is no Triton

        norm = self.norm
        assert isinstance(norm, LayerNormed)
        return fork.put(*postnorm.normed(x, y, bias, norm.weight, norm.bias, norm.eps))


class SandwichConnection(nn.Module):
    def __init__(self, before: nn.Module, after: nn.Module, rate: float) -> None:
        super().__init__()
        self.norm = before
        self.after = after
        self.dropout = rate

    def enter(self, x: Tensor) -> Tensor:
        result: Tensor = self.norm(x)
        return result

    def leave(self, x: Tensor, y: Tensor) -> Tensor:
        after: Tensor = self.after(dropout(y, self.dropout, self.training))
        return x + after.to(x.dtype)
