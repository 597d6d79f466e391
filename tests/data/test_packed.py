"""Pairs packed into rows: each once, none torn, hardly any padding, another neighbour in every epoch."""

from __future__ import annotations

import gzip
import re
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.data.test_bucketing import TEXTS, documents
from tests.data.test_packing import END, stream
from trivium.data.bucketing import Pairs
from trivium.data.loader import Order
from trivium.data.packed import PackedPairs, filled
from trivium.data.packing import RowBatch
from trivium.errors import ConfigError, DataError
from trivium.labels import IGNORED

Texts = list[tuple[list[int], list[int]]]
SIZES = st.lists(st.tuples(st.integers(2, 20), st.integers(2, 20)), min_size=1, max_size=80)


def unpacked(batch: RowBatch) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """The pairs of some rows by a plain loop over their positions."""
    found = []
    for labels, numbers in zip(batch.labels, batch.documents, strict=True):
        assert all(number > 0 or label == IGNORED for label, number in zip(labels, numbers, strict=True))
        for source in range(1, int(numbers.max()), 2):
            sides = [tuple(labels[numbers == number].tolist()) for number in (source, source + 1)]
            found.append((sides[0], sides[1]))
    return found


@settings(max_examples=100, deadline=None)
@given(TEXTS, st.integers(8, 30), st.integers(0, 3), st.integers(0, 2**31 - 1))
def test_every_arrangement_has_every_pair_once(texts: Texts, width: int, seed: int, arrangement: int) -> None:
    pairs = Pairs(stream(documents(texts)), 40)
    rows = PackedPairs(pairs, width, seed)
    batch = rows.take(arrangement * len(rows) + np.arange(len(rows)))
    wanted = Counter(((*source, END), (*target, END)) for source, target in texts)
    assert Counter(unpacked(batch)) == wanted
    assert batch.labels.shape == (len(rows), sum(rows.widths))
    assert max(rows.widths) <= width
    split = rows.widths[0]
    for side, numbers in enumerate((batch.documents[:, :split], batch.documents[:, split:])):
        real = numbers > 0
        assert (real[:, :-1] >= real[:, 1:]).all()  # what fills a side up is at its end
        assert (numbers[real] % 2 == (side + 1) % 2).all()
    assert rows.labels == sum(len(target) + 1 for _, target in texts)
    tokens = sum(len(side) + 1 for pair in texts for side in pair)
    assert rows.padding == pytest.approx(1 - tokens / batch.labels.size)


@settings(max_examples=100, deadline=None)
@given(SIZES, st.integers(20, 60), st.integers(20, 60))
def test_rows_are_made_of_all_pairs_and_none_is_too_wide(
    sizes: list[tuple[int, int]], source: int, target: int
) -> None:
    kinds, counts = np.unique(np.array(sizes), axis=0, return_counts=True)
    rows = filled(kinds, counts, (source, target))
    assert np.array_equal(np.bincount(np.concatenate(rows), minlength=len(kinds)), counts)
    assert all((kinds[row].sum(axis=0) <= (source, target)).all() for row in rows)
    # no two rows would fit into one
    wholes = [kinds[row].sum(axis=0) for row in rows]
    lonely = sorted(tuple(whole) for whole in wholes)[:2]
    assert len(lonely) < 2 or any(np.array(lonely).sum(axis=0) > (source, target))


def test_an_epoch_of_batches_sees_every_pair_once_and_neighbours_change() -> None:
    rng = np.random.default_rng(0)
    texts: Texts = [
        ([number % 7] * rng.integers(1, 9), [1 + number // 100, number // 10 % 10, number % 10])
        for number in range(300)
    ]
    pairs = Pairs(stream(documents(texts)), 32)
    rows = PackedPairs(pairs, 32, 5)
    order = Order(len(rows), 4, 5, shifts=rows.shifts, apart=len(rows))
    together: list[set[frozenset[tuple[int, ...]]]] = []
    for epoch in range(3):
        seen, groups = [], set()
        for number in order.span(epoch * len(rows), len(rows)):
            found = [target for _, target in unpacked(rows.take(np.array([number])))]
            seen += found
            groups |= {frozenset((a, b)) for a in found for b in found if a < b}
        assert len(seen) == len(set(seen)) == 300
        together.append(groups)
    assert len(together[0] & together[1]) < 0.2 * len(together[0])
    assert together[1] != together[2]


def test_a_batch_is_a_function_of_its_numbers_alone() -> None:
    texts: Texts = [([number % 9] * (1 + number % 5), [number % 8] * (1 + number % 3)) for number in range(60)]
    pairs = Pairs(stream(documents(texts)), 16)
    one, other, third = PackedPairs(pairs, 16, 1), PackedPairs(pairs, 16, 1), PackedPairs(pairs, 16, 2)
    asked = [np.array([3, 5 * len(one) + 1]), np.array([7 * len(one)]), np.array([3, 0])]
    first = [one.take(numbers).labels for numbers in asked]
    again = [other.take(numbers).labels for numbers in reversed(asked)][::-1]
    assert all(np.array_equal(a, b) for a, b in zip(first, again, strict=True))
    assert not np.array_equal(third.take(np.arange(len(one))).labels, one.take(np.arange(len(one))).labels)


def test_what_does_not_fit_is_refused() -> None:
    pairs = Pairs(stream([[1] * 9, [2]]), 16)
    with pytest.raises(ConfigError, match=r"data\.pack: 8 is less than the longest pair's 10; set it to 10"):
        PackedPairs(pairs, 8, 0)
    with pytest.raises(ConfigError, match=r"data\.pack: 17 is more than a row may have; set it to 16 or less"):
        PackedPairs(pairs, 17, 0)
    with pytest.raises(DataError, match="no pair"):
        PackedPairs(Pairs(stream([[1] * 9, [2]]), 4), 4, 0)
    rows = PackedPairs(pairs, 16, 0)
    with pytest.raises(IndexError, match="numbered"):
        rows.take(np.array([-1]))


def test_rows_of_real_sentences_are_nearly_full(shared: Path) -> None:
    folder = shared / "data" / "multi30k"
    if not folder.is_dir():
        pytest.skip("needs Multi30k")
    sides = [gzip.decompress((folder / f"train.{side}.gz").read_bytes()).decode().splitlines() for side in ("en", "de")]
    sizes = np.array([[len(re.findall(r"\w{1,9}|[^\w\s]", line)) + 1 for line in side] for side in sides]).T
    texts: Texts = [([0] * (source - 1), [0] * (target - 1)) for source, target in sizes.tolist()]
    for width, least in ((64, 0.955), (128, 0.965), (256, 0.975)):
        assert 1 - PackedPairs(Pairs(stream(documents(texts)), 512), width, 0).padding > least
