"""Shaw's vectors, T5's buckets and ALiBi against worked numbers, slow plain versions and their invariances."""

# B batch, T queries, S keys, H heads, E head size

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.parts.drawing import drawn, random
from trivium.config import load
from trivium.errors import ConfigError
from trivium.parts.options.positions import AlibiOptions, BucketOptions, Position, ShawOptions
from trivium.parts.positions import BucketPositions, Positions, ShawPositions
from trivium.parts.site import Site

SITE = Site(width=16, context=12, heads=3, head=8, value=6)
ENCODER = Site(width=16, context=12, heads=3, head=8, value=6, causal=False)
SHAWS = [
    ShawOptions(distance=2),
    ShawOptions(distance=4, values="none"),
    ShawOptions(distance=3, tables="per-head"),
    ShawOptions(distance=1, values="none", tables="per-head"),
]
shaws = pytest.mark.parametrize("options", SHAWS, ids=repr)


def filled(options: Position, site: Site = SITE, seed: int = 0) -> Positions:
    """The built scheme with random tables."""
    return drawn(options.build(site), seed)


def attend(part: Positions, at_BT: Tensor, keys_at_BS: Tensor, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Attention in plain steps with all that a scheme may add."""
    prepared = part.prepare(at_BT, keys_at_BS)
    products, scale = query @ key.transpose(-1, -2), query.shape[-1] ** -0.5
    score, bias = part.score(query, prepared), part.bias(prepared)
    scores = (products if score is None else products + score) * scale
    weights_BHTS = (scores if bias is None else scores + bias).softmax(-1)
    added = part.value(weights_BHTS, prepared)
    mixed: Tensor = weights_BHTS @ value
    return mixed if added is None else mixed + added


# Shaw


@shaws
@settings(max_examples=15, deadline=None)
@given(data=st.data(), seed=st.integers(0, 99))
def test_shaw_equals_the_formula_with_a_vector_for_every_pair(options: ShawOptions, data: Any, seed: int) -> None:
    part = filled(options, seed=seed)
    assert isinstance(part, ShawPositions)
    at_BT = torch.tensor(
        data.draw(st.lists(st.lists(st.integers(0, 11), min_size=4, max_size=4), min_size=2, max_size=2))
    )
    keys_at_BS = torch.tensor(
        data.draw(st.lists(st.lists(st.integers(0, 11), min_size=5, max_size=5), min_size=2, max_size=2))
    )
    query, key, value = (
        random(2, 3, 4, 8, seed=seed),
        random(2, 3, 5, 8, seed=seed + 1),
        random(2, 3, 5, 6, seed=seed + 2),
    )
    actual = attend(part, at_BT, keys_at_BS, query, key, value)
    for b in range(2):
        for h in range(3):
            tables = [
                None if table is None else table[h] if options.tables == "per-head" else table
                for table in (part.key_table, part.value_table)
            ]
            for i in range(4):
                ahead = (keys_at_BS[b] - at_BT[b, i]).clamp(-options.distance, options.distance) + options.distance
                assert tables[0] is not None
                scores = (key[b, h] + tables[0][ahead]) @ query[b, h, i] / 8**0.5
                values = value[b, h] if tables[1] is None else value[b, h] + tables[1][ahead]
                torch.testing.assert_close(actual[b, h, i], scores.softmax(-1) @ values, atol=1e-5, rtol=1e-5)


@shaws
def test_shaw_with_empty_tables_is_plain_attention(options: ShawOptions) -> None:
    part, at = options.build(SITE), torch.arange(5)[None]
    with torch.no_grad():
        for parameter in part.parameters():
            parameter.zero_()
    query, key, value = random(2, 3, 5, 8), random(2, 3, 5, 8, seed=1), random(2, 3, 5, 6, seed=2)
    plain = torch.nn.functional.scaled_dot_product_attention(query, key, value)
    torch.testing.assert_close(attend(part, at, at, query, key, value), plain)


@pytest.mark.parametrize(
    "options", [*SHAWS, BucketOptions(), BucketOptions(buckets=8, distance=20), AlibiOptions()], ids=repr
)
@pytest.mark.parametrize("site", [SITE, ENCODER], ids=["causal", "both ways"])
def test_moving_all_positions_together_changes_nothing_and_moving_one_does(options: Position, site: Site) -> None:
    part, at = filled(options, site), torch.arange(6)[None]
    inputs = random(1, 3, 6, 8), random(1, 3, 6, 8, seed=1), random(1, 3, 6, 6, seed=2)
    here = attend(part, at, at, *inputs)
    torch.testing.assert_close(attend(part, at + 1000, at + 1000, *inputs), here)
    moved = at.clone()
    moved[0, 0] = 1
    assert not torch.allclose(attend(part, at, moved, *inputs), here)


@shaws
def test_the_gradients_of_shaw_are_those_of_finite_differences(options: ShawOptions) -> None:
    part = filled(options).double()
    at = torch.tensor([[0, 3, 4]])
    query, key = (random(1, 3, 3, 8, seed=seed).double().requires_grad_() for seed in range(2))
    value = random(1, 3, 3, 6, seed=2).double().requires_grad_()
    # the tables are the module's own: gradcheck nudges its inputs in place
    assert torch.autograd.gradcheck(
        lambda query, key, value, *tables: attend(part, at, at, query, key, value),
        (query, key, value, *part.parameters()),
    )


def test_shaw_counts_the_worked_parameters() -> None:
    site = Site(width=512, context=64, heads=8, head=64, value=64)
    assert ShawOptions(values="none").cost(site).parameters == 2_112
    assert ShawOptions().cost(site).parameters == 4_224
    assert ShawOptions(tables="per-head").cost(site).parameters == 8 * 4_224
    assert ShawOptions().cost(site).flops == 8 * 33 * (
        2 * 64 + 2 * 64
    )  # a product with each row of either table, per head


def test_shaw_says_whether_values_are_added() -> None:
    assert ShawOptions().build(SITE).values
    part = ShawOptions(values="none").build(SITE)
    assert not part.values
    assert part.value(random(1, 3, 2, 2), part.prepare(torch.arange(2)[None], torch.arange(2)[None])) is None


# T5


def bucket(ahead: int, site: Site, options: BucketOptions | None = None) -> int:
    """The bucket of a key so many tokens ahead, read from a table that holds its own row numbers."""
    part = (options or BucketOptions()).build(replace(site, context=6001))
    assert isinstance(part, BucketPositions)
    with torch.no_grad():
        part.table.copy_(torch.arange(len(part.table))[:, None].expand_as(part.table))
    at = torch.tensor([[1000]])
    bias = part.bias(part.prepare(at, at + ahead))
    assert bias.shape == (1, 3, 1, 1)
    return int(bias[0, 0])


BOTH = {-200: 15, -64: 14, -32: 12, -16: 10, -8: 8, -7: 7, -1: 1, 0: 0, 1: 17, 7: 23, 8: 24, 16: 26, 64: 30, 90: 30}
BOTH |= {91: 31, 128: 31, 5000: 31}
CAUSAL = {-8: 8, -15: 15, -16: 16, -20: 17, -32: 21, -64: 26, -100: 30, -112: 30, -113: 31, -5000: 31}
CAUSAL |= {1: 0, 7: 0, 5000: 0}


@pytest.mark.parametrize(("ahead", "expected"), BOTH.items())
def test_buckets_both_ways_give_the_worked_numbers(ahead: int, expected: int) -> None:
    assert bucket(ahead, ENCODER) == expected


@pytest.mark.parametrize(("ahead", "expected"), CAUSAL.items())
def test_causal_buckets_give_the_worked_numbers(ahead: int, expected: int) -> None:
    assert bucket(ahead, SITE) == expected


def test_a_bias_is_the_entry_of_its_bucket_and_head() -> None:
    part = filled(BucketOptions(), replace(ENCODER, context=201))
    assert isinstance(part, BucketPositions)
    bias_BHTS = part.bias(part.prepare(torch.tensor([[3, 9], [0, 0]]), torch.tensor([[3, 2, 16, 200]])))
    assert bias_BHTS.shape == (2, 3, 2, 4)
    torch.testing.assert_close(bias_BHTS[0, :, 0, 0], part.table[0])  # r = 0
    torch.testing.assert_close(bias_BHTS[0, :, 1, 1], part.table[7])  # r = -7
    torch.testing.assert_close(bias_BHTS[1, :, 0, 2], part.table[26])  # r = 16
    torch.testing.assert_close(bias_BHTS[1, :, 1, 3], part.table[31])  # r = 200


def test_a_table_of_buckets_is_no_longer_than_the_context() -> None:
    """A stranger's file may name a distance of millions; the buckets of shorter ones do not change."""
    far, near = (filled(BucketOptions(distance=distance), ENCODER) for distance in (10_000_000, 50))
    assert isinstance(far, BucketPositions)
    assert far.constant.numel() == 2 * ENCODER.context + 1
    at = torch.arange(ENCODER.context)[None]
    assert far.prepare(at, at).isfinite().all()
    wide = filled(BucketOptions(distance=50), replace(ENCODER, context=100))
    torch.testing.assert_close(near.prepare(at, at), wide.prepare(at, at))


def test_buckets_count_the_worked_parameters() -> None:
    assert BucketOptions().cost(Site(width=512, context=512, heads=8, head=64)).parameters == 32 * 8


# ALiBi


def slopes(heads: int) -> list[float]:
    """The scores' fall per token, head by head."""
    part = AlibiOptions().build(Site(width=16, context=12, heads=heads, head=4))
    bias = part.bias(part.prepare(torch.tensor([[5]]), torch.tensor([[4]])))
    assert bias is not None
    return (-bias[0, :, 0, 0]).tolist()


def test_alibi_gives_the_worked_slopes() -> None:
    eight = [1 / 2, 1 / 4, 1 / 8, 1 / 16, 1 / 32, 1 / 64, 1 / 128, 1 / 256]
    assert slopes(8) == pytest.approx(eight)
    assert slopes(12) == pytest.approx([*eight, 0.707107, 0.353553, 0.176777, 0.088388], abs=1e-6)
    assert slopes(1) == pytest.approx([1 / 256])
    assert slopes(3) == pytest.approx([1 / 16, 1 / 256, 1 / 4])


@settings(max_examples=25, deadline=None)
@given(heads=st.integers(1, 40), i=st.integers(0, 5000), j=st.integers(0, 5000))
def test_alibi_falls_with_the_distance_the_same_way_in_both_directions(heads: int, i: int, j: int) -> None:
    part = AlibiOptions().build(Site(width=16, context=12, heads=heads, head=4, causal=False))
    bias = part.bias(part.prepare(torch.tensor([[i, j]]), torch.tensor([[i, j]])))
    assert bias is not None
    expected = torch.tensor(slopes(heads)) * -abs(i - j)
    for query, key in ((0, 1), (1, 0)):
        torch.testing.assert_close(bias[0, :, query, key], expected)
    assert bias[0, :, 0, 0].abs().max() == 0
    assert len(set(slopes(heads))) == heads


# refusals


@pytest.mark.parametrize(
    ("kind", "settings", "key"),
    [
        (ShawOptions, {"distance": 0}, "distance"),
        (ShawOptions, {"values": "all"}, "values"),
        (ShawOptions, {"tables": "own"}, "tables"),
        (BucketOptions, {"buckets": 1}, "buckets"),
        (BucketOptions, {"distance": 0}, "distance"),
    ],
)
def test_a_wrong_setting_is_refused_by_its_key(kind: type[Any], settings: dict[str, object], key: str) -> None:
    with pytest.raises(ConfigError, match=f"^{key}:"):
        load(kind, settings)


@pytest.mark.parametrize(
    ("options", "site", "message"),
    [
        (BucketOptions(buckets=6, distance=3), SITE, "distance: 3 is not beyond the 3"),
        (BucketOptions(buckets=32, distance=8), ENCODER, "distance: 8 is not beyond the 8"),
        (BucketOptions(buckets=7), ENCODER, "buckets: 7 cannot be halved"),
        (BucketOptions(buckets=2), ENCODER, "buckets: 2 cannot be halved"),
        (BucketOptions(), Site(width=16, context=12), "t5 positions act on the scores"),
        (AlibiOptions(), Site(width=16, context=12), "alibi positions act on the scores"),
        (ShawOptions(), Site(width=16, context=12), "shaw positions act on the scores"),
    ],
    ids=repr,
)
def test_a_scheme_that_cannot_stand_there_says_so(options: Position, site: Site, message: str) -> None:
    for ask in (options.build, options.cost):
        with pytest.raises(ConfigError, match=message):
            ask(site)


@pytest.mark.parametrize(
    ("options", "site"), [(BucketOptions(buckets=4, distance=3), SITE), (BucketOptions(buckets=4, distance=2), ENCODER)]
)
def test_the_smallest_buckets_are_all_used(options: BucketOptions, site: Site) -> None:
    used = {bucket(ahead, site, options) for ahead in range(-9, 10)}
    unused = set() if site.causal else {options.buckets // 2}  # "0 ahead" of the future: the past has it
    assert used == set(range(options.buckets)) - unused
