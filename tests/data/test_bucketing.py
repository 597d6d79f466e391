"""Pairs as rows of a stream, and batches of them by padded tokens: nothing lost, nothing twice, nothing too large."""

from __future__ import annotations

import gzip
import itertools
import re
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.data.test_packing import END, stream
from trivium.data.bucketing import Buckets, Pairs, at_once, balanced, cuts
from trivium.data.loader import Order, share
from trivium.errors import ConfigError, DataError

Sizes = npt.NDArray[np.int64]
SIDE = st.lists(st.integers(0, 8), min_size=1, max_size=7)
TEXTS = st.lists(st.tuples(SIDE, SIDE), min_size=1, max_size=9)
SIZES = st.lists(st.tuples(st.integers(2, 30), st.integers(2, 30)), min_size=1, max_size=60).map(np.array)


def documents(texts: list[tuple[list[int], list[int]]]) -> list[list[int]]:
    return [side for pair in texts for side in pair]


@settings(max_examples=150, deadline=None)
@given(TEXTS, st.integers(2, 9), st.data())
def test_rows_of_pairs_are_what_a_plain_loop_gives(
    texts: list[tuple[list[int], list[int]]], length: int, data: st.DataObject
) -> None:
    pairs = Pairs(stream(documents(texts)), length)
    fitting = [pair for pair in texts if all(len(side) + 1 <= length for side in pair)]
    assert (len(pairs), pairs.too_long) == (len(fitting), len(texts) - len(fitting))
    assert pairs.sizes.tolist() == [[len(source) + 1, len(target) + 1] for source, target in fitting]
    assert pairs.labels == sum(len(target) + 1 for _, target in fitting)
    chosen = data.draw(st.lists(st.integers(0, len(fitting) - 1), max_size=6)) if fitting else []
    batch = pairs.take(np.array(chosen, np.int64))
    rows = [[END, *fitting[i][0], END, *fitting[i][1], END] for i in chosen]
    width = max(map(len, rows), default=1)
    assert batch.ids.shape == (len(rows), width)
    assert batch.labels.shape == batch.documents.shape == (len(rows), width - 1)
    for row, ids, labels, numbers, i in zip(rows, batch.ids, batch.labels, batch.documents, chosen, strict=True):
        filled = width - len(row)
        assert ids.tolist() == row + [END] * filled
        assert labels.tolist() == row[1:] + [-100] * filled
        sides = [len(side) + 1 for side in fitting[i]]
        assert numbers.tolist() == [1] * sides[0] + [2] * sides[1] + [0] * filled
    begins = [int(at) for at in pairs.first(np.array(chosen, np.int64))]
    for at, row in zip(begins, rows, strict=True):
        assert pairs.stream.ids[at : at + len(row)].tolist() == row
    assert batch.numbers.tolist() == chosen
    assert batch.stream is pairs.stream
    assert [array.dtype.name for array in batch[:4]] == ["int64", "int64", "int32", "int64"]


def test_a_pair_that_is_not_there_is_refused() -> None:
    pairs = Pairs(stream([[1], [2, 3], [4], [5]]), 8)
    assert pairs.length == 8
    for numbers in ([-1], [2], [-1, 0], [1, 2]):
        with pytest.raises(IndexError, match="pairs are numbered from 0 to 1"):
            pairs.take(np.array(numbers))
    assert len(Pairs(stream([]), 8)) == 0


def test_starts_that_make_no_sense_are_refused() -> None:
    whole = stream([[1], [2, 3]])
    for starts in ([2, 1], [0, 2, 4], [0, 1]):
        broken = type(whole)(ids=whole.ids, starts=np.array(starts, np.int64), text_bytes=0)
        with pytest.raises(DataError, match="a side without a token; build the shards again"):
            Pairs(broken, 8)


