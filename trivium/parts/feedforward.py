"""The position-wise network of a block (spec: architecture §4)."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trivium.kernels import fp8, rectify
from trivium.kernels.eager import SquaredRelu, wanted
from trivium.kernels.hardware import working
from trivium.parts.dropout import dropout, locked
from trivium.parts.linear import Linear, in_float8, is_plain, lending, matrix_of, product, together
from trivium.parts.options.feedforward import Activation, Glu, Mlp
from trivium.parts.site import Site


def squared_relu(x: Tensor) -> Tensor:
    """`relu(x)²`."""
    result: Tensor = SquaredRelu.apply(x) if wanted(x) else F.relu(x).square()  # type: ignore[no-untyped-call]
    return result


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "gelu": F.gelu,  # erf: BERT, RoBERTa, BART
    "gelu-tanh": lambda x: F.gelu(x, approximate="tanh"),  # GPT-1/2, T5 v1.1; differs by up to 4.7e-4
    "silu": F.silu,
    "relu2": squared_relu,
    "elu": F.elu,
    "selu": F.selu,
    "sigmoid": torch.sigmoid,  # as a gate: the original GLU
    "tanh": torch.tanh,
    "softplus": F.softplus,
    "identity": lambda x: x,  # as a gate: bilinear, LiGLU
}
# Whether the kernels of kernels/bend.py take the place of the compiler's in training on a GPU, and for which of these;
# a ReLU is better off inside the product before it (kernels/rectify.py).
BEND = find_spec("triton") is not None
BENT: tuple[Activation, ...] = ("gelu", "gelu-tanh", "silu", "relu2")


class MlpFeedForward(nn.Module):
    def __init__(self, options: Mlp, site: Site) -> None:
        super().__init__()
        size = options.size(site)
        self.up = Linear(site.width, size, bias=options.bias, role="up")
        self.down = Linear(size, site.width, bias=options.bias, role="down")
        self.activation = ACTIVATIONS[options.activation]
        self.bent = options.activation if options.activation in BENT else ""
        self.rectified = options.activation == "relu" and rectify.ABLE
        self.dropout, self.lock = options.dropout, options.lock

    @property
    def products(self) -> list[tuple[Linear, ...]]:
        return [(self.up,), (self.down,)]

    @property
    def writer(self) -> nn.Module:
        """The last layer, behind which nothing is done to its output."""
        return self.down

    def forward(self, x: Tensor, lend: bool = False) -> Tensor:
        """With `lend` the bias of the last layer is a constant."""
        if self.bent and _narrow(x, self.up):
            made = fp8.hidden8(x, matrix_of(x, self.up), self.up.bias, self.bent, working(x))
            return _down(self, *made, lend=lend)
        if self.bent and _by_kernel(x, self.up):
            hidden = _bent(x, matrix_of(x, self.up), self.up.bias, self.bent)
        elif self.rectified and _by_kernel(x, self.up):
            hidden = rectify.rectified(x, matrix_of(x, self.up), self.up.bias, torch.bfloat16)
        else:
            hidden = self.activation(self.up(x))
        return _down(self, hidden, lend=lend)


class GluFeedForward(nn.Module):
    def __init__(self, options: Glu, site: Site) -> None:
        super().__init__()
        size = options.size(site)
        self.gate = Linear(site.width, size, bias=options.bias, role="gate")
        self.up = Linear(site.width, size, bias=options.bias, role="up")
        self.down = Linear(size, site.width, bias=options.bias, role="down")
        self.activation = ACTIVATIONS[options.activation]
        self.bent = options.activation if options.activation in BENT else ""
        self.dropout, self.lock = options.dropout, options.lock

    @property
    def products(self) -> list[tuple[Linear, ...]]:
        return [(self.gate, self.up), (self.down,)]

    @property
    def writer(self) -> nn.Module:
        """The last layer, behind which nothing is done to its output."""
        return self.down

    def forward(self, x: Tensor, lend: bool = False) -> Tensor:
        """With `lend` the bias of the last layer is a constant."""
        narrow = _narrow(x, self.gate, self.up)
        if not self.bent or not (narrow or _by_kernel(x, self.gate, self.up)):
            gate, up = together(x, self.gate, self.up)
            return _down(self, self.activation(gate) * up, lend=lend)
        weight = matrix_of(x, self.gate, self.up)
        bias = None if self.up.bias is None else torch.cat((self.gate.bias, self.up.bias))
        if narrow:
            return _down(self, *fp8.hidden8(x, weight, bias, self.bent, working(x), gated=True), lend=lend)
        return _down(self, _bent(x, weight, bias, self.bent, gated=True), lend=lend)


def _down(
    part: MlpFeedForward | GluFeedForward, hidden: Tensor, rounded: fp8.Scaled | None = None, *, lend: bool = False
) -> Tensor:
    """What a network makes of its hidden layer, the rows of which may be `rounded` already for products in float8."""
    down = part.down
    whole = not part.training or not (part.dropout or part.lock)
    if rounded is not None and whole and _narrow(hidden, down):
        bias = down.bias.detach() if lend else down.bias
        return fp8.product8(hidden, matrix_of(hidden, down), bias, hidden.dtype, rounded)
    kept = dropout(locked(hidden, part.lock, part.training), part.dropout, part.training)
    result: Tensor = lending(down, kept) if lend else down(kept)
    return result


def _narrow(x: Tensor, *layers: nn.Module) -> bool:
    """Whether one product in float8 does for these layers."""
    plain = [layer for layer in layers if is_plain(layer) and layer.narrow]
    return len(plain) == len(layers) and in_float8(x, sum(layer.out_features for layer in plain))


def _by_kernel(x: Tensor, *layers: nn.Module) -> bool:
    """Whether these layers go with the kernels: in training on a GPU in bfloat16, by their own plain products."""
    if not BEND or x.device.type != "cuda" or not torch.is_grad_enabled():
        return False
    return working(x) == torch.bfloat16 and all(is_plain(layer) and not layer.narrow for layer in layers)


def _bent(x: Tensor, weight: Tensor, bias: Tensor | None, activation: str, *, gated: bool = False) -> Tensor:
    """The hidden layer by the kernels: for the product the bias is a constant, and its gradient is theirs."""
    from trivium.kernels import bend  # not above: there is no Triton for a CPU

    return bend.bent(product(x, weight, None if bias is None else bias.detach()), bias, activation, gated=gated)
