"""The settings of heads over a whole text."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

from trivium.config import at_least
from trivium.parts.site import MOST, Cost, Site, matrix

if TYPE_CHECKING:
    from torch import nn


class Sentence(Protocol):
    """The options of a sentence head."""

    def build(self, site: Site) -> nn.Module: ...
    def cost(self, site: Site) -> Cost: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class PoolerOptions:
    """BERT's: `tanh(W h + b)` of the first state, then one score per class; 0 classes leave the pooled state alone."""

    classes: int = 2  # next-sentence prediction: class 0 means that B follows A
    activation: Literal["tanh", "relu"] = "tanh"  # relu: DistilBERT

    def __post_init__(self) -> None:
        at_least("classes", self.classes, 0, MOST)

    def build(self, site: Site) -> nn.Module:
        from trivium.parts.sentence import Pooler

        return Pooler(self, site)

    def cost(self, site: Site) -> Cost:
        dense = matrix(site.width, site.width, bias=True)
        return dense.plus(matrix(site.width, self.classes, bias=True)) if self.classes else dense


SENTENCES: dict[str, type[Sentence]] = {"pooler": PoolerOptions}
