"""What objectives that hide tokens share: frames, words, and what becomes of a chosen token (spec: objectives §2)."""

# B rows, T tokens (those of a frame included), N positions that are looked at, V vocabulary

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from trivium.data.batch import Batch
from trivium.data.packing import RowBatch
from trivium.labels import IGNORED
from trivium.objectives.objective import special
from trivium.objectives.options import CLASS, MASK, PADDING, SEPARATOR, Draw
from trivium.text.tokenizer import Tokenizer

Ids = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]
Draws = npt.NDArray[np.float64]


class Framed(NamedTuple):
    """Rows as the model gets them before anything is hidden, and how many of their tokens are real.

    Pairs also have the segment [B, T] of every token and, as a class [B], whether B follows A (0) or not (1).
    """

    ids: Ids
    lengths: Ids
    segments: Ids | None = None
    classes: Ids | None = None


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Vocabulary:
    """A tokenizer's ids as tables: the specials by spelling, what may be chosen, where words begin and end."""

    ids: dict[str, int]
    is_special: Flags  # [V]
    starts_word: Flags  # [V]
    ends_word: Flags  # [V]
    random_ids: Ids

    def framed(self, rows: RowBatch) -> Framed:
        """Each row between [CLS] and [SEP]."""
        lengths_B = rows.lengths
        ids_BT = np.pad(rows.text, ((0, 0), (1, 1)), constant_values=self.ids[CLASS])
        ids_BT[~real(lengths_B + 1, ids_BT.shape[1])] = self.ids[PADDING]
        ids_BT[np.arange(len(ids_BT)), lengths_B + 1] = self.ids[SEPARATOR]
        return Framed(ids_BT, lengths_B + 2)

    def open(self, framed: Framed) -> Flags:
        """Which tokens [B, T] may be chosen: neither specials nor padding."""
        return real(framed.lengths, framed.ids.shape[1]) & ~self.is_special[framed.ids]

    def words(self, ids_BT: Ids, open_BT: Flags) -> Flags:
        """Where words [B, T] begin; behind a special one begins anew."""
        first_BT = self.starts_word[ids_BT]
        first_BT[:, 0] = True
        first_BT[:, 1:] |= self.ends_word[ids_BT[:, :-1]] | ~open_BT[:, :-1]
        return first_BT & open_BT

    def hidden(self, ids_BT: Ids, chosen_BT: Flags, fate_BT: Draws, other_BT: Draws, shares: Shares) -> Ids:
        """The ids with each chosen one made [MASK] or another, or left, as its draws say."""
        other = self.random_ids[(other_BT * len(self.random_ids)).astype(np.int64)]
        fates = [fate_BT < shares.mask, fate_BT < shares.mask + shares.random]
        return np.where(chosen_BT, np.select(fates, [np.int64(self.ids[MASK]), other], ids_BT), ids_BT)


class Shares(NamedTuple):
    """Which share of the chosen becomes [MASK], and which another token; the rest stays as it is."""

    mask: float
    random: float


def vocabulary(tokenizer: Tokenizer, specials: tuple[str, ...], *, draw: Draw, words: bool) -> Vocabulary:
    """The tables of a tokenizer; those of words only where they are wanted."""
    is_special = np.zeros(tokenizer.size, np.bool_)
    is_special[list(tokenizer.specials.values())] = True
    return Vocabulary(
        ids={spelling: special(tokenizer, spelling) for spelling in specials},
        is_special=is_special,
        starts_word=np.array([words and tokenizer.starts_word(id) for id in range(tokenizer.size)]),
        ends_word=np.array([words and tokenizer.ends_word(id) for id in range(tokenizer.size)]),
        random_ids=np.flatnonzero(~is_special) if draw == "text" else np.arange(tokenizer.size),
    )


def real(lengths_B: Ids, width: int) -> Flags:
    """The first so many positions of each row."""
    return np.arange(width) < lengths_B[:, None]


def batch(framed: Framed, tokens_BT: Ids, targets: dict[str, Tensor], *, counts: dict[str, int]) -> Batch:
    """What the model is given: with a mask where rows are short, with segments where there are two."""
    given = {"tokens": torch.from_numpy(tokens_BT)}
    length = tokens_BT.shape[1]
    # Of cut rows only the last of a text is short: all other batches go without a mask, and so by the fast kernels.
    odd = framed.segments is None and bool((framed.lengths < length).any())
    if odd or framed.segments is not None:
        given["padding"] = torch.from_numpy(real(framed.lengths, length))
    if framed.segments is not None:
        given["segments"] = torch.from_numpy(framed.segments)
    return Batch(inputs=given, targets=targets, counts=counts, odd=odd)


def filled(values_N: Ids, size: int, fill: int) -> Tensor:
    """The values with `fill` behind them, so that the shape of a batch depends on the number of its rows alone."""
    assert len(values_N) <= size
    return torch.from_numpy(np.concatenate([values_N, np.full(size - len(values_N), fill)]))


def gather_targets(ids_BT: Ids, where_N: Ids, size: int) -> dict[str, Tensor]:
    """The chosen positions of all rows laid end to end, and their ids."""
    return {"where": filled(where_N, size, 0), "labels": filled(ids_BT.ravel()[where_N], size, IGNORED)}
