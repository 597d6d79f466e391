"""What decoding asks of a model, or of several that vote: the scores of the next token of every row."""

# B rows, T new tokens, S tokens read so far, W source tokens, V vocabulary

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal, final

import torch
from torch import Tensor, nn

from trivium.errors import CheckpointError, RequestError
from trivium.generation.supports import require_decoding
from trivium.models.transformer import States, Transformer
from trivium.parts.cache import Cache


@dataclass(frozen=True, kw_only=True, slots=True)
class Prompt:
    """What a row begins with: ids to continue; behind a source, the id that a decoder is given first."""

    ids: tuple[int, ...]
    source: tuple[int, ...] = ()


@final
class Scorer:
    """One model, or several of one tokenizer that vote: the mean of their probabilities at every step.

    `slots` says whether rows are decoded in slots where they can be; "auto" is on a GPU.
    """

    def __init__(self, *models: Transformer, slots: Literal["auto", "on"] = "auto") -> None:
        first = models[0]
        for other in models[1:]:
            if other.config.family != first.config.family:
                raise RequestError(
                    f"models of different families cannot vote together: {first.config.family} and "
                    f"{other.config.family}; name models of one family"
                )
            if other.device != first.device:
                raise RequestError(f"models that vote must be on one device, not on {first.device} and {other.device}")
        self.models = models
        self.family = first.config.family
        self.context = min(model.config.context for model in models)
        self.vocab = min(model.config.vocab for model in models)
        self.device = first.device
        self.in_slots = slots == "on" or first.device.type == "cuda"

    def check(self, prompts: Sequence[Prompt], vocab: int, *, slide: bool = False) -> None:
        """Refuse what cannot be read, in a sentence."""
        if self.family == "encoder":
            raise RequestError(
                "an encoder sees both sides of every token, so it cannot continue a text; load a decoder"
            )
        require_decoding(*self.models)
        for prompt in prompts:
            if self.family == "encoder-decoder" and not prompt.source:
                raise RequestError("an encoder-decoder writes from a source text, it does not continue a prompt")
            if self.family == "decoder" and prompt.source:
                raise RequestError("a decoder continues a prompt, it has no source text; load an encoder-decoder")
            if len(prompt.source) > self.context:
                raise RequestError(
                    f"the source has {len(prompt.source)} tokens, the model reads at most {self.context}; shorten it"
                )
            if len(prompt.ids) >= self.context and not slide:
                raise RequestError(
                    f"the prompt has {len(prompt.ids)} tokens, the model's context holds {self.context} with the new "
                    "ones; shorten it, or slide to use its end only"
                )
            ids = (*prompt.ids, *prompt.source)
            if not 0 <= min(ids) <= max(ids) < vocab:
                raise RequestError(f"the prompt has ids outside the model's vocabulary of {vocab}; check the tokenizer")

    def open(self, prompts: Sequence[Prompt], room: int) -> tuple[Reading, Tensor]:
        """The prompts read together, and the scores [B, V] of what follows each; `room` more tokens may be read."""
        tokens_BT, pads_B1 = _left(prompts, self.device)
        longest = min(self.context, tokens_BT.shape[1] + room)
        reading = Reading(self, len(prompts), longest, pads_B1)
        if self.family != "encoder-decoder":
            return reading, reading.next(tokens_BT)
        return reading, reading.next(tokens_BT, *right_padded([prompt.source for prompt in prompts], self.device))


