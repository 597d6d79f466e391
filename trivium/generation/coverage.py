"""How much attention each source token has got from a decoder's last layer, for the coverage penalty (GNMT)."""

# B texts, J beams of each (1 at first), W source tokens, H query heads, G key/value heads, E head size

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Any, Self, final

import torch
from torch import Tensor

from trivium.errors import RequestError
from trivium.generation.lineage import BeamReader
from trivium.generation.scorer import Scorer
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
        self._seen_BJW: Tensor | None = None
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

    def look(self, reading: BeamReader) -> None:
        """Add the attention of the step that was just read: the mean over heads and models."""
        if not self.weight:
            return
        self._real_BW = reading.source(0)[1]
        looks = [self._look(index, cross, reading) for index, cross in enumerate(self._across)]
        look_BJW = torch.stack(looks).mean(0)
        self._seen_BJW = look_BJW if self._seen_BJW is None else self._seen_BJW + look_BJW

    def penalties(self) -> Tensor | None:
        """What is added to the score of each beam if it ends here, [B, J]: 0 or less; None means nothing."""
        if self._seen_BJW is None:
            return None
        log_BJW = self._seen_BJW.clamp(_LEAST, 1.0).log()
        if self._real_BW is not None:
            log_BJW = log_BJW.masked_fill(~self._real_BW[:, None], 0.0)
        return self.weight * log_BJW.sum(-1)

    def follow(self, parents_BK: Tensor) -> None:
        """Go on with beams that continue these."""
        if self._seen_BJW is not None:
            words = self._seen_BJW.shape[2]
            self._seen_BJW = self._seen_BJW.gather(1, parents_BK[:, :, None].expand(-1, -1, words))

    def keep(self, rows_B: Tensor) -> None:
        """Go on with these texts only."""
        if self._seen_BJW is not None:
            self._seen_BJW = self._seen_BJW[rows_B]

    def _listener(self, index: int) -> Callable[[Any, Any, Tensor], None]:
        def hear(module: Any, inputs: Any, query_BTD: Tensor) -> None:
            self._queries[index] = query_BTD

        return hear

    def _look(self, index: int, cross: MultiHeadAttention, reading: BeamReader) -> Tensor:
        (key_BGWE, real_BW), query_BTD = reading.source(index), self._queries[index]
        assert query_BTD is not None
        if key_BGWE.shape[1] != cross.groups:  # tensor parallel: the mean over heads would differ between processes
            raise RequestError("coverage: a process has its own heads only; leave it at 0, or shard the model instead")
        query_BJHE = _heads(reading.last(query_BTD), cross.size)
        query_BJHE = query_BJHE if cross.query_norm is None else cross.query_norm(query_BJHE)
        key_BHWE = key_BGWE.repeat_interleave(query_BJHE.shape[2] // cross.groups, dim=1)
        score_BHJW: Tensor = (query_BJHE.transpose(1, 2) @ key_BHWE.mT).float() * cross.scale
        if real_BW is not None:
            score_BHJW = score_BHJW.masked_fill(~real_BW[:, None, None], float("-inf"))
        return score_BHJW.softmax(-1).mean(1)


def _heads(query_BJD: Tensor, size: int) -> Tensor:
    return query_BJD.view(*query_BJD.shape[:2], -1, size)


def _last_cross(model: Transformer) -> MultiHeadAttention:
    """The module with which the last layer of a decoder looks at its source."""
    assert model.decoder is not None
    cross = getattr(model.decoder.blocks[-1], "cross", None)
    if not isinstance(cross, MultiHeadAttention):
        raise RequestError("coverage: this model looks at no source, or not by attention; leave coverage at 0")
    return cross
