from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trivium.data.loader import Order, share
from trivium.errors import ConfigError, DataError

SEEDS = st.integers(-(2**63), 2**64 - 1)


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 40), st.integers(1, 50), SEEDS)
def test_every_epoch_shows_every_row_once(rows: int, batch: int, seed: int) -> None:
    order = Order(rows, batch, seed)
    seen = np.concatenate([order.batch(cursor) for cursor in range(0, 3 * rows + batch, batch)])
    for epoch in range(3):
        assert sorted(seen[epoch * rows : (epoch + 1) * rows].tolist()) == list(range(rows))


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 40), st.lists(st.integers(1, 17), max_size=12), st.integers(0, 2**62))
def test_the_order_does_not_depend_on_how_it_is_asked_for(rows: int, sizes: list[int], seed: int) -> None:
    epochs = range((sum(sizes) + 5) // rows + 1)
    plain = np.concatenate(
        [np.random.Generator(np.random.Philox(key=[seed, epoch])).permutation(rows) for epoch in epochs]
    )
    cursor = 0
    order = Order(rows, 5, seed)
    for size in sizes:
        asked = Order(rows, size, seed).batch(cursor)  # a fresh object: a resume has no history
        assert asked.tolist() == plain[cursor : cursor + size].tolist()
        assert order.batch(cursor).tolist() == plain[cursor : cursor + 5].tolist()
        assert order.batch(0).tolist() == plain[:5].tolist()  # going back is as good as going on
        cursor += size
    assert order.epoch(cursor) == cursor / rows


def test_epochs_and_seeds_differ() -> None:
    orders = [Order(1000, 1000, seed).batch(1000 * epoch).tolist() for seed in (0, 1, 2**40) for epoch in range(3)]
    assert len({tuple(order) for order in orders}) == 9


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 64), st.integers(1, 9), st.integers(1, 9))
def test_the_ranks_together_see_the_global_batch_in_order(size: int, world: int, micro: int) -> None:
    rows = Order(1000, size, 0).batch(500)
    try:
        shares = [share(rows, rank=rank, world=world, micro=micro) for rank in range(world)]
    except ConfigError:
        assert size % world
        return
    assert np.concatenate([part for parts in shares for part in parts]).tolist() == rows.tolist()
    assert len({len(parts) for parts in shares}) == 1
    assert all(1 <= len(part) <= micro for parts in shares for part in parts)


def test_a_batch_smaller_than_the_world_is_refused() -> None:
    with pytest.raises(ConfigError, match="3 rows do not spread over 4 ranks; try a multiple of 4"):
        share(np.arange(3), rank=0, world=4, micro=8)


def test_a_text_without_a_row_is_refused() -> None:
    with pytest.raises(DataError, match="too short"):
        Order(0, 4, 0)


def test_every_epoch_but_the_first_is_moved_by_its_own_shift_which_the_seed_decides() -> None:
    def shifts(seed: int, source: int = 0) -> list[int]:
        order = Order(10, 10, seed, source, shifts=64, apart=1000)
        plain = Order(10, 10, seed, source)
        found = []
        for cursor in range(0, 2000, 10):
            moved = order.batch(cursor) - plain.batch(cursor)  # the permutation is the same
            assert len(set(moved.tolist())) == 1
            found.append(int(moved[0]))
        return found

    one = shifts(0)
    assert one[0] == 0
    assert set(one) <= {1000 * shift for shift in range(64)}
    assert len(set(one)) > 50  # of 64, in 199 draws
    assert shifts(0) == one
    assert shifts(1)[1:] != one[1:]
    assert shifts(0, source=1)[1:] != one[1:]