@final
class Reading:
    """Rows in the middle of being decoded: what every model has read of them."""

    def __init__(self, scorer: Scorer, rows: int, longest: int, pads_B1: Tensor | None) -> None:
        self.caches = [model.cache(rows, longest) for model in scorer.models]
        self._scorer = scorer
        self._pads_B1 = pads_B1  # padding in front of each row; None if there is none

    @property
    def length(self) -> int:
        """How many tokens were read, padding included."""
        return self.caches[0].length

    def next(self, tokens_BT: Tensor, source_BW: Tensor | None = None, real_BW: Tensor | None = None) -> Tensor:
        """Read on; the scores [B, V] of what follows the last token, float32."""
        inputs: dict[str, Tensor] = {}
        if source_BW is not None:
            inputs["source"] = source_BW
        if real_BW is not None:
            inputs["source_padding"] = real_BW
        if self._pads_B1 is not None:
            at_1S = torch.arange(self.length + tokens_BT.shape[1], device=tokens_BT.device)[None]
            inputs["positions"] = (at_1S[:, self.length :] - self._pads_B1).clamp(min=0)
            inputs["padding"] = at_1S >= self._pads_B1
        scores = [
            _scores(model, cache, tokens_BT, inputs)
            for model, cache in zip(self._scorer.models, self.caches, strict=True)
        ]
        if len(scores) == 1:
            return scores[0]
        votes = torch.stack([score_BV[:, : self._scorer.vocab].log_softmax(-1) for score_BV in scores])
        return votes.logsumexp(0) - math.log(len(scores))

    def keep(self, rows_B: Tensor) -> None:
        """Go on with these rows only, in this order; a row may be there several times."""
        for cache in self.caches:
            cache.keep(rows_B)
        if self._pads_B1 is not None:
            pads_B1 = self._pads_B1[rows_B]
            self._pads_B1 = pads_B1 if bool(pads_B1.any()) else None


def _scores(model: Transformer, cache: Cache, tokens_BT: Tensor, inputs: dict[str, Tensor]) -> Tensor:
    states: States = model(tokens_BT, cache=cache, **inputs)
    return model.head.logits(states.hidden[:, -1]).float()


def _left(prompts: Sequence[Prompt], device: torch.device) -> tuple[Tensor, Tensor | None]:
    """The ids [B, T] with padding in front, and how much each row has; without padding models take a fast path."""
    longest = max(len(prompt.ids) for prompt in prompts)
    pads = [longest - len(prompt.ids) for prompt in prompts]
    padded = [[0] * pad + list(prompt.ids) for pad, prompt in zip(pads, prompts, strict=True)]
    pads_B1 = torch.tensor(pads, device=device)[:, None] if any(pads) else None
    return torch.tensor(padded, device=device), pads_B1


def right_padded(rows: Sequence[Sequence[int]], device: torch.device) -> tuple[Tensor, Tensor | None]:
    """Rows of ids [B, W] filled up at the end, and which of them are real; None if all are."""
    longest = max(map(len, rows))
    ids_BW = torch.tensor([[*row, *[0] * (longest - len(row))] for row in rows], device=device)
    lengths_B1 = torch.tensor([len(row) for row in rows], device=device)[:, None]
    ragged = any(len(row) < longest for row in rows)
    return ids_BW, torch.arange(longest, device=device) < lengths_B1 if ragged else None


def allowed(scores_BV: Tensor, vocab: int, banned: Collection[int]) -> Tensor:
    """The scores of the ids that may be written: below `vocab`, the banned ones at minus infinity."""
    scores_BV = scores_BV[:, :vocab]
    if not banned:
        return scores_BV
    return scores_BV.index_fill(1, torch.tensor(sorted(banned), device=scores_BV.device), -math.inf)


def require_finite(best: Tensor) -> None:
    """Refuse scores that are not numbers; `best` has the highest of every row, which keeps a nan."""
    if not all(map(math.isfinite, best.flatten().tolist())):
        raise CheckpointError("the model's scores are not finite; its weights are damaged, load an older checkpoint")


@contextmanager
def evaluating(*models: nn.Module) -> Iterator[None]:
    """The models without dropout; afterwards each module is as it was."""
    training = [module for model in models for module in model.modules() if module.training]
    for module in training:
        module.training = False
    try:
        yield
    finally:
        for module in training:
            module.training = True
