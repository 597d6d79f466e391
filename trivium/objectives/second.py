"""The loss of a second head, beside that of the tokens: next sentences and span boundaries (spec: objectives §3, §5).

A batch asks for it by what is in its targets. The loss of a step is the sum of two means: that of the counted tokens,
and that of the labels which the second head has in the same step.
"""

# B rows, C classes, N tokens of spans, D width

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trivium.models.transformer import States
from trivium.parts.boundary import BoundaryHead
from trivium.parts.sentence import PooledSentence


class Heads(Protocol):
    """The second heads that a model may have."""

    @property
    def sentence(self) -> nn.Module | None: ...
    @property
    def boundary(self) -> nn.Module | None: ...


def beside(first: Tensor, model: Heads, states: States, targets: dict[str, Tensor]) -> Tensor:
    """The summed loss of the tokens, alone or with that of a second head behind it, [2]."""
    if "classes" in targets:
        return torch.stack((first, judged(model, states, targets)))
    if "bordered" in targets:
        return torch.stack((first, bordered(model, states, targets)))
    return first


def mean(sums: Tensor, counts: Sequence[int] | Tensor) -> Tensor:
    """The loss of a step: each head's sum over the labels that it has in all batches of the step, added up.

    Never an average of averages: the counts are those of the whole step, not of one of its batches.
    """
    over = counts.clamp(min=1) if isinstance(counts, Tensor) else [max(1, count) for count in counts]
    return sums[0] / over[0] + sums[1] / over[1] if sums.dim() else sums / over[0]


def judged(model: Heads, states: States, targets: dict[str, Tensor]) -> Tensor:
    """The summed loss of the sentence head, which gives every row one of its `classes` [B]."""
    logits_BC = cast(PooledSentence, model.sentence).logits(states.hidden)
    return F.cross_entropy(logits_BC.float(), targets["classes"], reduction="sum")


def bordered(model: Heads, states: States, targets: dict[str, Tensor]) -> Tensor:
    """The summed loss of the boundary head, which tells each label [N] from the states around its span."""
    hidden_ND = states.hidden.flatten(0, 1)
    left_ND, right_ND = (hidden_ND.index_select(0, targets[side]) for side in ("left", "right"))
    return cast(BoundaryHead, model.boundary).nll(left_ND, right_ND, targets["places"], targets["bordered"]).sum()
