"""From hidden states to a loss: the output part owns the logits and the negative log-likelihood."""

# N positions that are looked at, D width, V vocabulary

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trivium.errors import ConfigError
from trivium.parts.linear import Linear
from trivium.parts.site import Cost, Site, matrix

IGNORED = -100  # a label that does not count

# On the CPU the loss goes in chunks of 16 MB of logits: malloc hands blocks above 32 MB back to the system, and then
# every step pays for their pages again (3 % of a step with 10M parameters). Below 256 rows a chunk, adding up the
# gradient of a large output matrix costs more than that.
_CHUNK, _LEAST = 1 << 22, 256


class Output(Protocol):
    """The options of an output part; `tied` is the embedding matrix to share, or None."""

    def build(self, site: Site, tied: nn.Parameter | None) -> nn.Module: ...
    def cost(self, site: Site, *, tied: bool) -> Cost: ...


class Head(Protocol):
    """What every output module can do with hidden states."""

    def logits(self, hidden: Tensor) -> Tensor: ...
    def nll(self, hidden: Tensor, labels: Tensor) -> Tensor: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Softmax:
    """One matrix and a softmax over the vocabulary; `cap` > 0 bounds logits by `cap * tanh(logits / cap)`."""

    cap: float = 0.0

    def __post_init__(self) -> None:
        if self.cap < 0:
            raise ConfigError(f"cap: {self.cap} is negative; 0 means no cap")

    def build(self, site: Site, tied: nn.Parameter | None) -> nn.Module:
        return SoftmaxOutput(site.vocab, site.width, self.cap, tied)

    def cost(self, site: Site, *, tied: bool) -> Cost:
        whole = matrix(site.width, site.vocab)
        return Cost(0 if tied else whole.parameters, whole.flops)


OUTPUTS: dict[str, type[Output]] = {"softmax": Softmax}


class SoftmaxOutput(nn.Module):
    def __init__(self, vocab: int, width: int, cap: float, tied: nn.Parameter | None) -> None:
        super().__init__()
        self.cap = cap
        self.project = Linear(width, vocab, bias=False, role="head")
        if tied is not None:
            self.project.weight = tied  # one storage: both uses add to its gradient, and it is saved once

    def logits(self, hidden: Tensor) -> Tensor:
        """The scores of every id, in the dtype of the model."""
        result: Tensor = self.project(hidden)
        return self.cap * torch.tanh(result / self.cap) if self.cap else result

    def nll(self, hidden_ND: Tensor, labels_N: Tensor) -> Tensor:
        """The negative log-likelihood of each label in nats, float32; exactly 0 where the label is ignored."""
        rows = _CHUNK // self.project.out_features
        if hidden_ND.device.type != "cpu" or not _LEAST <= rows < len(labels_N):
            return self._nll(hidden_ND, labels_N)
        pairs = zip(torch.split(hidden_ND, rows), torch.split(labels_N, rows), strict=True)
        return torch.cat([self._nll(hidden, labels) for hidden, labels in pairs])

    def _nll(self, hidden_ND: Tensor, labels_N: Tensor) -> Tensor:
        logits_NV = self.logits(hidden_ND).float()
        return F.cross_entropy(logits_NV, labels_N, ignore_index=IGNORED, reduction="none")
