"""From hidden states to a loss: the output part owns the logits and the negative log-likelihood."""

# N positions that are looked at, D width, V vocabulary

from __future__ import annotations

from typing import NoReturn, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trivium.errors import RequestError
from trivium.labels import IGNORED
from trivium.parts.activations import ACTIVATIONS
from trivium.parts.dropout import dropout
from trivium.parts.linear import Linear, give_bias
from trivium.parts.options.output import MaskedOutputOptions, SoftmaxOptions
from trivium.parts.site import Site


class Head(Protocol):
    """What every output module can do with hidden states."""

    def logits(self, hidden: Tensor) -> Tensor:
        """The scores of every id, in the dtype of the model."""

    def nll(self, hidden: Tensor, labels: Tensor, *, smoothing: float = 0.0) -> Tensor:
        """The negative log-likelihood of each label in nats, float32; exactly 0 where the label is ignored.

        With `smoothing` that share of each label's probability is spread evenly over all ids, the label among them.
        """

    def loss(self, hidden: Tensor, labels: Tensor, *, smoothing: float = 0.0) -> Tensor:
        """The sum of `nll`."""


class VocabularyOutput(nn.Module):
    """The base of outputs over the vocabulary: `project(before(hidden))`, and its cross-entropy.

    `forward` is the only way in, so that hooks on the module see every use.
    """

    project: Linear
    cap: float = 0.0  # bounds logits by `cap * tanh(logits / cap)`

    def before(self, hidden: Tensor) -> Tensor:
        """The states as the matrix over the vocabulary reads them."""
        raise NotImplementedError

    def forward(
        self, hidden: Tensor, labels: Tensor | None = None, smoothing: float = 0.0, *, summed: bool = False
    ) -> Tensor:
        """The logits; with `labels` their negative log-likelihoods, or the sum of those."""
        if labels is None:
            return self.scores(self.before(hidden))
        each_N = self.cross_entropy(hidden, labels, smoothing)
        return each_N.sum() if summed else each_N

    def scores(self, states: Tensor) -> Tensor:
        result: Tensor = self.project(states)
        return self.cap * torch.tanh(result / self.cap) if self.cap else result

    def cross_entropy(self, hidden_ND: Tensor, labels_N: Tensor, smoothing: float) -> Tensor:
        logits_NV = self.scores(self.before(hidden_ND)).float()
        return F.cross_entropy(logits_NV, labels_N, ignore_index=IGNORED, reduction="none", label_smoothing=smoothing)

    def logits(self, hidden: Tensor) -> Tensor:
        result: Tensor = self(hidden)
        return result

    def nll(self, hidden: Tensor, labels: Tensor, *, smoothing: float = 0.0) -> Tensor:
        result: Tensor = self(hidden, labels, smoothing)
        return result

    def loss(self, hidden: Tensor, labels: Tensor, *, smoothing: float = 0.0) -> Tensor:
        result: Tensor = self(hidden, labels, smoothing, summed=True)
        return result


class SoftmaxOutput(VocabularyOutput):
    """`softmax(hidden Wᵀ + b)`, by option scaled and soft-capped; W may be the embedding's own matrix."""

    def __init__(self, options: SoftmaxOptions, site: Site, tied: nn.Parameter | None) -> None:
        super().__init__()
        self.cap = options.cap
        self.scale = site.width**-0.5 if options.scale == "root" else 1.0
        self.dropout = options.dropout
        self.project = _projection(site, tied, bias=options.bias and not options.fixed)
        if options.fixed:
            give_bias(self.project, torch.zeros(site.vocab))

    def before(self, hidden: Tensor) -> Tensor:
        hidden = dropout(hidden, self.dropout, self.training)
        return hidden * self.scale if self.scale != 1.0 else hidden


class MaskedOutput(VocabularyOutput):
    """BERT's head: `softmax(norm(act(hidden W₁ + b₁)) W₂ᵀ + b₂)` (Devlin et al. 2019)."""

    def __init__(self, options: MaskedOutputOptions, site: Site, tied: nn.Parameter | None) -> None:
        super().__init__()
        self.transform = Linear(site.width, site.width, bias=True, role="transform")
        self.activation = ACTIVATIONS[options.activation]
        self.norm = options.norm.build(site)
        self.project = _projection(site, tied, bias=True)

    def before(self, hidden: Tensor) -> Tensor:
        result: Tensor = self.norm(self.activation(self.transform(hidden)))
        return result


class NoOutput(nn.Module):
    """The output of an encoder without a vocabulary: it refuses."""

    def forward(self, hidden: Tensor) -> Tensor:
        self._refuse()

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
