"""How probable a model finds a text: every token scored exactly once (spec: evaluation §1)."""

# N tokens of the text, B windows, T tokens of a window, M positions that count, D width

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from trivium.errors import RequestError, shown
from trivium.generation.checks import require_whole
from trivium.generation.engine import evaluating
from trivium.models.transformer import Transformer
from trivium.text.tokenizer import Tokenizer

# Positions whose logits are in memory at once: 1,024 of GPT-2's 50,257 floats are 200 MB.
_POSITIONS = 1024
_TOKENS = 1 << 16  # of a forward pass on a GPU; a CPU gains nothing from more than 8 windows

Ids = Sequence[int] | Tensor | npt.NDArray[np.integer[Any]]
Precision = Literal["fp32", "bf16"]
Tick = Callable[[int, int], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class Score:
    """The negative log-likelihood of a text, with the units to divide it by; token perplexities of different
    tokenizers are not comparable, bits per byte are."""

    nll: float  # the sum, in nats
    tokens: int
    bytes: int  # of UTF-8
    words: int  # between white space; of a corpus that counts them, line ends too
    characters: int = 0
    stride: int = 0  # how far the windows were moved; 0 if one window held everything

    def __repr__(self) -> str:
        each = {"perplexity": self.perplexity, "bits_per_byte": self.bits_per_byte, "nll": self.nll}
        told = ", ".join(f"{name}={value:.4f}" for name, value in each.items())
        return f"Score({told}, tokens={self.tokens}, bytes={self.bytes})"

    @property
    def perplexity(self) -> float:
        """Per token."""
        return _exp(self.nll, self.tokens)

    @property
    def bits_per_byte(self) -> float:
        return self.nll / (math.log(2) * self.bytes) if self.bytes else math.nan

    @property
    def bits_per_character(self) -> float:
        return self.nll / (math.log(2) * self.characters) if self.characters else math.nan

    @property
    def word_perplexity(self) -> float:
        return _exp(self.nll, self.words)

    @property
    def mean(self) -> float:
        """Nats per token."""
        return self.nll / self.tokens if self.tokens else math.nan


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


class _Job(NamedTuple):
    """A window of one of the texts."""

    text: int
    window: Window

    @property
    def size(self) -> int:
        return self.window.last - self.window.first


def score_ids(
    model: Transformer,
    ids: Ids,
    *,
    end: int,
    stride: int = 0,
    batch: int = 0,
    precision: Precision = "fp32",
    tick: Tick = lambda done, of: None,
) -> Tensor:
    """The negative log-likelihood [N] of each id in nats, float32 on the CPU; the first is conditioned on `end`.

    A text longer than the context is read in windows that move by `stride` (0: by the context, so that they do not
    overlap): a smaller stride gives each token more to look back at, and costs context / stride as much. A
    memory-mapped array is read window by window.
    """
    return score_many(model, [ids], end=end, stride=stride, batch=batch, precision=precision, tick=tick)[0]


def score_many(
    model: Transformer,
    texts: Sequence[Ids],
    *,
    end: int,
    stride: int = 0,
    batch: int = 0,
    precision: Precision = "fp32",
    tick: Tick = lambda done, of: None,
) -> list[Tensor]:
    """The same of several texts, each by itself; windows of like length share a pass, `batch` of them (0: what fits).

    With "bf16" the stacks compute in bfloat16 where the device gains by it; the output part stays in float32. `tick`
    hears how many windows are done.
    """
    context = model.config.context
    if model.config.family != "decoder":
        raise RequestError(f"the likelihood of a text needs a decoder, this model is an {model.config.family}")
    require_whole("stride", stride, None, None, "0 means the context")
    if not 0 <= stride <= context:
        raise RequestError(
            f"stride: {shown(stride)} is not between 1 and the context of {context}; 0 means the context"
        )
    given = [_array(ids, model.config.vocab) for ids in texts]
    jobs = [
        _Job(text, window) for text, ids in enumerate(given) for window in windows(len(ids), context, stride or context)
    ]
    jobs.sort(key=lambda job: job.size)
    batch = batch or (8 if model.device.type == "cpu" else max(1, _TOKENS // context))
    results = [torch.empty(len(ids)) for ids in given]
    with evaluating(model), torch.inference_mode():
        for start in range(0, len(jobs), batch):
            _score(model, given, jobs[start : start + batch], end, precision, results)
            tick(min(start + batch, len(jobs)), len(jobs))
    return results


def _array(ids: Ids, vocab: int) -> npt.NDArray[np.integer[Any]]:
    """The ids as they lie in memory or in a file, checked."""
    array = ids.cpu().numpy() if isinstance(ids, Tensor) else np.asarray(ids)
    if not len(array):
        return np.empty(0, np.int64)
    if not 0 <= int(array.min()) <= int(array.max()) < vocab:
        raise RequestError(f"the text has ids outside the model's vocabulary of {vocab}")
    return array


def _score(
    model: Transformer,
    texts: Sequence[npt.NDArray[np.integer[Any]]],
    jobs: Sequence[_Job],
    end: int,
    precision: Precision,
    results: list[Tensor],
) -> None:
    """Fill in what these windows count."""
    # right padding needs no mask: causal attention never looks there
    tokens_BT = np.zeros((len(jobs), max(job.size for job in jobs)), np.int64)
    labels: list[npt.NDArray[np.integer[Any]]] = []
    for row, (text, (first, counted, last)) in enumerate(jobs):
        tokens_BT[row, 0] = texts[text][first - 1] if first else end
        tokens_BT[row, 1 : last - first] = texts[text][first : last - 1]
        labels.append(texts[text][counted:last])
    with torch.autocast(model.device.type, torch.bfloat16, enabled=precision == "bf16"):
        hidden_BTD = model(torch.from_numpy(tokens_BT).to(model.device)).hidden.to(model.embedding.weight.dtype)
    counted_MD = [hidden_BTD[row, w.counted - w.first : w.last - w.first] for row, (_, w) in enumerate(jobs)]
    hidden_MD = torch.cat(counted_MD)
    labels_M = torch.from_numpy(np.concatenate(labels).astype(np.int64)).to(model.device)
    parts = range(0, len(labels_M), _POSITIONS)
    nll = [model.head.nll(hidden_MD[at : at + _POSITIONS], labels_M[at : at + _POSITIONS]) for at in parts]
    nll_M, at = torch.cat(nll).cpu(), 0
    for text, (_, counted, last) in jobs:
        results[text][counted:last] = nll_M[at : at + last - counted]
        at += last - counted


def score_text(model: Transformer, tokenizer: Tokenizer, text: str, stride: int = 0) -> Score:
    """The score of a text as one document."""
    return score_texts(model, tokenizer, [text], stride=stride)


def score_texts(
    model: Transformer,
    tokenizer: Tokenizer,
    texts: Sequence[str],
    *,
    stride: int = 0,
    precision: Precision = "fp32",
    tick: Tick = lambda done, of: None,
) -> Score:
    """The score of several documents together, each conditioned on its own beginning only."""
    ids = tokenizer.encode_many(texts)
    tokens, longest = sum(map(len, ids)), max(map(len, ids), default=0)
    if not tokens:
        raise RequestError("there is no text to score; give at least one character")
    nll = score_many(model, ids, end=tokenizer.begin, stride=stride, precision=precision, tick=tick)
    context = model.config.context
    return Score(
        nll=math.fsum(float(each.double().sum()) for each in nll),
        tokens=tokens,
        bytes=sum(len(text.encode()) for text in texts),
        words=sum(len(text.split()) for text in texts),
        characters=sum(map(len, texts)),
        stride=0 if longest <= context else stride or context,
    )
