"""From ids to vectors (spec: architecture §5)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trivium.config import fraction
from trivium.parts.dropout import dropout
from trivium.parts.site import Cost, Site


class Embedding(Protocol):
    """The options of an embedding; `tie` says whether the output reads the same matrix."""

    @property
    def tie(self) -> Literal["output", "none"]: ...
    def build(self, site: Site) -> TokenEmbedding: ...
    def cost(self, site: Site) -> Cost: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Tokens:
    """One vector per id; positions are added by the stack, then dropout."""

    tie: Literal["output", "none"] = "output"
    dropout: float = 0.0

    def __post_init__(self) -> None:
        fraction("dropout", self.dropout)

    def build(self, site: Site) -> TokenEmbedding:
        return TokenEmbedding(site.vocab, site.width, self.dropout)

    def cost(self, site: Site) -> Cost:
        return Cost(site.vocab * site.width)


EMBEDDINGS: dict[str, type[Embedding]] = {"tokens": Tokens}


class TokenEmbedding(nn.Module):
    def __init__(self, vocab: int, width: int, rate: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocab, width))
        self.dropout = rate

    def enter(self, tokens: Tensor) -> Tensor:
        """The vectors of these ids, before positions."""
        return F.embedding(tokens, self.weight)

    def leave(self, x: Tensor) -> Tensor:
        """What the first block reads: after positions were added."""
        return dropout(x, self.dropout, self.training)
