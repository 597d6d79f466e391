"""Texts and words as vectors, and which of them lie near each other (spec: inspection §3)."""

# N texts or candidates, Q queries, B texts of a batch, T tokens, P pieces of a word, D width

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from trivium.errors import RequestError
from trivium.generation.checks import require_whole, texts_of
from trivium.generation.states import frame_of, framed, is_plain, read
from trivium.models.transformer import Transformer
from trivium.parts.sharded import whole
from trivium.text.tokenizer import Tokenizer

Pooling = Literal["mean", "cls"]


class Neighbour(str):
    """Something that lies near: a string that knows its similarity, the cosine, and its number among the candidates."""

    similarity: float
    number: int

    def __new__(cls, text: str, *, similarity: float, number: int) -> Neighbour:
        self = super().__new__(cls, text)
        self.similarity = similarity
        self.number = number
        return self


def embed(
    model: Transformer,
    tokenizer: Tokenizer,
    texts: Sequence[str],
    *,
    pooling: Pooling = "mean",
    batch: int = 64,
    tick: Callable[[int, int], None] = lambda done, of: None,
) -> Tensor:
    """One vector [N, D] per text, float32 on the CPU: the mean of its last states, or that of [CLS] alone.

    The mean is over every token that the model reads, a frame of [CLS] and [SEP] included.
    """
    frame = frame_of(model, tokenizer)
    if pooling not in ("mean", "cls"):
        raise RequestError(f"pooling: {pooling!r} is neither mean nor cls")
    if pooling == "cls" and not frame.before:
        raise RequestError("pooling: this model does not read a [CLS] in front of a text; use mean")
    rows = framed(model, frame, tokenizer.encode_many(list(texts)))
    return pooled(model, rows, pooling=pooling, batch=batch, tick=tick)


def pooled(
    model: Transformer,
    rows: Sequence[Sequence[int]],
    *,
    pooling: Pooling = "mean",
    batch: int = 64,
    tick: Callable[[int, int], None] = lambda done, of: None,
) -> Tensor:
    """The same of rows of ids as the model reads them."""
    result_ND = torch.empty(len(rows), model.config.width)
    done = 0
    for part in read(model, rows, batch=batch):
        hidden_BTD = part.hidden.float()
        if pooling == "mean":
            real_BT1 = part.real[..., None]
            # not a product: what stands at padding may be anything
            pooled_BD = hidden_BTD.masked_fill(~real_BT1, 0.0).sum(1) / real_BT1.sum(1)
        else:
            pooled_BD = hidden_BTD[:, 0]
        result_ND[torch.tensor(part.texts)] = pooled_BD.cpu()
        done += len(part.texts)
        tick(done, len(rows))
    return result_ND


def embed_word(model: Transformer, tokenizer: Tokenizer, text: str, word: str, *, occurrence: int = 0) -> Tensor:
    """The vector [D] of one occurrence of a word in its context: the mean of the last states of its pieces."""
    first, last = _place(text, word, occurrence)
    frame = frame_of(model, tokenizer)
    (row,) = framed(model, frame, [tokenizer.encode(text)])
    pieces = [
        len(frame.before) + at for at, (begin, end) in enumerate(tokenizer.spans(text)) if begin < last and end > first
    ]
    if not pieces:
        raise RequestError(f"the tokenizer leaves nothing of {word!r}; choose another word")
    (part,) = read(model, [row])
    state_PD = part.hidden[0, torch.tensor(pieces, device=model.device)]
    return state_PD.float().mean(0).cpu()


def _place(text: str, word: str, occurrence: int) -> tuple[int, int]:
    """Where a word stands in a text, as a whole word."""
    require_whole("occurrence", occurrence, None, None, "occurrences are counted from 0")
    found = [match.span() for match in re.finditer(rf"(?<!\w){re.escape(word)}(?!\w)", text)] if word.strip() else []
    if not 0 <= occurrence < len(found):
        times = {0: "does not occur", 1: "occurs once"}.get(len(found), f"occurs {len(found)} times")
        raise RequestError(f"the word {word!r} {times} in {text!r}; occurrences are counted from 0")
    return found[occurrence]


def static_word(model: Transformer, tokenizer: Tokenizer, word: str) -> Tensor:
    """The vector [D] of a word before any layer, the same in every text: the mean of its pieces' embeddings."""
    # in the middle of a text a word has a space in front, which may make it another piece
    ways = [ids for ids in (tokenizer.encode(f" {word}"), tokenizer.encode(word)) if ids]
    if not word.strip() or not ways:
        raise RequestError(f"{word!r} is no word; give at least one character")
    pieces = torch.tensor(min(ways, key=len), device=model.device)
    return _table(model)[pieces].float().mean(0).cpu()


def static_words(model: Transformer, tokenizer: Tokenizer) -> tuple[list[str], Tensor]:
    """Every piece that is text, and its vector before any layer, [N, D]."""
    specials = set(tokenizer.specials.values())
    ids = [id for id in range(tokenizer.size) if id not in specials]
    vectors_ND = _table(model)[torch.tensor(ids, device=model.device)].float().cpu()
    return [tokenizer.decode([id]) for id in ids], vectors_ND


def _table(model: Transformer) -> Tensor:
    return whole(model.embedding.weight.detach())


def neighbours(vectors: Tensor, candidates_ND: Tensor, names: Sequence[str], *, top: int = 10) -> list[list[Neighbour]]:
    """For each of the vectors [Q, D] the `top` candidates with the highest cosine, best first; of equals the first."""
    require_whole("top", top, 1, None, "ask for at least one neighbour")
    for name, given in (("vectors", vectors), ("candidates", candidates_ND)):
        if not isinstance(given, Tensor) or not is_plain(given) or given.ndim != 2:
            raise RequestError(f"{name}: give a tensor of numbers with a row for each, as `m.embed` of a list does")
    names = texts_of("names", names)
    if vectors.shape[-1] != candidates_ND.shape[-1] or len(names) != len(candidates_ND):
        raise RequestError(
            f"vectors of {vectors.shape[-1]} numbers cannot be compared with {len(candidates_ND)} candidates of "
            f"{candidates_ND.shape[-1]} and {len(names)} names"
        )
    cosine_QN = F.normalize(vectors.float(), dim=-1) @ F.normalize(candidates_ND.float(), dim=-1).T
    best = cosine_QN.sort(dim=-1, descending=True, stable=True)
    return [
        [Neighbour(names[at], similarity=value, number=at) for at, value in zip(numbers, values, strict=True)]
        for numbers, values in zip(best.indices[:, :top].tolist(), best.values[:, :top].tolist(), strict=True)
    ]
