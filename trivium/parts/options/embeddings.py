"""The settings of embeddings."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

from trivium.config import at_least, fraction, place
from trivium.parts.options.norms import NORMS, Norm
from trivium.parts.site import MOST, Cost, NoPart, Site

if TYPE_CHECKING:
    from trivium.parts.embeddings import TokenEmbedding


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
class TokenEmbeddingOptions:
    """One vector per id (and per segment), positions added by the stack, then a norm if there is one, then dropout."""

    tie: Tie = "all"
    scale: Literal["none", "root"] = "none"  # root: times sqrt(width), before positions are added (Vaswani, Marian)
    segments: int = 0  # kinds of segment, each with a vector of its own (BERT has 2)
    norm: Norm | NoPart = place({"none": NoPart, **NORMS}, NoPart())
    dropout: float = 0.0
    word_dropout: float = 0.0  # share of all ids whose vectors are zero in a training step (AWD-LSTM)
    unigram_noise: float = 0.0  # share of the tokens replaced by other tokens of the batch (Xie et al. 2017)
    variational_dropout: float = 0.0  # with one mask for all tokens of a sequence (Gal and Ghahramani, AWD-LSTM)

    def __post_init__(self) -> None:
        at_least("segments", self.segments, 0, MOST)
        fraction("dropout", self.dropout)
        for name in ("word_dropout", "unigram_noise", "variational_dropout"):
            fraction(name, getattr(self, name))

    def build(self, site: Site) -> TokenEmbedding:
        from trivium.parts.embeddings import TokenEmbedding

        return TokenEmbedding(self, site)

    def cost(self, site: Site, *, tied: bool) -> Cost:
        """`tied` where the table of tokens belongs to the other side and is counted there."""
        norm = Cost() if isinstance(self.norm, NoPart) else self.norm.cost(site)
        return Cost((0 if tied else site.vocab * site.width) + self.segments * site.width).plus(norm)


EMBEDDINGS: dict[str, type[Embedding]] = {"tokens": TokenEmbeddingOptions}
