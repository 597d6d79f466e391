"""The settings of outputs over the vocabulary."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

from trivium.config import fraction, place
from trivium.errors import ConfigError
from trivium.parts.options.feedforward import Activation
from trivium.parts.options.norms import NORMS, LayerNormOptions, Norm
from trivium.parts.site import Cost, Site, matrix

if TYPE_CHECKING:
    from torch import nn


class Output(Protocol):
    """The options of an output part; `tied` is the embedding matrix to share, or None."""

    def build(self, site: Site, tied: nn.Parameter | None) -> nn.Module: ...
    def cost(self, site: Site, *, tied: bool) -> Cost: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class SoftmaxOptions:
    """One matrix and a softmax over the vocabulary; `cap` > 0 bounds logits by `cap * tanh(logits / cap)`."""

    cap: float = 0.0
    scale: Literal["none", "root"] = "none"  # root: states divided by sqrt(width) before the matrix (T5 when tied)
    bias: bool = False
    fixed: bool = False  # the bias is a buffer: loaded and saved, but no parameter and not trained (BART, Marian)
    dropout: float = 0.0  # of the states before the matrix

    def __post_init__(self) -> None:
        fraction("dropout", self.dropout)
        if self.cap < 0:
            raise ConfigError(f"cap: {self.cap} is negative; 0 means no cap")
        if self.fixed and not self.bias:
            raise ConfigError("fixed: there is no bias to keep fixed; set bias to true")

    def build(self, site: Site, tied: nn.Parameter | None) -> nn.Module:
        from trivium.parts.output import SoftmaxOutput

        return SoftmaxOutput(self, site, tied)

    def cost(self, site: Site, *, tied: bool) -> Cost:
        whole = matrix(site.width, site.vocab)
        learned = self.bias and not self.fixed
        parameters = (0 if tied else whole.parameters) + (site.vocab if learned else 0)
        return Cost(parameters, whole.flops, kept=site.width)  # logits are made and forgotten in chunks


@dataclass(frozen=True, kw_only=True, slots=True)
class MaskedOutputOptions:
    """BERT's head: a linear layer, an activation and a norm before the matrix over the vocabulary and its bias."""

    activation: Activation = "gelu"
    norm: Norm = place(NORMS, LayerNormOptions(eps=1e-12))

    def build(self, site: Site, tied: nn.Parameter | None) -> nn.Module:
        from trivium.parts.output import MaskedOutput

        return MaskedOutput(self, site, tied)

    def cost(self, site: Site, *, tied: bool) -> Cost:
        inner = matrix(site.width, site.width, bias=True).plus(self.norm.cost(site))
        return inner.plus(SoftmaxOptions(bias=True).cost(site, tied=tied))


@dataclass(frozen=True, kw_only=True, slots=True)
class NoOutputOptions:
    """No vocabulary to choose from: an encoder of sentences, or one that only tells classes apart."""

    def build(self, site: Site, tied: nn.Parameter | None) -> nn.Module:
        from trivium.parts.output import NoOutput

        return NoOutput()

    def cost(self, site: Site, *, tied: bool) -> Cost:
        return Cost()


OUTPUTS: dict[str, type[Output]] = {"softmax": SoftmaxOptions, "masked": MaskedOutputOptions, "none": NoOutputOptions}
