"""A mixer is anything that mixes tokens: attention, a convolution, a recurrence.

`forward(x, ctx)` takes the residual stream and its context. What a mixer declares says how it decodes: `decoding` is
"mask" if it obeys any mask over the tokens in its cache, "state" if it continues every sequence from its cache whatever
the mask says, "none" if it needs a whole text at once. `can_roll_back` says whether its cache may be cut back to fewer
tokens. A module that declares nothing counts as "state" without roll-back.
"""

# B batch, T tokens, S source tokens, D width

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol

from torch import Tensor, nn

from trivium.errors import ConfigError
from trivium.parts.masks import ScoreMask

if TYPE_CHECKING:
    from trivium.parts.cache import LayerCache, StateCache
    from trivium.parts.losses import WithLosses
    from trivium.parts.positions import Positions

Decoding = Literal["mask", "state", "none"]
ORDER: tuple[Decoding, ...] = ("mask", "state", "none")  # what each can do the next cannot


@dataclass(kw_only=True)
class Context:
    """What a layer reads beside the residual stream; a stack may replace it between blocks."""

    mask: ScoreMask  # of the layer's own tokens, with its window and the bias of its positions
    position: Positions  # the layer's position scheme
    prepared: Any = None  # what that scheme computed for these positions, once for all layers
    at: Tensor  # [1 or B, T] the position of every token
    cache: LayerCache | StateCache | None = None  # the layer's state, if this is decoding
    start: int = 0  # tokens in it before these
    source: Tensor | None = None  # [B, S, D] the encoder's output
    source_mask: ScoreMask | None = None

    @property
    def real(self) -> Tensor | None:
        """Which tokens are real, [B, T]; None if there is no padding."""
        return self.mask.mask.real(self.at.shape[1])


class MixerState(Protocol):
    """What a mixer remembers of B sequences while it decodes, if keys and values are not what it keeps."""

    def keep_rows(self, rows: Tensor) -> None:
        """Keep (and reorder to) these sequences only; one may be there several times."""

    def roll_back(self, length: int) -> None:
        """Forget all but the first tokens; only asked of mixers with `can_roll_back`."""

    def nbytes(self) -> int: ...


class Mixer(Protocol):
    """What a block asks of the module in its attention place.

    One that also has `new_state(rows, longest, like) -> MixerState` finds that state as `ctx.cache.state`; others find
    a `LayerCache` for keys and values as `ctx.cache`.
    """

    def forward(self, x_BTD: Tensor, ctx: Context) -> Tensor | WithLosses: ...


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