def padded(sizes: Sizes, rows: npt.NDArray[np.int64], align: int) -> int:
    longest = int(sizes[rows].max())
    return len(rows) * (-(-longest // align) * align)


@settings(max_examples=150, deadline=None)
@given(SIZES, st.integers(32, 400), st.integers(0, 2**63), st.sampled_from([1, 8]), st.integers(0, 3))
def test_every_epoch_has_every_pair_once_and_no_batch_passes_the_budget(
    sizes: Sizes, tokens: int, seed: int, align: int, epoch: int
) -> None:
    buckets = Buckets(sizes, tokens, seed, align=align)
    cursors = range(epoch * len(buckets), (epoch + 1) * len(buckets))
    batches = [buckets.batch(cursor) for cursor in cursors]
    assert sorted(itertools.chain(*(batch.tolist() for batch in batches))) == list(range(len(sizes)))
    assert all(0 < padded(sizes, batch, align) <= tokens for batch in batches)
    assert 0 <= buckets.padding < 1


@settings(max_examples=100, deadline=None)
@given(SIZES, st.integers(32, 400), st.integers(0, 2**63), st.lists(st.integers(0, 200), min_size=1, max_size=8))
def test_a_batch_is_a_function_of_seed_and_cursor_alone(
    sizes: Sizes, tokens: int, seed: int, cursors: list[int]
) -> None:
    """Whatever was asked for before, as after a stop or a rollback."""
    used = Buckets(sizes, tokens, seed)
    for cursor in cursors:
        assert used.batch(cursor).tolist() == Buckets(sizes, tokens, seed).batch(cursor).tolist()


def test_epochs_and_seeds_differ_in_order_and_in_company() -> None:
    sizes = np.random.default_rng(0).integers(2, 12, (400, 2))

    def epoch(seed: int, number: int) -> list[list[int]]:
        buckets = Buckets(sizes, 120, seed)
        return [buckets.batch(number * len(buckets) + at).tolist() for at in range(len(buckets))]

    first, second, other = epoch(0, 0), epoch(0, 1), epoch(1, 0)
    for one, two in ((first, second), (first, other)):
        assert [int(sizes[batch].max()) for batch in one] != [int(sizes[batch].max()) for batch in two]
        again = {frozenset(batch) for batch in one} & {frozenset(batch) for batch in two}
        assert len(again) < len(one) / 10
        assert len(one) == len(two)
    lengths = [int(sizes[batch].max()) for batch in first]
    assert lengths != sorted(lengths)


def permutation(rows: int, seed: int, epoch: int, source: int) -> list[int]:
    """What numpy's Philox gives: a run that goes on with a later release must see the batches it would have seen."""
    bits = np.random.Philox(key=[seed, epoch], counter=[0, 0, 0, source])
    return [int(row) for row in np.random.Generator(bits).permutation(rows)]


@pytest.mark.parametrize("epoch", [0, 1, 2])
def test_the_order_of_pairs_and_of_batches_are_two_permutations_of_seed_and_epoch(epoch: int) -> None:
    buckets = Buckets(np.full((30, 2), 5), 15, 7, size=4)  # pairs of one length, so that nothing else orders them
    pairs, order = permutation(30, 7, epoch, 0), permutation(10, 7, epoch, 1)
    batches = [buckets.batch(4 * (10 * epoch + at)).tolist() for at in range(10)]
    assert batches == [pairs[3 * number : 3 * number + 3] for number in order]


@pytest.mark.parametrize("align", [1, 4])
def test_neighbours_have_the_same_longer_side_to_and_fro(align: int) -> None:
    """All pairs in one batch: by the longer side, and at every second length those with the longer source first."""
    sizes = np.array([*itertools.product(range(2, 17), repeat=2)])
    widths = -(-sizes // align) * align
    order = Buckets(sizes, 100_000, 0, align=align).batch(0)
    found = [key for key, _ in itertools.groupby((int(max(w)), bool(w[0] > w[1])) for w in widths[order].tolist())]
    lengths = sorted({int(longest) for longest in widths.max(axis=1)})
    sides = {length: {bool(w[0] > w[1]) for w in widths.tolist() if max(w) == length} for length in lengths}
    assert found == [(n, side) for n in lengths for side in sorted(sides[n], reverse=n // align % 2 == 1)]


def test_batches_of_other_pairs_come_in_one_order_and_hold_the_longest() -> None:
    """As for validation: whatever the seed, and 104 tokens for a pair of 99 even if fewer were asked for."""
    others = np.random.default_rng(2).integers(2, 99, (60, 2))
    others[17] = (99, 5)
    for tokens, room in ((50, 104), (104, 104), (105, 105), (900, 900)):
        found = [Buckets(np.array([[3, 4]]), 600, seed, size=9, align=8).like(others, tokens) for seed in (3, 4)]
        batches = [[one.batch(cursor).tolist() for cursor in range(len(one))] for one in found]
        assert batches[0] == batches[1]
        assert [found[0].size, found[0].align] == [1, 8]
        assert batches[0] == [Buckets(others, room, 0, align=8).batch(at).tolist() for at in range(len(found[0]))]
    assert found[0].longest(np.array([17])) == 104
    with pytest.raises(DataError, match="there is no pair to learn from"):
        found[0].like(np.empty((0, 2), np.int64), 50)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(1, 20), min_size=1, max_size=40), st.integers(20, 100))
def test_cuts_are_what_a_plain_loop_gives_and_balancing_costs_no_batch(lengths: list[int], tokens: int) -> None:
    longest = np.sort(np.array(lengths))
    borders, start = [0], 0
    for at in range(len(longest)):
        if (at + 1 - start) * longest[at] > tokens:
            borders.append(at)
            start = at
    borders.append(len(longest))
    assert cuts(longest, tokens) == borders

    def largest(found: list[int]) -> int:
        return max((stop - start) * int(longest[stop - 1]) for start, stop in itertools.pairwise(found))

    even = balanced(longest, tokens)
    assert len(even) == len(borders)
    assert largest(even) <= largest(borders) <= tokens


def test_balancing_leaves_no_stub() -> None:
    longest = np.full(101, 10)
    assert np.diff(cuts(longest, 500)).tolist() == [50, 50, 1]
    assert np.diff(balanced(longest, 500)).tolist() == [34, 34, 33]


def test_the_padding_is_what_the_batches_have() -> None:
    sizes = np.random.default_rng(1).integers(2, 40, (300, 2))
    for align, tokens in ((1, 600), (8, 600), (1, 80)):  # in batches of few pairs epochs differ
        buckets = Buckets(sizes, tokens, 3, align=align)
        room = 0
        for cursor in range(len(buckets)):
            widths = sizes[buckets.batch(cursor)].max(axis=0)
            room += int((-(-widths // align) * align).sum()) * len(buckets.batch(cursor))
        assert buckets.padding == pytest.approx(1 - sizes.sum() / room)


def test_portions_keep_to_a_smaller_budget_and_to_the_order() -> None:
    sizes = np.random.default_rng(1).integers(2, 40, (300, 2))
    buckets = Buckets(sizes, 600, 3)
    for cursor in range(len(buckets)):
        rows = buckets.batch(cursor)
        parts = share(rows, rank=0, world=1, micro=at_once(buckets, rows, 150))
        assert np.concatenate(parts).tolist() == rows.tolist()
        assert all(padded(sizes, part, 1) <= 150 for part in parts)
    assert at_once(buckets, np.array([0]), 1) == 1
    assert at_once(Order(300, 10, 0), np.arange(10), 7) == 7  # rows of text are counted, not measured


def test_the_cursor_moves_by_the_size_that_it_is_given() -> None:
    """As a run that goes back reckons: `size` for every batch, and nothing between two of them."""
    sizes = np.random.default_rng(1).integers(2, 40, (300, 2))
    one, many = Buckets(sizes, 600, 3), Buckets(sizes, 600, 3, size=32)
    assert (one.size, many.size) == (1, 32)
    for cursor in range(2 * len(one)):
        for within in (0, 1, 31):
            assert one.batch(cursor).tolist() == many.batch(32 * cursor + within).tolist()


def test_what_cannot_be_batched_is_refused_in_a_sentence() -> None:
    with pytest.raises(ConfigError, match=r"batch\.tokens: 100 are less than the longest pair's 104; set it to 104"):
        Buckets(np.array([[99, 3], [5, 6]]), 100, 0, align=8)
    with pytest.raises(DataError, match="there is no pair to learn from"):
        Buckets(np.empty((0, 2), np.int64), 100, 0)


def test_on_multi30k_less_than_a_tenth_is_padding(shared: Path) -> None:
    sides = []
    for side in ("en", "de"):
        path = shared / "data" / "multi30k" / f"train.{side}.gz"
        if not path.is_file():
            pytest.skip("needs Multi30k")
        sides.append(gzip.decompress(path.read_bytes()).decode().split("\n")[:-1])
    # words, a long one in two: within a tenth of what a BPE of 8,000 pieces gives
    sizes = np.array([[len(re.findall(r"\w{1,9}|[^\w\s]", line)) + 1 for line in side] for side in sides]).T
    shuffled = np.array_split(np.random.default_rng(0).permutation(len(sizes)), 120)
    room = sum(int(sizes[rows].max(axis=0).sum()) * len(rows) for rows in shuffled)
    assert 1 - sizes.sum() / room > 0.4  # without buckets
    for tokens, most in ((4096, 0.07), (25_000, 0.1)):
        buckets = Buckets(sizes, tokens, 0)
        assert buckets.padding < most
        real = sum(len(buckets.batch(cursor)) for cursor in range(len(buckets)))
        assert real == 29_000
