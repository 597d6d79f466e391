"""Prefixes and what follows them: in one stack with a mask, in two with a source."""

# B rows, T tokens

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.objectives.samples import octets, random_rows, rows, scripted, tiny
from trivium.labels import IGNORED
from trivium.models.transformer import build
from trivium.objectives.options import Prefix
from trivium.objectives.prefix import PrefixTask


def bound(family: str, context: int) -> PrefixTask:
    tokenizer = octets(Prefix())
    return Prefix().bind(tokenizer, tiny(family, context, tokenizer.size))


ROWS = [[10, 11, 12, 13, 14], [20, 21, 22, 0, 0]], [5, 3]


def test_one_stack_predicts_the_first_token_behind_the_prefix_from_its_last() -> None:
    batch = bound("decoder", 4).inputs(rows(*ROWS), scripted([0.3, 0.6]))  # splits 2 of 1..4, 2 of 1..2
    assert batch.inputs["tokens"].tolist() == [[10, 11, 12, 13], [20, 21, 22, 0]]
    assert batch.inputs["prefix"].tolist() == [2, 2]
    assert batch.targets["labels"].tolist() == [[IGNORED, 12, 13, 14], [IGNORED, 22, IGNORED, IGNORED]]
    assert batch.counts["tokens"] == 4


def test_two_stacks_read_the_prefix_and_write_the_rest() -> None:
    task = bound("encoder-decoder", 4)
    pad = task.pad
    batch = task.inputs(rows(*ROWS), scripted([0.3, 0.6]))
    assert batch.inputs["source"].tolist() == [[10, 11, pad, pad], [20, 21, pad, pad]]
    assert batch.inputs["source_padding"].tolist() == [[True, True, False, False]] * 2
    assert batch.targets["labels"].tolist() == [[12, 13, 14, IGNORED], [22, IGNORED, IGNORED, IGNORED]]
    assert batch.inputs["tokens"][:, :3].tolist() == [[pad, 12, 13], [pad, 22, 0]]
    assert batch.counts["tokens"] == 4


def test_both_families_predict_the_same_tokens() -> None:
    given = random_rows(30, 16, 256, last=5)
    one, two = (bound(family, 16).inputs(given, np.random.default_rng(0)) for family in ("decoder", "encoder-decoder"))
    for row in range(30):
        labels, others = (batch.targets["labels"][row] for batch in (one, two))
        assert torch.equal(labels[labels != IGNORED], others[others != IGNORED])
        split = int(one.inputs["prefix"][row])
        assert two.inputs["source_padding"][row].sum() == split
        # prefix and labels together are the row
        rest = others[others != IGNORED].tolist()
        assert given.ids[row, : given.lengths[row] + 1].tolist() == [*given.ids[row, :split].tolist(), *rest]


def test_every_split_is_equally_likely() -> None:
    given = random_rows(16_000, 8, 256)
    splits = bound("decoder", 8).inputs(given, np.random.default_rng(0)).inputs["prefix"]
    seen = torch.bincount(splits, minlength=9)
    assert seen[0] == 0
    assert abs(seen[1:] - 2000).max() < 5 * (16_000 * 1 / 8 * 7 / 8) ** 0.5


@pytest.mark.parametrize("seed", range(3))
def test_a_prefix_sees_itself_both_ways_and_nothing_behind_it(seed: int) -> None:
    task, model = bound("decoder", 12), build(tiny("decoder", 12, 258), seed=2).eval()
    batch = task.inputs(random_rows(1, 12, 256), np.random.default_rng(seed))
    split = int(batch.inputs["prefix"][0])
    with torch.no_grad():
        before = model(**batch.inputs).hidden
        for place in range(12):
            tokens = batch.inputs["tokens"].clone()
            tokens[0, place] = (tokens[0, place] + 1) % 256
            changed = (model(**{**batch.inputs, "tokens": tokens}).hidden - before).abs().sum(-1)[0] > 1e-6
            assert changed.tolist() == [at >= place or place < split for at in range(12)]
