"""A verdict on a whole text, read from the state of its first token (spec: models §4)."""

# B batch, T tokens, D width

from __future__ import annotations

from torch import Tensor, nn

from trivium.parts.activations import ACTIVATIONS
from trivium.parts.linear import Linear
from trivium.parts.options.sentence import PoolerOptions
from trivium.parts.site import Site


class Pooler(nn.Module):
    """`act(hidden₀ W + b) C + c`: classes read from the first state (BERT's pooler, Devlin et al. 2019)."""

    def __init__(self, options: PoolerOptions, site: Site) -> None:
        super().__init__()
        self.dense = Linear(site.width, site.width, bias=True, role="pooler")
        self.activation = ACTIVATIONS[options.activation]
        self.classify = Linear(site.width, options.classes, bias=True, role="head") if options.classes else None

    def forward(self, hidden_BTD: Tensor, classify: bool = True) -> Tensor:
        """One score per class and text; without classes the pooled state itself, one vector per text."""
        pooled_BD = self.activation(self.dense(hidden_BTD[:, 0]))
        return self.classify(pooled_BD) if classify and self.classify is not None else pooled_BD

    def pooled(self, hidden_BTD: Tensor) -> Tensor:
        """One vector per text."""
        result: Tensor = self(hidden_BTD, classify=False)
        return result

    def logits(self, hidden_BTD: Tensor) -> Tensor:
        """One score per class and text; without classes the pooled state itself."""
        result: Tensor = self(hidden_BTD)
        return result
