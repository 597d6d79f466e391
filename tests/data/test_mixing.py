"""Sources mixed by weight: shares that hold everywhere, whole epochs, and a cursor that says it all."""

from __future__ import annotations

import itertools
import json
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from trivium.data.config import DataConfig
from trivium.data.loader import Order, share
from trivium.data.mixing import PERIOD, Mixture, ordering, pattern, quotas, training_rows
from trivium.data.packing import Rows
from trivium.data.shards import Shards, Stream, build, open_shards
from trivium.data.sources import held_out
from trivium.errors import ConfigError, DataError
from trivium.text.kinds import Bytes, Words

WEIGHTS = st.lists(st.integers(1, 50), min_size=1, max_size=6)


@settings(max_examples=30, deadline=None)
@given(WEIGHTS)
@example([5, 100, 30, 100, 2, 3, 3, 50, 100, 30, 1, 50])  # here the largest debt first strays by more than a row
def test_after_any_number_of_rows_every_source_has_its_share_within_one_row(weights: list[int]) -> None:
    rows = quotas(weights)
    assert sum(rows) == PERIOD
    for count, weight in zip(rows, weights, strict=True):
        assert abs(Fraction(count) - Fraction(weight * PERIOD, sum(weights))) < 1
    chosen = pattern(rows)
    positions = np.arange(1, PERIOD + 1)
    for source, count in enumerate(rows):
        had = np.cumsum(chosen == source)
        # in whole numbers: |had - position * count / PERIOD| < 1
        assert (np.abs(had * PERIOD - positions * count) < PERIOD).all()
        assert had[-1] == count


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 30), st.integers(1, 9)), min_size=1, max_size=4), st.integers(1, 40))
def test_each_source_shows_all_its_rows_before_one_comes_again(parts: list[tuple[int, int]], batch: int) -> None:
    sizes, weights = [size for size, _ in parts], [weight for _, weight in parts]
    bounds = [0, *np.cumsum(sizes).tolist()]
    mixture = Mixture(bounds, weights, batch, seed=3)
    steps = 2 * sum(sizes) * sum(weights) // batch + 1
    seen = np.concatenate([mixture.batch(step * batch) for step in range(steps)])
    for first, last in itertools.pairwise(bounds):
        own = seen[(seen >= first) & (seen < last)]
        size = last - first
        assert len(own) >= size
        for epoch in range(len(own) // size):
            assert sorted(own[epoch * size : (epoch + 1) * size].tolist()) == list(range(first, last))


@settings(max_examples=10, deadline=None)
@given(st.lists(st.integers(0, 3 * PERIOD), max_size=4), st.integers(1, 17))
def test_the_cursor_alone_decides_the_batch(cursors: list[int], batch: int) -> None:
    """A slow plain version: draw row after row from the beginning."""
    weights, bounds = (3.0, 1.0, 0.5), [0, 7, 20, 21]
    used = Mixture(bounds, weights, batch, seed=5)
    chosen = np.resize(pattern(quotas(weights)), 3 * PERIOD + batch)
    longest = max(cursors, default=0) + batch
    plain = np.empty(longest, np.int64)
    for source, (first, last) in enumerate(itertools.pairwise(bounds)):
        places = np.flatnonzero(chosen[:longest] == source)
        plain[places] = first + Order(last - first, 1, 5, source).span(0, len(places))
    for cursor in cursors:
        fresh = Mixture(bounds, weights, batch, seed=5).batch(cursor)  # a resume has no history
        assert fresh.tolist() == used.batch(cursor).tolist() == plain[cursor : cursor + batch].tolist()


def test_any_number_of_ranks_sees_the_same_mixed_batches() -> None:
    mixture = Mixture([0, 50, 60], (1.0, 1.0), 12, seed=0)
    for cursor in range(0, 240, 12):
        whole = mixture.batch(cursor)
        for world in (1, 2, 3, 4):
            parts = [part for rank in range(world) for part in share(whole, rank=rank, world=world, micro=2)]
            assert np.concatenate(parts).tolist() == whole.tolist()


def test_sources_of_equal_size_are_shuffled_differently() -> None:
    one, two = (Order(1000, 1000, 0, source).batch(0).tolist() for source in (0, 1))
    assert one != two


def made(tmp_path: Path, texts: dict[str, str], *, said: list[str] | None = None, **options: object) -> Shards:
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
    config = DataConfig(paths=tuple(str(tmp_path / name) for name in texts), **options)  # type: ignore[arg-type]
    say = said.append if said is not None else lambda _: None
    return build(config, Bytes().build([]), tmp_path / "out", progress=lambda *_: None, say=say)


@pytest.mark.parametrize("valid", [0.0, 0.3])
def test_shards_say_where_each_path_begins(tmp_path: Path, valid: float) -> None:
    texts = {name: "\f".join(f"{name}{n} " * 20 for n in range(30)) for name in "abc"}
    shards = made(tmp_path, texts, valid=valid)
    for stream in (shards.train, shards.valid) if valid else (shards.train,):
        letters = [chr(stream.ids[start + 1]) for start in stream.sources]
        assert letters == ["a", "b", "c"]
        for name, start, stop in zip("abc", stream.sources, [*stream.sources[1:], len(stream)], strict=True):
            inside = {chr(id) for id in stream.ids[start:stop] if id < 256} & set("abc")
            assert inside == {name}


def test_a_text_too_small_to_split_by_documents_keeps_its_sources(tmp_path: Path) -> None:
    """With one document per path the tail is cut off for validation; the borders move with it."""
    shards = made(tmp_path, {"a": "a" * 400, "b": "b" * 400}, valid=0.1)
    assert len(shards.valid) > 2
    train = shards.train
    assert len(train.sources) == 2
    assert set(train.ids[: train.sources[1]].tolist()) == {ord("a"), 256}
    assert set(train.ids[train.sources[1] :].tolist()) == {ord("b"), 256}


def by_source(stream: Stream) -> list[bytes]:
    """The text of each source."""
    borders = itertools.pairwise([*stream.sources, len(stream)])
    return [bytes(id for id in stream.ids[start:stop].tolist() if id < 256) for start, stop in borders]


@pytest.mark.parametrize("weights", [(), (1.0, 1.0, 1.0)])
def test_the_tail_for_validation_comes_from_every_path(tmp_path: Path, weights: tuple[float, ...]) -> None:
    """However unequal their sizes: the last path is neither all of the validation text nor all in it."""
    texts = {"a": "a" * 3000, "b": "b" * 999, "c": "c" * 39}
    assert not any(held_out(text, 0.1) for text in texts.values())
    said: list[str] = []
    shards = made(tmp_path, texts, valid=0.1, weights=weights, said=said)
    assert [len(text) for text in by_source(shards.valid)] == [300, 100, 4]
    for text, train, valid in zip(texts.values(), by_source(shards.train), by_source(shards.valid), strict=True):
        assert train + valid == text.encode()
    assert shards.valid.text_bytes == 404
    assert shards.train.text_bytes == 3000 + 999 + 39 - 404
    names = ", ".join(str(tmp_path / name) for name in texts)
    [sentence] = said
    assert sentence == (
        f"Too few documents to keep whole ones for validation in {names}: "
        "the last 10.00% of each path's text (404 tokens in all) is kept instead."
    )


def test_a_path_whose_only_document_is_held_out_is_learned_from_all_the_same(tmp_path: Path) -> None:
    """The others keep the documents that the hash chose, whole."""
    many = [f"number {number} " * 3 for number in range(40)]
    alone = next(text for text in (str(number) * 300 for number in range(100)) if held_out(text, 0.2))
    said: list[str] = []
    texts = {"many": "\f".join(many), "alone": alone}
    shards = made(tmp_path, texts, valid=0.2, weights=(1.0, 1.0), said=said)
    train, valid = by_source(shards.train), by_source(shards.valid)
    assert train[0] == "".join(text for text in many if not held_out(text, 0.2)).encode()
    assert valid[0] == "".join(text for text in many if held_out(text, 0.2)).encode()
    assert train[1] + valid[1] == alone.encode()
    assert len(valid[1]) == round(0.2 * (len(alone) + 1))
    assert shards.train.text_bytes == sum(map(len, train))
    assert shards.valid.text_bytes == sum(map(len, valid))
    assert len(said) == 1
    assert f"in {tmp_path / 'alone'}: the last 20.00%" in said[0]
    assert f"({len(valid[1]):,} tokens in all)" in said[0]


def test_bytes_are_counted_where_they_are_known_and_never_below_zero(tmp_path: Path) -> None:
    """An unknown word of one letter is spelled with seven: the end of a text seems to be more than all."""
    many = [f"number    {number}" for number in range(40)]
    alone = next(text for text in ("x y " * size for size in range(50, 99)) if not held_out(text, 0.4))
    (tmp_path / "many").write_text("\f".join(many))
    (tmp_path / "alone").write_text(alone)
    config = DataConfig(paths=(str(tmp_path / "many"), str(tmp_path / "alone")), valid=0.4, weights=(1.0, 1.0))
    tokenizer = Words().build(many)
    shards = build(config, tokenizer, tmp_path / "out", progress=lambda *_: None, say=lambda _: None)
    assert shards.train.text_bytes == sum(len(text) for text in many if not held_out(text, 0.4))
    assert shards.valid.text_bytes == sum(len(text) for text in many if held_out(text, 0.4)) + len(alone)


@pytest.mark.parametrize("weights", [(), (1.0,) * 60])
def test_many_small_paths_that_are_not_mixed_are_split_by_whole_documents(
    tmp_path: Path, weights: tuple[float, ...]
) -> None:
    texts = {f"file-{number}": f"document {number} " * 9 for number in range(60)}
    shards = made(tmp_path, texts, valid=0.1, weights=weights)
    kept = [text.encode() for text in texts.values() if held_out(text, 0.1)]
    assert 0 < len(kept) < 60
    found = [text for text in by_source(shards.valid) if text]
    assert (found == kept) is not bool(weights)
    assert all(by_source(shards.train)) is bool(weights)


def test_rows_are_drawn_in_the_shares_of_the_weights(tmp_path: Path) -> None:
    """The larger source has ten times the text and still gets a quarter of the rows."""
    shards = made(tmp_path, {"a": "a" * 10_000, "b": "b" * 1_000}, valid=0.0)
    rows = Rows(shards.train, 20)
    order = ordering(rows, (1.0, 3.0), 40, seed=0)
    for step in range(20):
        batch = rows.take(order.batch(step * 40)).ids
        first = np.where(batch[:, 0] == 256, batch[:, 1], batch[:, 0])
        assert np.count_nonzero(first == ord("a")) == 10


def test_without_weights_all_text_is_one(tmp_path: Path) -> None:
    rows = Rows(made(tmp_path, {"a": "a" * 400, "b": "b" * 400}, valid=0.0).train, 20)
    assert ordering(rows, (), 8, seed=4).batch(16).tolist() == Order(len(rows), 8, 4).batch(16).tolist()


def test_weights_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    shards = made(tmp_path, {"a": "a" * 400, "b": "b" * 5}, valid=0.0)
    with pytest.raises(ConfigError, match=r"data\.weights: 3 weights for 2 sources"):
        ordering(Rows(shards.train, 20), (1.0, 1.0, 1.0), 8, seed=0)
    with pytest.raises(DataError, match="path 2 is too short"):
        ordering(Rows(shards.train, 20), (1.0, 1.0), 8, seed=0)
    with pytest.raises(ConfigError, match=r"data\.weights: weight 2 is below"):
        quotas((1.0, 1e-9))
    with pytest.raises(ConfigError, match="weights: 1 weights for 2 paths"):
        DataConfig(paths=("a", "b"), weights=(1.0,))
    for wrong in (0.0, -1.0, float("inf"), float("nan")):
        with pytest.raises(ConfigError, match="weights"):
            DataConfig(paths=("a", "b"), weights=(1.0, wrong))


@pytest.mark.parametrize("sources", [[5, 3], [-1], [10**9], ["a"], 7, [0.5]])
def test_a_manifest_with_impossible_borders_is_damaged(tmp_path: Path, sources: object) -> None:
    from trivium.data import shards as module

    made(tmp_path, {"a": "a" * 400}, valid=0.0)
    path = tmp_path / "out" / "manifest.json"
    manifest = json.loads(path.read_text())
    del manifest["sha256"]
    manifest["splits"]["train"]["sources"] = sources
    path.write_text(json.dumps(module._sealed(manifest)))
    with pytest.raises(DataError, match="damaged"):
        open_shards(tmp_path / "out")


@pytest.mark.parametrize("weights", [(), (1.0, 3.0)])
def test_in_every_epoch_of_shifted_rows_every_token_is_a_label_once(tmp_path: Path, weights: tuple[float, ...]) -> None:
    """Each source on its own if they are mixed, and never a row that holds text of two."""
    texts = {"a": "\f".join(f"A{n}" * (n % 7 + 1) for n in range(40)), "b": "b" * 333}
    config = DataConfig(paths=("a", "b"), weights=weights, shift="epoch")
    stream = made(tmp_path, texts, valid=0.0).train
    rows = training_rows(stream, 16, config)
    order = ordering(rows, weights, 10, seed=1)
    taken = rows.take(np.concatenate([order.batch(cursor) for cursor in range(0, 800, 10)]))
    a, b = stream.sources
    borders = [(a, b), (b, len(stream) - 1)] if weights else [(a, len(stream) - 1)]
    layouts = set()
    for start, stop in borders:
        own = np.flatnonzero((taken.begins >= start) & (taken.begins < stop))
        size = -(-(stop - start) // 16)
        for epoch in range(len(own) // size):
            part = own[epoch * size : (epoch + 1) * size]
            labels = taken.labels[part]
            assert sorted(labels[labels != -100].tolist()) == sorted(stream.ids[start + 1 : stop + 1].tolist())
            layouts.add((start, tuple(sorted(taken.begins[part].tolist()))))
            if epoch == 0:
                assert sorted(taken.begins[part].tolist()) == list(range(start, stop, 16))
    assert len(layouts) > 2 * len(borders)


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 400), st.sampled_from([(), (2.0, 1.0)]))
def test_the_cursor_alone_decides_the_shift(cursor: int, weights: tuple[float, ...]) -> None:
    ids = np.arange(200, dtype=np.uint16)
    stream = Stream(ids=ids, starts=np.array([0, 120]), text_bytes=0, sources=(0, 120))
    rows = training_rows(stream, 9, DataConfig(paths=("a", "b"), weights=weights, shift="epoch"))
    used = ordering(rows, weights, 7, seed=2)
    straight = np.concatenate([used.batch(at) for at in range(0, 410, 7)])
    fresh = ordering(rows, weights, 7, seed=2).batch(cursor)  # a resume has no history
    assert fresh.tolist() == straight[cursor : cursor + 7].tolist()
    assert (straight >= len(rows)).any()


def test_without_a_shift_the_rows_and_their_order_are_what_they_were(tmp_path: Path) -> None:
    stream = made(tmp_path, {"a": "a" * 400, "b": "b" * 300}, valid=0.0).train
    for weights in ((), (1.0, 2.0)):
        rows = training_rows(stream, 16, DataConfig(paths=("a", "b"), weights=weights))
        numbers = np.concatenate([ordering(rows, weights, 8, 0).batch(cursor) for cursor in range(0, 200, 8)])
        assert numbers.max() == len(rows) - 1
        taken = rows.take(numbers)
        assert taken.numbers.tolist() == numbers.tolist()
        assert taken.begins.tolist() == (16 * numbers).tolist()
