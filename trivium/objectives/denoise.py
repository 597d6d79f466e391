"""Replace runs of tokens by sentinels and ask for them in order (spec: objectives §6, §8)."""

# B rows, N tokens of raw text, S tokens of the corrupted text, T tokens of the targets, J = S + T

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from trivium.data.batch import Batch
from trivium.data.packing import RowBatch
from trivium.labels import IGNORED
from trivium.models.config import ModelConfig
from trivium.models.transformer import States
from trivium.objectives.noise_lengths import Room, longest, span_counts
from trivium.objectives.objective import HasHeads, count_labels, loss_all, shift_right, special
from trivium.objectives.options import PAD, Denoise, sentinel
from trivium.parts.losses import Loss, Losses
from trivium.text.tokenizer import Tokenizer

Ids = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]
Draws = npt.NDArray[np.float64]


def bind(options: Denoise, tokenizer: Tokenizer, model: ModelConfig) -> DenoiseTask:
    """The task for the longest text whose inputs and targets fit the context."""
    length, room = longest(options, model)
    return DenoiseTask(
        options=options,
        length=length,
        room=room,
        two_sides=model.family == "encoder-decoder",
        end=tokenizer.end,
        pad=special(tokenizer, PAD),
        sentinels=np.array([special(tokenizer, sentinel(number)) for number in range(options.sentinels)]),
    )


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class DenoiseTask:
    """Corrupted rows and what was cut out of them: in two stacks, or joined in one."""

    options: Denoise
    length: int
    room: Room
    two_sides: bool
    end: int
    pad: int
    sentinels: Ids

    def inputs(self, rows: RowBatch, rng: np.random.Generator) -> Batch:
        # The END between two documents is text like any other: sparing it would change the number of noisy tokens,
        # on which all lengths rest, and a model that fills gaps has to know where a document ends.
        text_BN, lengths_B = rows.text, rows.lengths
        draws_BN = rng.random(text_BN.shape)
        if self.options.noise == "span":
            noise_BN = span_noise(draws_BN, lengths_B, self.options.density, self.options.mean_span)
        else:
            noise_BN = self._coins(draws_BN, lengths_B)
        source_BS, sources_B = self._collapsed(text_BN, noise_BN, lengths_B, self.room.inputs)
        target_BT, targets_B = self._collapsed(text_BN, ~noise_BN, lengths_B, self.room.targets)
        if self.two_sides:
            return self._in_two(source_BS, sources_B, target_BT, targets_B)
        return self._in_one(source_BS, sources_B, target_BT, targets_B)

    def loss(self, model: HasHeads, states: States, targets: dict[str, Tensor]) -> Losses:
        return {"tokens": Loss(loss_all(model.head, states, targets))}

    def _coins(self, draws_BN: Draws, lengths_B: Ids) -> Flags:
        """A coin for every token but the first: with kept text in front, both sides name the runs alike."""
        noise_BN = (draws_BN < self.options.density) & (np.arange(draws_BN.shape[1]) < lengths_B[:, None])
        noise_BN[:, :1] = False
        begins_BN = _begins(noise_BN)
        # What luck would put beyond the fixed lengths or the last sentinel stays text.
        fits_BN = np.cumsum(noise_BN, axis=1) <= self.room.noise
        return noise_BN & fits_BN & (np.cumsum(begins_BN, axis=1) < self.room.runs)

    def _collapsed(self, text_BN: Ids, away_BN: Flags, lengths_B: Ids, width: int) -> tuple[Ids, Ids]:
        return collapse(text_BN, away_BN, lengths_B, self.sentinels, end=self.end, fill=self.pad, width=width)

    def _in_two(self, source_BS: Ids, sources_B: Ids, target_BT: Ids, targets_B: Ids) -> Batch:
        tokens, labels = shift_right(target_BT, targets_B, self.pad)
        inputs = {"source": torch.from_numpy(source_BS), "tokens": tokens}
        real_BS = np.arange(source_BS.shape[1]) < sources_B[:, None]
        # Spans give every row the same length, but for the last one of a text.
        odd = self.options.noise == "span" and not real_BS.all()
        if odd or self.options.noise == "iid":
            inputs["source_padding"] = torch.from_numpy(real_BS)
        return Batch(inputs=inputs, targets={"labels": labels}, counts={"tokens": count_labels(labels)}, odd=odd)

    def _in_one(self, source_BS: Ids, sources_B: Ids, target_BT: Ids, targets_B: Ids) -> Batch:
        at_BJ = np.broadcast_to(np.arange(self.room.joined), (len(source_BS), self.room.joined))
        split_B1 = sources_B[:, None]
        first_BJ = np.take_along_axis(source_BS, np.minimum(at_BJ, source_BS.shape[1] - 1), axis=1)
        second_BJ = np.take_along_axis(target_BT, np.clip(at_BJ - split_B1, 0, target_BT.shape[1] - 1), axis=1)
        whole_BJ = np.where(at_BJ < split_B1, first_BJ, second_BJ)
        counts_BJ = at_BJ < (sources_B + targets_B)[:, None]
        if self.options.loss_on == "targets":
            counts_BJ &= at_BJ >= split_B1
        inputs = {"tokens": torch.from_numpy(whole_BJ[:, :-1])}
        if self.options.attention == "prefix":
            inputs["prefix"] = torch.from_numpy(sources_B)
        labels = torch.from_numpy(np.where(counts_BJ, whole_BJ, IGNORED)[:, 1:])
        return Batch(inputs=inputs, targets={"labels": labels}, counts={"tokens": count_labels(labels)})


