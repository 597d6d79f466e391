"""A verdict on a whole text, read from the state of its first token (spec: models §4)."""

# B batch, T tokens, D width

from __future__ import annotations

from torch import Tensor, nn

from trivium.parts.activations import ACTIVATIONS
from trivium.parts.linear import Linear
from trivium.parts.options.sentence import Pooler
from trivium.parts.site import Site


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
