"""What a token mixer, attention or any other part of that place, declares about decoding.

`decoding` is "mask" if the mixer obeys any mask over the tokens in its cache, "state" if it continues every sequence
from its cache whatever the mask says, "none" if it needs a whole text at once. `can_roll_back` says whether its cache
may be cut back to fewer tokens. A module that declares nothing counts as "state" without roll-back.
"""

from __future__ import annotations

from typing import Literal

from torch import nn

from trivium.errors import ConfigError

Decoding = Literal["mask", "state", "none"]
ORDER: tuple[Decoding, ...] = ("mask", "state", "none")  # what each can do the next cannot


def decoding_of(mixer: nn.Module) -> Decoding:
    """What a mixer declares, "state" if nothing."""
    declared = getattr(mixer, "decoding", "state")
    for known in ORDER:
        if declared == known:
            return known
    raise ConfigError(f"{type(mixer).__name__}.decoding: {declared!r} is none of mask, state and none")


def can_roll_back(mixer: nn.Module) -> bool:
    """Whether the cache of a mixer may be cut back, as speculative decoding does."""
    return decoding_of(mixer) != "none" and getattr(mixer, "can_roll_back", False) is True
