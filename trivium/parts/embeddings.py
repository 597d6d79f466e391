"""From ids to vectors (spec: architecture §5)."""

# B batch, T tokens, D width, V vocabulary

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import ClassVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trivium.errors import RequestError
from trivium.parts.declared import EMBEDDING, Declared
from trivium.parts.dropout import dropout
from trivium.parts.options.embeddings import TokenEmbeddingOptions
from trivium.parts.site import NoPart, Site


class TokenEmbedding(nn.Module):
    """A trained vector for each id, by option scaled, with segments, normed: [B, T] to [B, T, D]."""

    declares: ClassVar[Mapping[str, Declared]] = {"weight": EMBEDDING, "segments": EMBEDDING}

    def __init__(self, options: TokenEmbeddingOptions, site: Site) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(site.vocab, site.width))
        self.segments = nn.Parameter(torch.empty(options.segments, site.width)) if options.segments else None
        self.norm = None if isinstance(options.norm, NoPart) else options.norm.build(site)
        self.scale = math.sqrt(site.width) if options.scale == "root" else 1.0
        self.dropout, self.variational_dropout = options.dropout, options.variational_dropout
        self.word_dropout, self.unigram_noise = options.word_dropout, options.unigram_noise

    def forward(
        self,
        tokens_BT: Tensor,
        segments_BT: Tensor | None = None,
        add_positions: Callable[[Tensor], Tensor] = lambda x: x,
    ) -> Tensor:
        """The input of the first block: vectors, positions added, then norm and dropout."""
        x_BTD = add_positions(self.enter(tokens_BT, segments_BT))
        x_BTD = x_BTD if self.norm is None else cast(Tensor, self.norm(x_BTD))
        return dropout(x_BTD, self.dropout, self.training, variational=self.variational_dropout)

    def enter(self, tokens_BT: Tensor, segments_BT: Tensor | None = None) -> Tensor:
        """The vectors of these ids, before positions; without `segments` all tokens are of segment 0."""
        if self.training and self.unigram_noise:
            tokens_BT = _with_unigram_noise(tokens_BT, self.unigram_noise)
        x_BTD = F.embedding(tokens_BT, self.weight)
        if self.training and self.word_dropout:  # drawn per id: a dropped word is zero wherever it stands
            kept_V1 = dropout(x_BTD.new_ones(len(self.weight), 1), self.word_dropout, True)
            x_BTD = x_BTD * F.embedding(tokens_BT, kept_V1)
        if self.scale != 1.0:
            x_BTD = x_BTD * self.scale
        if self.segments is None:
            if segments_BT is not None:
                raise RequestError("this model has no segments: leave segments= out")
            return x_BTD
        return x_BTD + (self.segments[0] if segments_BT is None else F.embedding(segments_BT, self.segments))


def _with_unigram_noise(tokens_BT: Tensor, share: float) -> Tensor:
    """The ids, a share of them replaced by draws from the ids of the batch, which are as frequent as in the text."""
    drawn_BT = torch.randint(tokens_BT.numel(), tokens_BT.shape, device=tokens_BT.device)
    chosen_BT = torch.rand(tokens_BT.shape, device=tokens_BT.device) < share
    return torch.where(chosen_BT, tokens_BT.flatten()[drawn_BT], tokens_BT)
