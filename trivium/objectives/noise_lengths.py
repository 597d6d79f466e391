"""How long inputs and targets are when runs of tokens are cut out (spec: objectives §6); torch is not needed for it."""

from __future__ import annotations

import bisect
import math
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from trivium.errors import ConfigError
from trivium.models.config import ModelConfig

if TYPE_CHECKING:
    from trivium.objectives.options import Denoise

Ids = npt.NDArray[np.int64]


class Room(NamedTuple):
    """What a row of raw text becomes at most: tokens and runs of noise, and the lengths that follow from them."""

    noise: int
    runs: int
    inputs: int
    targets: int
    joined: int  # inputs and targets in one row


def longest(options: Denoise, model: ModelConfig) -> tuple[int, Room]:
    """The longest text whose inputs and targets fit the context, and their lengths."""
    two_sides = model.family == "encoder-decoder"

    def too_long(length: int) -> bool:
        room = room_for(options, length)
        # The last token of a joined row is only a label.
        return (max(room.inputs, room.targets) if two_sides else room.joined - 1) > model.context

    most = 2 + math.ceil(2 * model.context / (1 - options.density))
    length = bisect.bisect_left(range(most), True, lo=2, key=too_long) - 1
    if length < 2:
        raise ConfigError(f"model.context: {model.context} is too short for two tokens with noise; try 128")
    room = room_for(options, length)
    if room.runs > options.sentinels:
        raise ConfigError(
            f"objective.sentinels: a row of {length} tokens can have {room.runs} runs of noise, but there are "
            f"{options.sentinels} sentinels; set it to {room.runs}"
        )
    return length, room


def room_for(options: Denoise, length: int) -> Room:
    """The lengths for raw text of `length` tokens: exact for spans, for coins what they nearly never pass."""
    if options.noise == "span":
        noise, runs = (int(number) for number in span_counts(np.array(length), options.density, options.mean_span))
        inputs, targets = length - noise + runs + 1, noise + runs + 1
        return Room(noise, runs, inputs, targets, inputs + targets)
    share = options.density
    noise = min(length, math.ceil(length * share + 6 * math.sqrt(length * share * (1 - share))))
    # A run begins at a noisy token behind a kept one; two neighbours never both begin one: var = p - 3p².
    begin = share * (1 - share)
    runs = min(length // 2, math.ceil(length * begin + 4 * math.sqrt(length * begin * (1 - 3 * begin))))
    # One more sentinel closes targets whose text ends in kept tokens.
    return Room(noise, runs + 1, length + 1, noise + runs + 2, length + 2 * runs + 3)


def span_counts(lengths: Ids, density: float, mean_span: float) -> tuple[Ids, Ids]:
    """How many tokens of noise, in how many runs, a text of so many tokens gets; halves round to even."""
    noise = np.minimum(np.maximum(np.rint(lengths * density), 1), lengths - 1).astype(np.int64)
    runs = np.maximum(np.rint(noise / mean_span), 1).astype(np.int64)
    return noise, np.minimum(runs, np.minimum(noise, lengths - noise))  # no run, noisy or kept, is empty