def span_noise(draws_BN: Draws, lengths_B: Ids, density: float, mean_span: float) -> Flags:
    """Which tokens are noise: kept and noisy runs in turn, kept first, their lengths a uniformly random split."""
    noise_B, runs_B = span_counts(lengths_B, density, mean_span)
    at_N, kept_B1 = np.arange(draws_BN.shape[1]), (lengths_B - noise_B)[:, None]
    # Lay a row out as its kept tokens, then its noisy ones; cut both into runs, and sort by the number of the run.
    is_noise_BN = at_N >= kept_B1
    kept_run_BN = _parts(draws_BN, (at_N > 0) & ~is_noise_BN, runs_B)
    real_BN = at_N < lengths_B[:, None]
    noise_run_BN = _parts(draws_BN, (at_N > kept_B1) & real_BN, runs_B)
    order_BN = np.where(is_noise_BN, 2 * noise_run_BN + 1, 2 * kept_run_BN)
    order_BN[~real_BN] = 2 * draws_BN.shape[1]  # at the end, and even: no noise
    return (np.sort(order_BN, axis=1) % 2).astype(np.bool_)


def _parts(draws_BN: Draws, may_begin_BN: Flags, parts_B: Ids) -> Ids:
    """The number of each token's part, when all but the first part begin at places drawn from `may_begin_BN`."""
    places_BN = np.argsort(np.where(may_begin_BN, draws_BN, np.inf), axis=1)
    begins_BN = np.zeros_like(may_begin_BN)
    np.put_along_axis(begins_BN, places_BN, np.arange(draws_BN.shape[1]) < parts_B[:, None] - 1, axis=1)
    return np.cumsum(begins_BN, axis=1)


def collapse(
    ids_BN: Ids, away_BN: Flags, lengths_B: Ids, sentinels: Ids, *, end: int, fill: int, width: int
) -> tuple[Ids, Ids]:
    """Each run of `away_BN` as one sentinel, the other tokens as they are, then `end`; and the lengths of that."""
    real_BN = np.arange(ids_BN.shape[1]) < lengths_B[:, None]
    begins_BN = _begins(away_BN & real_BN)
    named_BN = np.where(begins_BN, sentinels[np.cumsum(begins_BN, axis=1) - 1], ids_BN)
    stays_BN = real_BN & (begins_BN | ~away_BN)
    result = np.full((len(ids_BN), width), fill)
    row, column = np.nonzero(stays_BN)
    result[row, np.cumsum(stays_BN, axis=1)[row, column] - 1] = named_BN[row, column]
    counts_B = np.count_nonzero(stays_BN, axis=1)
    result[np.arange(len(result)), counts_B] = end
    return result, counts_B + 1


def _begins(flags_BN: Flags) -> Flags:
    """Where a run of True begins."""
    begins_BN = flags_BN.copy()
    begins_BN[:, 1:] &= ~flags_BN[:, :-1]
    return begins_BN
