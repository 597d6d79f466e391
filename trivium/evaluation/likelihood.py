"""How probable a model finds a text: every token scored exactly once (spec: evaluation §1)."""

# N tokens of the text, B windows, T tokens of a window, M positions that count, D width

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from trivium.errors import RequestError
from trivium.generation.engine import evaluating
from trivium.models.transformer import Transformer
from trivium.text.tokenizer import Tokenizer

# Positions whose logits are in memory at once: 1,024 of GPT-2's 50,257 floats are 200 MB.
_POSITIONS = 1024


@dataclass(frozen=True, kw_only=True, slots=True)
class Score:
    """The negative log-likelihood of a text, with the units to divide it by; token perplexities of different
    tokenizers are not comparable, bits per byte are."""

    nll: float  # the sum, in nats
    tokens: int
    bytes: int  # of UTF-8
    words: int  # between white space
    stride: int = 0  # how far the windows were moved; 0 if one window held everything

    @property
    def perplexity(self) -> float:
        """Per token."""
        return _exp(self.nll, self.tokens)

    @property
    def bits_per_byte(self) -> float:
        return self.nll / (math.log(2) * self.bytes) if self.bytes else math.nan

    @property
    def word_perplexity(self) -> float:
        return _exp(self.nll, self.words)


def _exp(nll: float, count: int) -> float:
    if not count:
        return math.nan
    mean = nll / count
    return math.exp(mean) if mean < 709 else math.inf  # where a double ends


class Window(NamedTuple):
    """Tokens first..last are read; those from `counted` on are scored."""

    first: int
    counted: int
    last: int  # exclusive


def windows(length: int, context: int, stride: int) -> Iterator[Window]:
    """Windows of at most `context`, `stride` apart: the first counts all of itself, each later one what is new."""
    done = 0
    for first in range(0, length, stride):
        last = min(first + context, length)
        yield Window(first, done, last)
        done = last
        if done == length:
            return


def score_ids(model: Transformer, ids: Sequence[int] | Tensor, *, end: int, stride: int = 0, batch: int = 8) -> Tensor:
    """The negative log-likelihood [N] of each id in nats, float32 on the CPU; the first is conditioned on `end`.

    A text longer than the context is read in windows that move by `stride` (0: by the context, so that they do not
    overlap): a smaller stride gives each token more to look back at, and costs context / stride as much.
    """
    context = model.config.context
    if model.config.family != "decoder":
        raise RequestError(f"the likelihood of a text needs a decoder, this model is an {model.config.family}")
    if not 0 <= stride <= context:
        raise RequestError(f"stride: {stride} is not between 1 and the context of {context}; 0 means the context")
    labels_N = torch.as_tensor(ids, dtype=torch.long).cpu()
    if len(labels_N) and not 0 <= int(labels_N.min()) <= int(labels_N.max()) < model.config.vocab:
        raise RequestError(f"the text has ids outside the model's vocabulary of {model.config.vocab}")
    inputs_N = torch.cat((torch.tensor([end]), labels_N[:-1]))
    plan = list(windows(len(labels_N), context, stride or context))
    nll_N = torch.empty(len(labels_N))
    with evaluating(model), torch.inference_mode():
        for start in range(0, len(plan), batch):
            _score(model, inputs_N, labels_N, plan[start : start + batch], nll_N)
    return nll_N


def _score(model: Transformer, inputs_N: Tensor, labels_N: Tensor, plan: list[Window], nll_N: Tensor) -> None:
    """Fill in what these windows count."""
    longest = max(window.last - window.first for window in plan)
    # right padding needs no mask: causal attention never looks there
    tokens_BT = torch.zeros(len(plan), longest, dtype=torch.long)
    for row, (first, _, last) in enumerate(plan):
        tokens_BT[row, : last - first] = inputs_N[first:last]
    hidden_BTD = model(tokens_BT.to(model.device)).hidden
    hidden_MD = torch.cat([hidden_BTD[row, w.counted - w.first : w.last - w.first] for row, w in enumerate(plan)])
    # windows follow each other, so what they count is one piece of the text
    labels_M = labels_N[plan[0].counted : plan[-1].last].to(model.device)
    nll_M = nll_N[plan[0].counted : plan[-1].last]
    for start in range(0, len(labels_M), _POSITIONS):
        part = slice(start, start + _POSITIONS)
        nll_M[part] = model.head.nll(hidden_MD[part], labels_M[part]).cpu()


def score_text(model: Transformer, tokenizer: Tokenizer, text: str, stride: int = 0) -> Score:
    """The score of a text as one document."""
    ids = tokenizer.encode(text)
    if not ids:
        raise RequestError("there is no text to score; give at least one character")
    nll_N = score_ids(model, ids, end=tokenizer.end, stride=stride)
    context = model.config.context
    return Score(
        nll=float(nll_N.double().sum()),
        tokens=len(ids),
        bytes=len(text.encode()),
        words=len(text.split()),
        stride=0 if len(ids) <= context else stride or context,
    )
