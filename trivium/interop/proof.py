"""What exports have in common: the architecture that is like a model, and the proof that what was written is it."""

# B batch, T tokens, D width

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import cast

import torch
from torch import Tensor

from trivium.errors import CheckpointError, ConfigError, TriviumError
from trivium.interop.alike import differences
from trivium.models.config import ModelConfig
from trivium.models.transformer import Transformer
from trivium.parts.options.output import NoOutputOptions
from trivium.parts.sentence import Pooler

_NEAR = 1e-5  # of the largest logit: the numbers are the same, only the order of a sum may differ
_LENGTH = 64  # tokens that are compared


class Mismatch(TriviumError):
    """An export that was read back was another model; nothing was written."""


def nearest(config: ModelConfig, readings: Mapping[str, Callable[[], ModelConfig]]) -> tuple[str, list[str]] | None:
    """The first architecture that computes the same as a model or else the nearest one, and what that lacks.

    A reading gives the model nearest to `config` that its architecture can say; one that fails is passed over, and
    there is no answer where all do.
    """
    best: tuple[str, list[str]] | None = None
    for name, reading in readings.items():
        try:
            lost = differences(config, reading())
        except (CheckpointError, ConfigError):
            continue  # it cannot even be said in its terms
        if best is None or len(lost) < len(best[1]):
            best = name, lost
        if not lost:
            break
    return best


def lacking(lost: list[str]) -> str:
    """What an architecture lacks, in few words."""
    return f"model.{lost[0]}" + (f" (and {len(lost) - 1} more)" if len(lost) > 1 else "")


def compare(module: Transformer, back: Transformer, *, rounded: bool = False) -> float:
    """The largest difference of logits between a model and its export, on random ids.

    More than another order of summing explains is a Mismatch, unless the export has rounded the weights.
    """
    pairs = list(zip(_logits(module), _logits(back.to(module.device)), strict=True))
    gap = max(float((mine - theirs).abs().max()) for mine, theirs in pairs)
    most = max(float(mine.abs().max()) for mine, _ in pairs)
    # a half-precision model is computed in its own precision, and its export in float32
    near = max(_NEAR, 8 * torch.finfo(module.embedding.weight.dtype).eps) * max(most, 1.0)
    if not gap <= (torch.finfo(torch.float32).max if rounded else near):
        raise Mismatch(f"the export gave logits that differ by {gap:.1e}; nothing was written")
    return gap


@torch.no_grad()
def _logits(module: Transformer) -> list[Tensor]:
    """What every head of a model says of the same random ids, and its last states where it has none."""
    length = min(module.config.context, _LENGTH)
    generator = torch.Generator().manual_seed(0)
    tokens_BT = torch.randint(module.config.vocab, (2, length), generator=generator).to(module.device)
    training = module.training
    module.eval()
    try:
        source = {"source": tokens_BT.flip(1)} if module.config.family == "encoder-decoder" else {}
        hidden_BTD = module(tokens_BT, **source).hidden
        result = [hidden_BTD if isinstance(module.config.output, NoOutputOptions) else module.head.logits(hidden_BTD)]
        if module.sentence is not None:
            result.append(cast(Pooler, module.sentence).logits(hidden_BTD))
    finally:
        module.train(training)
    return [scores.float() for scores in result]
