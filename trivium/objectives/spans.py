"""Hide spans of whole words, and ask their borders for them too (spec: objectives §5)."""

# B rows, T tokens (those of a frame included), N positions that are looked at, L lengths of a span, D width

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol, cast

import numpy as np
from torch import Tensor

from trivium.data.batch import Batch
from trivium.data.packing import RowBatch
from trivium.labels import IGNORED
from trivium.models.transformer import States
from trivium.objectives import hiding
from trivium.objectives.hiding import Draws, Flags, Framed, Ids, Shares, Vocabulary
from trivium.objectives.objective import HasHeads, loss_at
from trivium.objectives.options import Spans
from trivium.parts.losses import Loss, Losses


class Borders(NamedTuple):
    """Of every hidden token the positions of its span's borders and its own place in it from 0 on; all [N].

    `known` is false where there is no border, at an edge of the row, or no vector for the place.
    """

    left: Ids
    right: Ids
    places: Ids
    known: Flags


class HasBoundaryNll(Protocol):
    """Predicts a hidden token from the states at the borders of its span and its place in the span."""

    def nll(self, left: Tensor, right: Tensor, places: Tensor, labels: Tensor) -> Tensor: ...


def boundary_loss(model: HasHeads, states: States, targets: dict[str, Tensor]) -> Tensor:
    """The negative log-likelihood of the boundary head, summed over the labels `bordered` [N]."""
    hidden_ND = states.hidden.flatten(0, 1)
    left_ND, right_ND = (hidden_ND.index_select(0, targets[side]) for side in ("left", "right"))
    head = cast(HasBoundaryNll, model.boundary)
    return head.nll(left_ND, right_ND, targets["places"], targets["bordered"]).sum()


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class SpansTask:
    """Rows with hidden spans; specials and padding are never in one."""

    options: Spans
    length: int
    places: int  # how many the boundary head knows; 0 without one
    lengths: Draws  # the cumulative probabilities of 1, 2, ... words
    vocabulary: Vocabulary

    def inputs(self, rows: RowBatch, rng: np.random.Generator) -> Batch:
        framed = self.vocabulary.framed(rows) if self.options.frame == "bert" else Framed(rows.text, rows.lengths)
        length = framed.ids.shape[1]
        draws = rng.random((len(framed.ids), 4, length)).swapaxes(0, 1)
        order_BT, size_BT, fate_BT, other_BT = draws
        chosen_BT = self._chosen(framed, order_BT, size_BT)
        first_BT, last_BT = ends(chosen_BT)
        # One fate for a span: that of its first token.
        fate_BT = np.take_along_axis(fate_BT, np.maximum(first_BT, 0), axis=1)
        shares = Shares(self.options.mask, self.options.random)
        tokens_BT = self.vocabulary.hidden(framed.ids, chosen_BT, fate_BT, other_BT, shares)
        where_N = np.flatnonzero(chosen_BT)
        size = len(framed.ids) * self._most(self.length)
        targets = hiding.gather_targets(framed.ids, where_N, size)
        counts = {"tokens": len(where_N)}
        if self.places:
            around = borders(first_BT, last_BT, framed.lengths, self.places)
            labels_N = np.where(around.known, framed.ids.ravel()[where_N], IGNORED)
            targets |= {
                "left": hiding.filled(around.left, size, 0),
                "right": hiding.filled(around.right, size, 0),
                "places": hiding.filled(around.places, size, 0),
                "bordered": hiding.filled(labels_N, size, IGNORED),
            }
            counts["boundary"] = int(around.known.sum())
        return hiding.batch(framed, tokens_BT, targets, counts=counts)

    def loss(self, model: HasHeads, states: States, targets: dict[str, Tensor]) -> Losses:
        """The losses of the hidden tokens: from their own states and, with a boundary head, from those around them."""
        losses = {"tokens": Loss(loss_at(model.head, states, targets))}
        if self.places:
            losses["boundary"] = Loss(boundary_loss(model, states, targets), over="boundary")
        return losses

    def _most(self, length: int) -> int:
        """How many tokens of a text are hidden: the reference counts no frame and rounds up."""
        return int(np.ceil(length * self.options.rate))

    def _chosen(self, framed: Framed, order_BT: Draws, size_BT: Draws) -> Flags:
        """Spans from word starts in random order, until enough is hidden: in mid-word if need be, as the reference."""
        open_BT = self.vocabulary.open(framed)
        starts_BT = self.vocabulary.words(framed.ids, open_BT)
        words_BT = 1 + np.searchsorted(self.lengths, size_BT, side="right")
        chosen_BT = np.zeros_like(open_BT)
        for row, chosen in enumerate(chosen_BT):
            starts = np.flatnonzero(starts_BT[row]).tolist()
            borders = [*starts, len(chosen)]
            left = self._most(int(open_BT[row].sum()))
            for word in np.argsort(order_BT[row, starts]).tolist():
                at = starts[word]
                stop = borders[min(word + int(words_BT[row, at]), len(starts))]
                if chosen[at]:
                    continue
                while left and at < stop and open_BT[row, at]:  # a special ends a span
                    left -= not chosen[at]
                    chosen[at] = True
                    at += 1
        return chosen_BT


def lengths(stop: float, longest: int) -> Draws:
    """The cumulative probabilities of 1 to `longest` words: geometric, and renormalised rather than clipped."""
    chances_L = stop * (1 - stop) ** np.arange(longest)
    total: Draws = np.cumsum(chances_L / chances_L.sum())
    total[-1] = 1.0  # above every draw, whatever the rounding
    return total


def ends(chosen_BT: Flags) -> tuple[Ids, Ids]:
    """For every chosen token the first and the last position of its span, neighbours being one; -1 elsewhere."""
    at_T = np.arange(chosen_BT.shape[1])
    before_BT = np.maximum.accumulate(np.where(chosen_BT, -1, at_T), axis=1)
    behind_BT = np.minimum.accumulate(np.where(chosen_BT, len(at_T), at_T)[:, ::-1], axis=1)[:, ::-1]
    return np.where(chosen_BT, before_BT + 1, -1), np.where(chosen_BT, behind_BT - 1, -1)


def borders(first_BT: Ids, last_BT: Ids, lengths_B: Ids, places: int) -> Borders:
    """The borders of every hidden token, as positions in all rows laid end to end."""
    row_N, at_N = np.nonzero(first_BT >= 0)
    first_N, last_N = first_BT[row_N, at_N], last_BT[row_N, at_N]
    places_N = at_N - first_N
    known_N = (first_N > 0) & (last_N + 1 < lengths_B[row_N]) & (places_N < places)
    origin_N = row_N * first_BT.shape[1]
    return Borders(
        np.where(known_N, origin_N + first_N - 1, 0),
        np.where(known_N, origin_N + last_N + 1, 0),
        np.where(known_N, places_N, 0),
        known_N,
    )
