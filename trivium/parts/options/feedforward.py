"""The settings of feed-forward networks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

from trivium.config import at_least, fraction
from trivium.errors import ConfigError
from trivium.parts.site import MOST, Cost, Site, matrix

if TYPE_CHECKING:
    from torch import nn


Activation = Literal[
    "relu", "gelu", "gelu-tanh", "silu", "relu2", "elu", "selu", "sigmoid", "tanh", "softplus", "identity"
]


class FeedForward(Protocol):
    """The options of a feed-forward part."""

    def build(self, site: Site) -> nn.Module: ...
    def cost(self, site: Site) -> Cost: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class MlpOptions:
    """Two matrices with an activation between them, and none after the second."""

    hidden: int = 0  # 0 means 4 x width
    activation: Activation = "gelu-tanh"
    bias: bool = True
    dropout: float = 0.0  # of the hidden layer
    variational_dropout: float = 0.0  # of the hidden layer, with one mask for all tokens of a sequence

    def __post_init__(self) -> None:
        _check(self.hidden, self.dropout, self.variational_dropout)

    def size(self, site: Site) -> int:
        return self.hidden or 4 * site.width

    def build(self, site: Site) -> nn.Module:
        from trivium.parts.feedforward import MlpFeedForward

        return MlpFeedForward(self, site)

    def cost(self, site: Site) -> Cost:
        size = self.size(site)
        both = matrix(site.width, size, bias=self.bias).plus(matrix(size, site.width, bias=self.bias))
        return both.plus(Cost(kept=site.width + 2 * size))  # before and after the activation


@dataclass(frozen=True, kw_only=True, slots=True)
class GluOptions:
    """A gated network: `(act(x W_gate) * x W_up) W_down`; SiLU makes it SwiGLU, GELU GeGLU, a sigmoid the first GLU."""

    hidden: int = 0  # 0 means LLaMA's rule: 8/3 x width, rounded up to a multiple
    multiple: int = 256
    activation: Activation = "silu"
    bias: bool = False
    dropout: float = 0.0
    variational_dropout: float = 0.0

    def __post_init__(self) -> None:
        _check(self.hidden, self.dropout, self.variational_dropout)
        if self.multiple < 1:
            raise ConfigError(f"multiple: {self.multiple} is less than 1")

    def size(self, site: Site) -> int:
        return self.hidden or -(-int(8 * site.width / 3) // self.multiple) * self.multiple

    def build(self, site: Site) -> nn.Module:
        from trivium.parts.feedforward import GluFeedForward

        return GluFeedForward(self, site)

    def cost(self, site: Site) -> Cost:
        size = self.size(site)
        up = matrix(site.width, size, bias=self.bias)
        return up.plus(up).plus(matrix(size, site.width, bias=self.bias)).plus(Cost(kept=site.width + 3 * size))


FEEDFORWARDS: dict[str, type[FeedForward]] = {"mlp": MlpOptions, "glu": GluOptions}


def _check(hidden: int, dropout: float, variational_dropout: float) -> None:
    if hidden < 0:
        raise ConfigError(f"hidden: {hidden} is negative; 0 means the usual size")
    at_least("hidden", hidden, 0, MOST)
    fraction("dropout", dropout)
    fraction("variational_dropout", variational_dropout)
