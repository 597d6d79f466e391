"""How much attention each source token has got from a decoder's last layer, for the coverage penalty (GNMT)."""

# B rows, W source tokens, H query heads, G key/value heads, E head size

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Any, Self, final

import torch
from torch import Tensor

from trivium.errors import RequestError
from trivium.generation.scorer import Reading, Scorer
from trivium.models.transformer import Transformer
from trivium.parts.attention import MultiHeadAttention

_LEAST = 1e-30  # a token that nobody looked at would cost infinitely much


@final
class Coverage:
    """`with Coverage(scorer, weight) as coverage:` — attention summed over the steps; with a weight of 0 it is idle."""

    def __init__(self, scorer: Scorer, weight: float) -> None:
        self.weight = weight
        self._across = [_last_cross(model) for model in scorer.models] if weight else []
        self._queries: list[Tensor | None] = [None] * len(self._across)
        self._hooks: list[Any] = []
        self._seen_BW: Tensor | None = None
        self._real_BW: Tensor | None = None

    def __enter__(self) -> Self:
        for index, cross in enumerate(self._across):
            self._hooks.append(cross.query.register_forward_hook(self._listener(index)))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for hook in self._hooks:
            hook.remove()

    def look(self, reading: Reading) -> None:
        """Add the attention of the step that was just read: the mean over heads and models."""
        if not self.weight:
            return
        self._real_BW = reading.caches[0].memory_padding
        looks = [self._look(index, cross, reading) for index, cross in enumerate(self._across)]
        look_BW = torch.stack(looks).mean(0)
        self._seen_BW = look_BW if self._seen_BW is None else self._seen_BW + look_BW

    def penalties(self, rows: int) -> list[float]:
        """What is added to the score of each row if it ends here: 0 or less."""
        if self._seen_BW is None:
            return [0.0] * rows
        log_BW = self._seen_BW.clamp(_LEAST, 1.0).log()
        if self._real_BW is not None:
            log_BW = log_BW.masked_fill(~self._real_BW, 0.0)
        penalties: list[float] = (self.weight * log_BW.sum(-1)).tolist()
        return penalties

    def keep(self, rows_B: Tensor) -> None:
        """Go on with these rows, in this order."""
        if self._seen_BW is not None:
            self._seen_BW = self._seen_BW[rows_B]

    def _listener(self, index: int) -> Callable[[Any, Any, Tensor], None]:
        def hear(module: Any, inputs: Any, query_BTD: Tensor) -> None:
            self._queries[index] = query_BTD[:, -1]

        return hear

    def _look(self, index: int, cross: MultiHeadAttention, reading: Reading) -> Tensor:
        cache, query_BD = reading.caches[index], self._queries[index]
        across = cache.layers[-1].across
        assert across is not None
        assert query_BD is not None
        query_BHE = query_BD.view(len(query_BD), -1, cross.size)
        query_BHE = query_BHE if cross.query_norm is None else cross.query_norm(query_BHE)
        key_BHWE = across[0].repeat_interleave(query_BHE.shape[1] // cross.groups, dim=1)
        score_BHW: Tensor = (key_BHWE @ query_BHE[..., None])[..., 0].float() * cross.scale
        if cache.memory_padding is not None:
            score_BHW = score_BHW.masked_fill(~cache.memory_padding[:, None], float("-inf"))
        return score_BHW.softmax(-1).mean(1)


def _last_cross(model: Transformer) -> MultiHeadAttention:
    """The module with which the last layer of a decoder looks at its source."""
    assert model.decoder is not None
    cross = getattr(model.decoder.blocks[-1], "cross", None)
    if not isinstance(cross, MultiHeadAttention):
        raise RequestError("coverage: this model looks at no source, or not by attention; leave coverage at 0")
    return cross
