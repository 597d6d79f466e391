"""Two ways to read the beams of a text: as tokens of one row with a mask, or as rows of the cache that are copied.

The first copies nothing when beams change places, and the beams of a text share its prompt and its source; it needs
mixers that obey masks. The second is right for every mixer that can decode.
"""

# B texts, K beams, J beams so far (1, then K), T prompt tokens, S tokens read so far of all beams, W source tokens,
# G key/value heads, E head size, D width, V vocabulary, R rows of the cache

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import final

import torch
from torch import Tensor

from trivium.generation.scorer import Prompt, Scorer, right_padded
from trivium.models.transformer import States, Transformer
from trivium.parts.cache import Cache
from trivium.parts.losses import split
from trivium.parts.masks import Mask


@dataclass(frozen=True, kw_only=True, slots=True)
class Seen:
    """A mask for a stack: which of the tokens read so far each beam continues."""

    allowed: Tensor  # [B, K, S]
    at: Tensor  # [1 or B, K] positions of the queries
    keys_at: Tensor  # [B, S] and of all that was read

    def within(self, window: int) -> Seen:
        """The same for a layer that sees only so far; 0 means no limit."""
        if not window:
            return self
        near_BKS = self.at[:, :, None] - self.keys_at[:, None] < window
        return replace(self, allowed=self.allowed & near_BKS)

    def real(self, queries: int) -> Tensor | None:
        return None

    def dense(self, queries: int, keys: int, device: torch.device) -> Tensor:
        return self.allowed[:, None]


@final
class RowBeams:
    """As `Lineage`, except that a beam is a row of the cache, and rows are copied when beams change places.

    The prompts must be equally long.
    """

    def __init__(self, scorer: Scorer, prompts: Sequence[Prompt], beams: int, room: int) -> None:
        """Read the prompts; up to `room` steps may follow."""
        self._reading, scores_BV = scorer.open(prompts, room)
        self._beams, self._each = beams, 1
        self._rows_R = torch.arange(len(prompts), device=scorer.device)
        self.scores_BJV = scores_BV[:, None]

    def next(self, ids_BK: Tensor, parents_BK: Tensor) -> None:
        first_B1 = self._each * torch.arange(len(ids_BK), device=ids_BK.device)[:, None]
        self._reading.keep(self._rows_R[(first_B1 + parents_BK).flatten()])
        scores_RV = self._reading.next(ids_BK.reshape(-1, 1))
        self._each = self._beams
        self._rows_R = torch.arange(len(scores_RV), device=ids_BK.device)
        self.scores_BJV = scores_RV.view(*ids_BK.shape, -1)

    def keep(self, rows_B: Tensor) -> None:
        self._rows_R = self._rows_R.view(-1, self._each)[rows_B].flatten()  # the cache follows with the next token

    def last(self, x_RTD: Tensor) -> Tensor:
        """Of what a layer has just made of new tokens that which something follows, [B, J, D]."""
        return x_RTD[:, -1].reshape(-1, self._each, x_RTD.shape[2])

    def source(self, model: int) -> tuple[Tensor, Tensor | None]:
        cache = self._reading.caches[model]
        across = cache.layers[-1].across
        assert across is not None
        padding = cache.memory_padding
        return across[0][:: self._each], None if padding is None else padding[:: self._each]


