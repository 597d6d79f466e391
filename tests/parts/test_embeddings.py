"""Embeddings against a plain look-up."""

from __future__ import annotations

import pytest
import torch

from trivium.errors import ConfigError
from trivium.parts.embeddings import Tokens
from trivium.parts.site import Site

SITE = Site(width=4, context=8, vocab=9)


def test_an_id_is_looked_up_as_its_row() -> None:
    part = Tokens().build(SITE)
    with torch.no_grad():
        part.weight.copy_(torch.arange(36.0).view(9, 4))
    ids = torch.tensor([[0, 8], [3, 3]])
    expected = [[[0.0, 1, 2, 3], [32, 33, 34, 35]], [[12, 13, 14, 15]] * 2]
    assert part.enter(ids).tolist() == expected


def test_an_id_outside_the_vocabulary_is_an_error() -> None:
    part = Tokens().build(SITE)
    for id in (9, -1):
        with pytest.raises(IndexError):
            part.enter(torch.tensor([[id]]))


def test_dropout_falls_on_the_sum_with_the_positions_in_training_only() -> None:
    part, x = Tokens(dropout=0.5).build(SITE), torch.ones(50, 4)
    torch.manual_seed(0)
    assert set(part.leave(x).flatten().tolist()) == {0.0, 2.0}
    assert torch.equal(part.eval().leave(x), x)


def test_cost_counts_the_table_and_no_arithmetic() -> None:
    assert tuple(Tokens().cost(SITE)) == (36, 0)
    assert Tokens().build(SITE).weight.numel() == 36


def test_a_dropout_of_one_is_refused() -> None:
    with pytest.raises(ConfigError, match="dropout"):
        Tokens(dropout=1.0)
