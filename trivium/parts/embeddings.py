"""From ids to vectors (spec: architecture §5)."""

# B batch, T tokens, D width, V vocabulary

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, Protocol, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trivium.config import at_least, fraction, place
from trivium.errors import RequestError
from trivium.parts.dropout import dropout, locked
from trivium.parts.norms import NORMS, Norm
from trivium.parts.site import MOST, Cost, NoPart, Site

# Which of the three matrices are one: the encoder's input, the decoder's input, the output. A model with one side has
# only two of them, so that `all` and `output` say the same there, and so do `inputs` and `none`.
Tie = Literal["all", "inputs", "output", "none"]


class Embedding(Protocol):
    """The options of an embedding; `tie` says which other matrices are the same."""

    @property
    def tie(self) -> Tie: ...
    def build(self, site: Site) -> TokenEmbedding: ...
    def cost(self, site: Site, *, tied: bool) -> Cost: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Tokens:
    """One vector per id (and per segment), positions added by the stack, then a norm if there is one, then dropout."""

    tie: Tie = "all"
    scale: Literal["none", "root"] = "none"  # root: times sqrt(width), before positions are added (Vaswani, Marian)
    segments: int = 0  # kinds of segment, each with a vector of its own (BERT has 2)
    norm: Norm | NoPart = place({"none": NoPart, **NORMS}, NoPart())
    dropout: float = 0.0
    omit: float = 0.0  # share of all ids whose vectors a training step reads as zeros (Gal and Ghahramani, AWD-LSTM)
    swap: float = 0.0  # share of the places that read another id of the same batch (unigram noise, Xie et al. 2017)
    lock: float = 0.0  # share of the features that a row loses in all of its places (variational dropout, AWD-LSTM)

    def __post_init__(self) -> None:
        at_least("segments", self.segments, 0, MOST)
        fraction("dropout", self.dropout)
        for name in ("omit", "swap", "lock"):
            fraction(name, getattr(self, name))

    def build(self, site: Site) -> TokenEmbedding:
        return TokenEmbedding(self, site)

    def cost(self, site: Site, *, tied: bool) -> Cost:
        """`tied` where the table of tokens belongs to the other side and is counted there."""
        norm = Cost() if isinstance(self.norm, NoPart) else self.norm.cost(site)
        return Cost((0 if tied else site.vocab * site.width) + self.segments * site.width).plus(norm)


EMBEDDINGS: dict[str, type[Embedding]] = {"tokens": Tokens}


class TokenEmbedding(nn.Module):
    tables = {"weight": "embedding", "segments": "embedding"}  # noqa: RUF012 - read by init and optimizers, never written

    def __init__(self, options: Tokens, site: Site) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(site.vocab, site.width))
        self.segments = nn.Parameter(torch.empty(options.segments, site.width)) if options.segments else None
        self.norm = None if isinstance(options.norm, NoPart) else options.norm.build(site)
        self.scale = math.sqrt(site.width) if options.scale == "root" else 1.0
        self.dropout, self.omit, self.swap, self.lock = options.dropout, options.omit, options.swap, options.lock

    def enter(self, tokens_BT: Tensor, segments_BT: Tensor | None = None) -> Tensor:
        """The vectors of these ids, before positions; without `segments` all tokens are of segment 0."""
        if self.training and self.swap:
            tokens_BT = _swapped(tokens_BT, self.swap)
        x_BTD = F.embedding(tokens_BT, self.weight)
        if self.training and self.omit:  # drawn per id, not per place: an omitted word is missing wherever it stands
            kept_V1 = dropout(x_BTD.new_ones(len(self.weight), 1), self.omit, True)
            x_BTD = x_BTD * F.embedding(tokens_BT, kept_V1)
        if self.scale != 1.0:
            x_BTD = x_BTD * self.scale
        if self.segments is None:
            if segments_BT is not None:
                raise RequestError("this model has no segments: leave segments= out")
            return x_BTD
        return x_BTD + (self.segments[0] if segments_BT is None else F.embedding(segments_BT, self.segments))

    def leave(self, x_BTD: Tensor) -> Tensor:
        """What the first block reads: after positions were added."""
        x_BTD = x_BTD if self.norm is None else cast(Tensor, self.norm(x_BTD))
        return dropout(locked(x_BTD, self.lock, self.training), self.dropout, self.training)


def _swapped(tokens_BT: Tensor, share: float) -> Tensor:
    """The ids, a share of them drawn anew from all of the batch: as frequent words as the text's own."""
    drawn_BT = torch.randint(tokens_BT.numel(), tokens_BT.shape, device=tokens_BT.device)
    chosen_BT = torch.rand(tokens_BT.shape, device=tokens_BT.device) < share
    return torch.where(chosen_BT, tokens_BT.flatten()[drawn_BT], tokens_BT)