@final
class Lineage:
    """Texts in the middle of a beam search: what every model has read of their beams."""

    def __init__(self, scorer: Scorer, prompts: Sequence[Prompt], beams: int, room: int) -> None:
        """Read the prompts; up to `room` steps of `beams` tokens may follow. `scores_BJV` says what does, J = 1."""
        device = scorer.device
        tokens_BT, real_BT = right_padded([prompt.ids for prompt in prompts], device)
        longest = tokens_BT.shape[1]
        self.scorer = scorer
        self.beams = beams
        self.caches = [model.cache(len(prompts), longest + room * beams) for model in scorer.models]
        self.eye_KK = torch.eye(beams, dtype=torch.bool, device=device)
        self.at_B1 = torch.tensor([[len(prompt.ids)] for prompt in prompts], device=device)  # of the next token
        self.even = real_BT is None  # whether that is the same for all
        self.seen_BKS = torch.ones_like(tokens_BT, dtype=torch.bool)[:, None]
        inputs: dict[str, Tensor] = {}
        if real_BT is not None:
            self.seen_BKS, inputs["padding"] = real_BT[:, None], real_BT
        if scorer.family == "encoder-decoder":
            source_BW, real_BW = right_padded([prompt.source for prompt in prompts], device)
            inputs["source"] = source_BW
            if real_BW is not None:
                inputs["source_padding"] = real_BW
        self.ends_B1: Tensor | None = self.at_B1 - 1  # where the prompts end; None once beams were read
        scores = []
        for model, cache in zip(scorer.models, self.caches, strict=True):
            states: States = model(tokens_BT, cache=cache, **inputs)
            scores.append(model.head.logits(self.last(states.hidden)).float())
        self.scores_BJV = vote(scores, scorer.vocab)

    def source(self, model: int) -> tuple[Tensor, Tensor | None]:
        """The keys [B, G, W, E] of the source in a model's last layer, and which of the W are real [B, W]."""
        across = self.caches[model].layers[-1].across
        assert across is not None
        return across[0], self.caches[model].memory_padding

    def last(self, x_BTD: Tensor) -> Tensor:
        """Of the tokens that were just read those that something follows: the end of each prompt, or all beams."""
        if self.ends_B1 is None:
            return x_BTD
        return x_BTD.gather(1, self.ends_B1[:, :, None].expand(-1, -1, x_BTD.shape[2]))

    def next(self, ids_BK: Tensor, parents_BK: Tensor) -> None:
        """Read a token for each beam, behind the beam that it continues; `scores_BJV` says what follows, J = K."""
        read = self.seen_BKS.shape[2]
        seen_BKS = self.seen_BKS.gather(1, parents_BK[:, :, None].expand(-1, -1, read))
        self.seen_BKS = torch.cat((seen_BKS, self.eye_KK.expand(len(ids_BK), -1, -1)), 2)
        at_BK = (self.at_B1[:1] if self.even else self.at_B1).expand(-1, self.beams)
        scores = [
            read_beams(model, cache, ids_BK, at_BK, self.seen_BKS)
            for model, cache in zip(self.scorer.models, self.caches, strict=True)
        ]
        # a text that is done is read on until it leaves, at the end of the context at most
        self.at_B1, self.ends_B1 = (self.at_B1 + 1).clamp(max=self.scorer.context - 1), None
        self.scores_BJV = vote(scores, self.scorer.vocab)

    def keep(self, rows_B: Tensor) -> None:
        """Go on with these texts only."""
        for cache in self.caches:
            cache.keep(rows_B)
        self.seen_BKS = self.seen_BKS[rows_B]
        self.at_B1 = self.at_B1[rows_B]


BeamReader = Lineage | RowBeams


def read_beams(model: Transformer, cache: Cache, ids_BK: Tensor, at_BK: Tensor, seen_BKS: Tensor) -> Tensor:
    """The scores [B, K, V] of what follows each beam, float32; `at` is where their new tokens stand, [1 or B, K]."""
    side = model.decoder
    assert side is not None
    x_BKD = model.embedding(ids_BK, None, lambda x: side.embed(x, at_BK))
    keys_at_BS = cache.positions.narrow(1, 0, seen_BKS.shape[2])  # filled by the stack before it looks at the mask
    seen = Seen(allowed=seen_BKS, at=at_BK, keys_at=keys_at_BS)
    across = Mask(padding=cache.memory_padding)
    hidden_BKD, _ = split(side(x_BKD, at_BK, seen, cache, cache.memory, across))
    return model.head.logits(hidden_BKD).float()


def vote(scores: Sequence[Tensor], vocab: int) -> Tensor:
    """The scores of one model as they are; of several the logarithm of the mean of their probabilities."""
    if len(scores) == 1:
        return scores[0]
    votes = torch.stack([score[..., :vocab].log_softmax(-1) for score in scores])
    return votes.logsumexp(0) - math.log(len(scores))
