"""Hide some tokens of a row and ask for them, with or without a second text (spec: objectives §2, §3, §4)."""

# B rows, C classes, T tokens (those of a frame included), N positions that are looked at, K draws for a row, W words

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol, cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from trivium.data.batch import Batch
from trivium.data.packing import RowBatch
from trivium.models.transformer import States
from trivium.objectives import hiding, pairing
from trivium.objectives.hiding import Draws, Flags, Framed, Ids, Shares, Vocabulary
from trivium.objectives.objective import HasHeads, loss_at
from trivium.objectives.options import CLASS as CLASS
from trivium.objectives.options import MASK as MASK
from trivium.objectives.options import SEPARATOR as SEPARATOR
from trivium.objectives.options import Masked
from trivium.parts.losses import Loss, Losses


class HasSentenceLogits(Protocol):
    """Gives every row a class: whether its second text follows the first."""

    def logits(self, hidden: Tensor) -> Tensor: ...


def sentence_loss(model: HasHeads, states: States, targets: dict[str, Tensor]) -> Tensor:
    """The cross-entropy of the sentence head, summed over the rows, each of which has one of the `classes` [B]."""
    logits_BC = cast(HasSentenceLogits, model.sentence).logits(states.hidden)
    return F.cross_entropy(logits_BC.float(), targets["classes"], reduction="sum")


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class MaskedTask:
    """Masked rows; specials and padding are never chosen, and only chosen positions reach the output part."""

    options: Masked
    length: int
    vocabulary: Vocabulary

    def inputs(self, rows: RowBatch, rng: np.random.Generator) -> Batch:
        framed, choice_BT, fate_BT, other_BT = self._drawn(rows, rng)
        chosen_BT = self._chosen(framed, choice_BT)
        shares = Shares(self.options.mask, self.options.random)
        tokens_BT = self.vocabulary.hidden(framed.ids, chosen_BT, fate_BT, other_BT, shares)
        where_N = np.flatnonzero(chosen_BT)
        size = self._room(*framed.ids.shape)
        while size < len(where_N):  # luck beyond all odds: one more shape for the compiler
            size *= 2
        targets = hiding.gather_targets(framed.ids, where_N, size)
        counts = {"tokens": len(where_N)}
        if framed.classes is not None:
            targets["classes"] = torch.from_numpy(framed.classes)
            counts["sentences"] = len(framed.classes)
        return hiding.batch(framed, tokens_BT, targets, counts=counts)

    def loss(self, model: HasHeads, states: States, targets: dict[str, Tensor]) -> Losses:
        """The losses of the chosen tokens and, of pairs, of the question whether the second text follows the first."""
        losses = {"tokens": Loss(loss_at(model.head, states, targets))}
        if self.options.frame == "pair":
            losses["sentences"] = Loss(sentence_loss(model, states, targets), over="sentences")
        return losses

    def _drawn(self, rows: RowBatch, rng: np.random.Generator) -> tuple[Framed, Draws, Draws, Draws]:
        """The rows in their frame, and for every token three random numbers: is it chosen, its fate, and another id."""
        pairs = self.options.frame == "pair"
        length = self.length + {"none": 0, "bert": 2, "pair": 3}[self.options.frame]
        draws_BK = self._draws(rows, rng, 3 * length + (pairing.draws(self.length) if pairs else 0))
        if pairs:
            framed = pairing.paired(rows, draws_BK[:, 3 * length :], self.vocabulary)
        elif self.options.frame == "bert":
            framed = self.vocabulary.framed(rows)
        else:
            framed = Framed(rows.text, rows.lengths)
        choice_BT, fate_BT, other_BT = draws_BK[:, : 3 * length].reshape(-1, 3, length).swapaxes(0, 1)
        return framed, choice_BT, fate_BT, other_BT

    def _draws(self, rows: RowBatch, rng: np.random.Generator, width: int) -> Draws:
        """New random numbers for every row, or those of one of its copies, which depend on its number alone."""
        if not self.options.copies:
            return rng.random((len(rows.ids), width))
        copies = (rng.random(len(rows.ids)) * self.options.copies).astype(np.uint64)
        keys = np.stack((rows.numbers.astype(np.uint64), copies), axis=1)
        drawn = [np.random.Generator(np.random.Philox(key=key)).random(width) for key in keys]
        return np.array(drawn).reshape(-1, width)

    def _chosen(self, framed: Framed, choice_BT: Draws) -> Flags:
        ids_BT, open_BT = framed.ids, self.vocabulary.open(framed)
        most_B = np.broadcast_to(self._most(framed.lengths), framed.lengths.shape)
        keys_BT = np.where(open_BT, choice_BT, np.inf)
        if self.options.mode == "bernoulli":
            keys_BT[choice_BT >= self.options.rate] = np.inf
        if self.options.unit == "word":
            return self._words(ids_BT, open_BT, keys_BT, most_B)
        chosen_BT = np.zeros_like(open_BT)
        first_BT = np.arange(ids_BT.shape[1]) < most_B[:, None]
        np.put_along_axis(chosen_BT, np.argsort(keys_BT, axis=1), first_BT, axis=1)
        return chosen_BT & np.isfinite(keys_BT)

    def _most(self, lengths: Ids | int) -> Ids:
        """How many tokens of a row may be chosen; its length counts the frame, as BERT's does."""
        most = np.asarray(lengths)
        if self.options.mode == "exact":
            most = np.maximum(1, np.rint(most * self.options.rate)).astype(np.int64)
        return np.minimum(most, self.options.max_predictions) if self.options.max_predictions else most

    def _words(self, ids_BT: Ids, open_BT: Flags, keys_BT: Draws, most_B: Ids) -> Flags:
        """Whole words in random order while they fit; one that would be too much is passed over."""
        first_BT = self.vocabulary.words(ids_BT, open_BT)
        word_BT = np.where(open_BT, np.cumsum(first_BT, axis=1), 0)  # numbered from 1 in each row
        rows, most = len(ids_BT), int(word_BT.max(initial=0)) + 1
        numbers_BT = word_BT + most * np.arange(rows)[:, None]
        sizes_BW = np.bincount(numbers_BT.ravel(), minlength=rows * most).reshape(rows, most)
        keys_BW = np.full((rows, most), np.inf)
        keys_BW.ravel()[numbers_BT[first_BT]] = keys_BT[first_BT]
        order_BW = np.argsort(keys_BW, axis=1)
        sizes_BW = np.take_along_axis(sizes_BW, order_BW, axis=1)
        asked_BW = np.isfinite(np.take_along_axis(keys_BW, order_BW, axis=1))
        fits_BW, left_B = np.zeros((rows, most), bool), most_B.copy()
        for word in range(most):  # the next word of every row at a time
            fits_BW[:, word] = asked_BW[:, word] & (sizes_BW[:, word] <= left_B)
            left_B -= np.where(fits_BW[:, word], sizes_BW[:, word], 0)
            if not left_B.any():
                break
        taken_BW = np.zeros((rows, most), bool)
        np.put_along_axis(taken_BW, order_BW, fits_BW, axis=1)
        return np.take_along_axis(taken_BW, word_BT, axis=1)

    def _room(self, rows: int, length: int) -> int:
        """How many positions of a batch are looked at; only luck beyond all odds makes them more."""
        most, rate = rows * int(self._most(length)), self.options.rate
        if self.options.mode == "exact":
            return most
        positions = rows * length
        sigmas = 6 if self.options.unit == "piece" else 18  # words of nine pieces vary three times as much
        return min(most, math.ceil(positions * rate + sigmas * math.sqrt(positions * rate * (1 - rate))))
