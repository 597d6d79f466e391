"""A verdict on a whole text, read from the state of its first token (spec: models §4)."""

# B batch, T tokens, D width

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

from torch import Tensor, nn

from trivium.config import at_least
from trivium.parts.feedforward import ACTIVATIONS
from trivium.parts.linear import Linear
from trivium.parts.site import MOST, Cost, Site, matrix


class Sentence(Protocol):
    """The options of a sentence head."""

    def build(self, site: Site) -> nn.Module: ...
    def cost(self, site: Site) -> Cost: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Pooler:
    """BERT's: `tanh(W h + b)` of the first state, then one score per class; 0 classes leave the pooled state alone."""

    classes: int = 2  # next-sentence prediction: class 0 means that B follows A
    activation: Literal["tanh", "relu"] = "tanh"  # relu: DistilBERT

    def __post_init__(self) -> None:
        at_least("classes", self.classes, 0, MOST)

    def build(self, site: Site) -> nn.Module:
        return PooledSentence(self, site)

    def cost(self, site: Site) -> Cost:
        dense = matrix(site.width, site.width, bias=True)
        return dense.plus(matrix(site.width, self.classes, bias=True)) if self.classes else dense


SENTENCES: dict[str, type[Sentence]] = {"pooler": Pooler}


class PooledSentence(nn.Module):
    def __init__(self, options: Pooler, site: Site) -> None:
        super().__init__()
        self.dense = Linear(site.width, site.width, bias=True, role="pooler")
        self.activation = ACTIVATIONS[options.activation]
        self.classify = Linear(site.width, options.classes, bias=True, role="head") if options.classes else None

    def pooled(self, hidden_BTD: Tensor) -> Tensor:
        """One vector per text."""
        return self.activation(self.dense(hidden_BTD[:, 0]))

    def logits(self, hidden_BTD: Tensor) -> Tensor:
        """One score per class and text; without classes the pooled state itself."""
        pooled_BD = self.pooled(hidden_BTD)
        return pooled_BD if self.classify is None else self.classify(pooled_BD)
