"""A hidden token told from the two tokens around its span and its place in it (spec: objectives §5)."""

# N tokens of spans, D width, P size of a place

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trivium.parts.activations import ACTIVATIONS
from trivium.parts.declared import POSITION, Declared
from trivium.parts.linear import Linear
from trivium.parts.options.boundary import SpanBoundaryOptions
from trivium.parts.options.output import SoftmaxOptions
from trivium.parts.output import Head
from trivium.parts.site import Site


class SpanBoundaryHead(nn.Module):
    """SpanBERT's head: a token from the states at the borders of its span and its place (Joshi et al. 2020)."""

    declares: ClassVar[Mapping[str, Declared]] = {"places": POSITION}

    def __init__(self, options: SpanBoundaryOptions, site: Site, tied: nn.Parameter) -> None:
        super().__init__()
        self.places = nn.Parameter(torch.empty(options.rows, options.size))
        self.activation = ACTIVATIONS[options.activation]
        self.first = Linear(2 * site.width + options.size, site.width, bias=True, role="transform")
        self.first_norm = options.norm.build(site)
        self.second = Linear(site.width, site.width, bias=True, role="transform")
        self.second_norm = options.norm.build(site)
        self.output = SoftmaxOptions(bias=True).build(site, tied)

    def forward(self, left_ND: Tensor, right_ND: Tensor, places_N: Tensor) -> Tensor:
        """What the borders of a span say of its tokens, each by its place from 0 on; [N, D]."""
        x = torch.cat((left_ND, right_ND, F.embedding(places_N, self.places)), -1)
        x = self.first_norm(self.activation(self.first(x)))
        result: Tensor = self.second_norm(self.activation(self.second(x)))
        return result

    def states(self, left_ND: Tensor, right_ND: Tensor, places_N: Tensor) -> Tensor:
        """As `forward`."""
        result: Tensor = self(left_ND, right_ND, places_N)
        return result

    def nll(self, left_ND: Tensor, right_ND: Tensor, places_N: Tensor, labels_N: Tensor) -> Tensor:
        """The negative log-likelihood of each label in nats; exactly 0 where the label is ignored."""
        return cast(Head, self.output).nll(self(left_ND, right_ND, places_N), labels_N)
