"""From hidden states to a loss: the output part owns the logits and the negative log-likelihood."""

# N positions that are looked at, D width, V vocabulary

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trivium.errors import RequestError
from trivium.kernels.hardware import working
from trivium.kernels.loss import summed
from trivium.labels import IGNORED
from trivium.parts.dropout import dropout
from trivium.parts.feedforward import ACTIVATIONS
from trivium.parts.linear import Linear, give_bias, is_plain
from trivium.parts.options.output import MaskedHead, Softmax
from trivium.parts.site import Site

# On the CPU the loss goes in chunks of 16 MB of logits: malloc hands blocks above 32 MB back to the system, and then
# every step pays for their pages again (3 % of a step with 10M parameters). Below 256 rows a chunk, adding up the
# gradient of a large output matrix costs more than that.
_CHUNK, _LEAST = 1 << 22, 256


class Head(Protocol):
    """What every output module can do with hidden states."""

    def logits(self, hidden: Tensor) -> Tensor: ...
    def nll(self, hidden: Tensor, labels: Tensor, *, smoothing: float = 0.0) -> Tensor: ...
    def loss(self, hidden: Tensor, labels: Tensor, *, smoothing: float = 0.0) -> Tensor: ...


class SoftmaxOutput(nn.Module):
    def __init__(self, options: Softmax, site: Site, tied: nn.Parameter | None) -> None:
        super().__init__()
        self.cap = options.cap
        self.scale = site.width**-0.5 if options.scale == "root" else 1.0
        self.dropout = options.dropout
        self.project = _projection(site, tied, bias=options.bias and not options.fixed)
        if options.fixed:
            give_bias(self.project, torch.zeros(site.vocab))

    def logits(self, hidden: Tensor) -> Tensor:
        """The scores of every id, in the dtype of the model."""
        result: Tensor = self.project(self._before(hidden))
        return self.cap * torch.tanh(result / self.cap) if self.cap else result

    def nll(self, hidden_ND: Tensor, labels_N: Tensor, *, smoothing: float = 0.0) -> Tensor:
        """The negative log-likelihood of each label in nats, float32; exactly 0 where the label is ignored.

        With `smoothing` that share of each label's probability is spread evenly over all ids, the label among them.
        """
        return _chunked(self.logits, self.project.out_features, hidden_ND, labels_N, smoothing)

    def loss(self, hidden_ND: Tensor, labels_N: Tensor, *, smoothing: float = 0.0) -> Tensor:
        """The sum of `nll`, in less time and memory: in training its gradients are made on the way."""
        if not _fusible(self.project, hidden_ND):
            return self.nll(hidden_ND, labels_N, smoothing=smoothing).sum()
        return _summed(self.project, self._before(hidden_ND), labels_N, self.cap, smoothing)

    def _before(self, hidden: Tensor) -> Tensor:
        """The states as the matrix sees them."""
        hidden = dropout(hidden, self.dropout, self.training)
        return hidden * self.scale if self.scale != 1.0 else hidden


class MaskedOutput(nn.Module):
    def __init__(self, options: MaskedHead, site: Site, tied: nn.Parameter | None) -> None:
        super().__init__()
        self.transform = Linear(site.width, site.width, bias=True, role="transform")
        self.activation = ACTIVATIONS[options.activation]
        self.norm = options.norm.build(site)
        self.project = _projection(site, tied, bias=True)

    def logits(self, hidden: Tensor) -> Tensor:
        """The scores of every id, in the dtype of the model."""
        result: Tensor = self.project(self._before(hidden))
        return result

    def nll(self, hidden_ND: Tensor, labels_N: Tensor, *, smoothing: float = 0.0) -> Tensor:
        """As that of the softmax."""
        return _chunked(self.logits, self.project.out_features, hidden_ND, labels_N, smoothing)

    def loss(self, hidden_ND: Tensor, labels_N: Tensor, *, smoothing: float = 0.0) -> Tensor:
        """As that of the softmax."""
        if not _fusible(self.project, hidden_ND):
            return self.nll(hidden_ND, labels_N, smoothing=smoothing).sum()
        return _summed(self.project, self._before(hidden_ND), labels_N, 0.0, smoothing)

    def _before(self, hidden: Tensor) -> Tensor:
        """The states as the matrix sees them."""
        result: Tensor = self.norm(self.activation(self.transform(hidden)))
        return result


class StatesOnly(nn.Module):
    def logits(self, hidden: Tensor) -> Tensor:
        self._refuse()

    def nll(self, hidden_ND: Tensor, labels_N: Tensor, *, smoothing: float = 0.0) -> Tensor:
        self._refuse()

    def loss(self, hidden_ND: Tensor, labels_N: Tensor, *, smoothing: float = 0.0) -> Tensor:
        self._refuse()

    def _refuse(self) -> NoReturn:
        raise RequestError("this model has no output over the vocabulary: use its states, or load one with such a head")


def _projection(site: Site, tied: nn.Parameter | None, *, bias: bool) -> Linear:
    project = Linear(site.width, site.vocab, bias=bias, role="head")
    if tied is not None:
        project.weight = tied  # one storage: both uses add to its gradient, and it is saved once
    return project


def _chunked(
    logits: Callable[[Tensor], Tensor], vocab: int, hidden_ND: Tensor, labels_N: Tensor, smoothing: float
) -> Tensor:
    """The loss of each label; on the CPU some rows at a time."""

    def nll(hidden: Tensor, labels: Tensor) -> Tensor:
        scores = logits(hidden).float()
        return F.cross_entropy(scores, labels, ignore_index=IGNORED, reduction="none", label_smoothing=smoothing)

    rows = _CHUNK // vocab
    if hidden_ND.device.type != "cpu" or not _LEAST <= rows < len(labels_N):
        return nll(hidden_ND, labels_N)
    pairs = zip(torch.split(hidden_ND, rows), torch.split(labels_N, rows), strict=True)
    return torch.cat([nll(hidden, labels) for hidden, labels in pairs])


def _fusible(project: nn.Module, hidden: Tensor) -> bool:
    """Whether the output is a plain matrix, and gradients need no scale against underflow as they do in float16."""
    return is_plain(project) and working(hidden) != torch.float16


def _summed(project: Linear, hidden_ND: Tensor, labels_N: Tensor, cap: float, smoothing: float) -> Tensor:
    weight, bias, narrow = project.weight, project.bias, project.narrow
    return summed(hidden_ND, weight, bias, labels_N, cap=cap, smoothing=smoothing, narrow=narrow)
