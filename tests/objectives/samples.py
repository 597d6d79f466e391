"""Rows, tokenizers, models and generators that the tests of objectives share."""

# B rows, T tokens, U = T + 1, V vocabulary

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from trivium.data.packing import RowBatch, Rows
from trivium.data.shards import Stream
from trivium.labels import IGNORED
from trivium.models.config import AnyStack, ModelConfig, NoStack, Stack
from trivium.models.options import Block
from trivium.objectives.options import Objective
from trivium.parts.options.attention import MultiHeadOptions
from trivium.parts.options.output import SoftmaxOptions
from trivium.parts.options.positions import RotaryOptions
from trivium.parts.output import Head, SoftmaxOutput
from trivium.parts.site import Site
from trivium.text.kinds import Bytes, Chars
from trivium.text.tokenizer import Tokenizer


def rows(ids: list[list[int]], real: list[int], documents: list[list[int]] | None = None) -> RowBatch:
    """Rows whose first `real` tokens are text, the last of which is only a label."""
    ids_NU = np.array(ids, dtype=np.int64)
    real_NT = np.arange(1, ids_NU.shape[1]) < np.array(real)[:, None]
    inside = real_NT.astype(np.int32) if documents is None else np.array(documents, dtype=np.int32)
    labels_NT = np.where(real_NT, ids_NU[:, 1:], IGNORED)
    return RowBatch(ids_NU, labels_NT, inside, np.arange(len(ids_NU)), stream([]))


def stream(documents: Sequence[Sequence[int]], end: int = 256) -> Stream:
    """Documents as they lie on the disk."""
    ids = [id for document in documents for id in (end, *document)] + [end] * bool(documents)
    sizes = [1 + len(document) for document in documents]
    starts = np.cumsum([0, *sizes[:-1]]) if sizes else np.empty(0)
    return Stream(ids=np.array(ids, np.uint16), starts=starts.astype(np.int64), text_bytes=0)


def random_rows(count: int, length: int, ids: int, *, seed: int = 0, last: int = 0) -> RowBatch:
    """Rows of random ids below `ids`, a quarter spaces; the last has only `last` real tokens if that is not 0."""
    rng = np.random.default_rng(seed)
    drawn = np.where(rng.random((count, length + 1)) < 0.25, ord(" ") % ids, rng.integers(0, ids, (count, length + 1)))
    real = [length + 1] * (count - 1) + [last + 1 if last else length + 1]
    return rows(drawn.tolist(), real)


def cut_rows(count: int, length: int, ids: int, *, seed: int = 0, last: int = 0) -> RowBatch:
    """Rows cut from a stream of documents of 5 to 60 random ids; the last has only `last` tokens if that is not 0."""
    rng = np.random.default_rng(seed)
    left = length * (count - 1) + (last or length)
    documents: list[list[int]] = []
    while left:
        size = min(left - 1, int(rng.integers(5, 60)))
        size = left - 1 if left - 1 - size < 4 else size  # no document that is an END and nothing else
        documents.append(rng.integers(0, ids, size).tolist())
        left -= size + 1
    return Rows(stream(documents), length).take(np.arange(count))


def part(given: RowBatch, which: list[int] | slice) -> RowBatch:
    """Some of the rows, in this order."""
    arrays = (given.ids[which], given.labels[which], given.documents[which], given.numbers[which])
    return RowBatch(*arrays, given.stream)


class Clueless(nn.Module):
    """A sentence or boundary head that has nothing to say."""

    def logits(self, hidden_BTD: Tensor) -> Tensor:
        return hidden_BTD.new_zeros(len(hidden_BTD), 2)

    def nll(self, left_ND: Tensor, right_ND: Tensor, places_N: Tensor, labels_N: Tensor) -> Tensor:
        return left_ND.new_zeros(len(left_ND))


class Heads(NamedTuple):
    """A model as objectives see it."""

    head: Head
    sentence: nn.Module | None = None
    boundary: nn.Module | None = None


def speaking(vocab: int) -> Heads:
    """A model whose logits are the states themselves."""
    head = SoftmaxOptions().build(Site(width=vocab, context=1, vocab=vocab), None)
    assert isinstance(head, SoftmaxOutput)
    with torch.no_grad():
        head.project.weight.copy_(torch.eye(vocab))
    return Heads(head, Clueless(), Clueless())


def letters(objective: Objective, count: int = 5) -> Tokenizer:
    """A tokenizer of `count` letters, extended by what the objective needs."""
    return Chars().build(["abcdefghijklmnopqrstuvwxyz"[:count]]).extended(objective.specials)


def octets(objective: Objective) -> Tokenizer:
    return Bytes().build([]).extended(objective.specials)


def tiny(family: str, context: int, vocab: int, **places: Any) -> ModelConfig:
    """One layer a side, with other places of the model as given."""
    plain = Stack(layers=1, block=Block(position=RotaryOptions()))
    crossed = Stack(layers=1, block=Block(position=RotaryOptions(), cross=MultiHeadOptions()))
    sides: dict[str, tuple[AnyStack, AnyStack]] = {
        "encoder": (plain, NoStack()),
        "decoder": (NoStack(), plain),
        "encoder-decoder": (plain, crossed),
    }
    encoder, decoder = sides[family]
    return ModelConfig(width=16, context=context, vocab=vocab, encoder=encoder, decoder=decoder, **places)


class Scripted:
    """A generator that draws what a test wrote down."""

    def __init__(self, draws: npt.ArrayLike) -> None:
        self.draws = np.array(draws, dtype=np.float64)

    def random(self, shape: int | tuple[int, ...]) -> npt.NDArray[np.float64]:
        wanted = shape if isinstance(shape, tuple) else (shape,)
        assert len(self.draws) == wanted[0]
        assert self.draws.size == math.prod(wanted)
        return self.draws.reshape(wanted)


def scripted(draws: npt.ArrayLike) -> np.random.Generator:
    return cast(np.random.Generator, Scripted(draws))
