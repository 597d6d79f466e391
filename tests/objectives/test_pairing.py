"""Next-sentence pairs against the format of the paper, BERT's own loop, and documents that can be told apart."""

# B rows, T tokens, K draws

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import cast

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.objectives.samples import letters, octets, scripted, stream, tiny
from trivium.data.batch import Batch
from trivium.data.packing import Rows
from trivium.errors import ConfigError, DataError
from trivium.labels import IGNORED
from trivium.models.transformer import build
from trivium.objectives.masked import MaskedTask
from trivium.objectives.options import CLASS, PADDING, SEPARATOR, Masked
from trivium.objectives.pairing import FOLLOWS, STRANGE, Span, pair, truncated
from trivium.parts.losses import total
from trivium.parts.options.embeddings import TokenEmbeddingOptions
from trivium.parts.options.sentence import PoolerOptions
from trivium.parts.sentence import Pooler

PLACES = {"embedding": TokenEmbeddingOptions(segments=2), "sentence": PoolerOptions()}


def bound(context: int, **options: object) -> MaskedTask:
    objective = replace(Masked(frame="pair"), **options)  # type: ignore[arg-type]
    tokenizer = octets(objective)
    return objective.bind(tokenizer, tiny("encoder", context, tokenizer.size, **PLACES))


def drawn(number: int, **given: float) -> npt.NDArray[np.float64]:
    """The draws of a pair: by default all of the first document, cut in half, B as it follows, nothing short."""
    names = {"which": 0.0, "cut": 0.5, "coin": 0.0, "elsewhere": 0.0, "short": 0.9, "target": 0.0, **given}
    return np.array([*names.values(), *[0.9] * number])


def unmasked(batch: Batch) -> list[list[int]]:
    """The tokens of a batch before anything was hidden."""
    where, labels = batch.targets["where"], batch.targets["labels"]
    real = labels != IGNORED
    tokens = batch.inputs["tokens"].flatten().index_put((where[real],), labels[real])
    return tokens.view_as(batch.inputs["tokens"]).tolist()


def test_the_format_is_that_of_the_paper() -> None:
    task = bound(11)
    ids = task.vocabulary.ids
    text = stream([[1, 2, 3, 4, 5, 6, 7], [20, 21, 22, 23, 24, 25, 26, 27]])
    rows = Rows(text, task.length).take(np.array([0, 0, 1]))
    mask = np.full((3, 3 * 11), 0.5)
    following, strange = drawn(8), drawn(8, coin=0.5, elsewhere=0.3, cut=0.3)
    short = drawn(8, short=0.05, target=0.3)  # 2 + int(0.3 * 7) tokens
    draws = np.concatenate([mask, np.stack([following, strange, short])], axis=1)
    batch = task.inputs(rows, scripted(draws))
    start, between, fill = ids[CLASS], ids[SEPARATOR], ids[PADDING]
    assert unmasked(batch) == [
        [start, 1, 2, 3, 4, between, 5, 6, 7, between, fill],
        [start, 1, 2, between, 21, 22, 23, 24, 25, between, fill],
        [start, 20, 21, between, 24, 25, between, fill, fill, fill, fill],
    ]
    assert batch.inputs["segments"].tolist() == [
        [0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 0],
        [0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 0],
        [0, 0, 0, 0, 1, 1, 1, 0, 0, 0, 0],
    ]
    assert batch.inputs["padding"].sum(1).tolist() == [10, 10, 7]
    assert batch.targets["classes"].tolist() == [FOLLOWS, STRANGE, FOLLOWS] == [0, 1, 0]
    assert batch.counts["sentences"] == 3


@settings(max_examples=300, deadline=None)
@given(st.integers(0, 12), st.integers(0, 12), st.integers(2, 24), st.lists(st.booleans(), min_size=24, max_size=24))
def test_pairs_are_truncated_as_berts_own_loop_does(first: int, second: int, most: int, fronts: list[bool]) -> None:
    coins = np.where(fronts, 0.1, 0.9)
    got = truncated(Span(100, 100 + first), Span(200, 200 + second), most, coins)
    texts = [list(range(100, 100 + first)), list(range(200, 200 + second))]
    popped: list[list[bool]] = [[], []]
    sizes = [first, second]
    while sum(sizes) > most:  # create_pretraining_data.py: truncate_seq_pair
        longer = 0 if sizes[0] > sizes[1] else 1
        sizes[longer] -= 1
        popped[longer].append(True)
    used = 0
    for text, count in zip(texts, map(len, popped), strict=True):
        for front in fronts[used : used + count]:
            text.pop(0 if front else -1)
        used += count
    assert [list(range(*span)) for span in got] == texts


@settings(max_examples=200, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 30), min_size=2, max_size=8),
    length=st.integers(2, 20),
    seed=st.integers(0, 999),
)
def test_a_pair_is_what_its_class_says(sizes: list[int], length: int, seed: int) -> None:
    """Every token is (its document, its place in it)."""
    documents = [[30 * number + place for place in range(size)] for number, size in enumerate(sizes)]
    text = stream(documents, end=9999)
    rows, rng = Rows(text, length), np.random.default_rng(seed)
    for number in range(len(rows)):
        real = int(rows.take(np.array([number])).lengths[0])
        window = Span(number * length, number * length + real)
        first, second, kind = pair(text, window, length, rng.random(6 + length))
        a, b = (text.ids[slice(*span)].tolist() for span in (first, second))
        assert 9999 not in a + b
        assert len(a + b) <= length
        assert len({id // 30 for id in a}) <= 1  # one document each
        assert len({id // 30 for id in b}) == 1 or not b
        if kind == FOLLOWS:
            assert a
            assert b
            assert window.start <= first.start < first.stop <= second.start < second.stop <= window.stop
            assert a[0] // 30 == b[0] // 30
        elif a:
            assert b[0] // 30 != a[0] // 30


def test_what_follows_follows_at_once_unless_it_was_shortened() -> None:
    text = stream([list(range(100)), list(range(100, 180))], end=999)
    rng, together, shortened = np.random.default_rng(0), 0, 0
    for _ in range(500):
        draws = rng.random(26)
        first, second, kind = pair(text, Span(20, 40), 20, draws)
        if kind == FOLLOWS and draws[4] >= 0.1:
            assert (first.start, second.stop) == (20, 40)  # all of the window
            assert first.stop == second.start
            together += 1
        shortened += first.size + second.size < 20
    assert together > 200
    assert 0 < shortened < 100


def test_half_of_the_pairs_follow_and_a_tenth_is_short(count: Callable[[int, int], int]) -> None:
    task, number = bound(67), count(4000, 40_000)
    text = stream([[7] * 5000, [8] * 5000])
    within = 1 + np.arange(number) % 70  # windows of one document; row 0 begins with END, so that it is never whole
    batch = task.inputs(Rows(text, task.length).take(within), np.random.default_rng(0))
    error = 5 * (0.25 / number) ** 0.5
    assert batch.targets["classes"].float().mean().item() == pytest.approx(0.5, abs=error)
    lengths = batch.inputs["padding"].sum(1)
    # one tenth has a length from 2 to 64, uniformly: of those one in 63 is whole
    assert (lengths < 67).float().mean().item() == pytest.approx(0.1 * 62 / 63, abs=error)
    assert lengths[lengths < 67].float().mean().item() == pytest.approx(3 + (2 + 63) / 2, rel=0.1)


def test_a_strange_text_comes_from_a_document_as_often_as_it_has_text() -> None:
    """As true ones do; a strange one is never of A's own document, so that the longest ones lose a little."""
    sizes = [600, 300, 60, 30, 10]
    text = stream([[number] * size for number, size in enumerate(sizes)])
    rows, rng = Rows(text, 10), np.random.default_rng(0)
    seen = np.zeros((2, len(sizes)))
    for _ in range(80):
        for number in range(len(rows)):
            window = Span(number * 10, min(number * 10 + 10, len(text) - 1))
            _, second, kind = pair(text, window, 10, rng.random(16))
            seen[kind, int(text.ids[second.start])] += 1
    shares = seen / seen.sum(1, keepdims=True)
    assert shares[FOLLOWS] == pytest.approx(np.array(sizes) / sum(sizes), abs=0.03)
    own = np.array(sizes) / sum(sizes)
    expected = np.array([sum(own[a] * own[b] / (1 - own[a]) for a in range(5) if a != b) for b in range(5)])
    assert shares[STRANGE] == pytest.approx(expected, abs=0.03)


def test_a_strange_text_is_as_long_as_a_true_one() -> None:
    text = stream([list(range(100)), list(range(100, 250))], end=999)
    for cut in np.linspace(0, 0.99, 30):
        true, strange = (pair(text, Span(11, 41), 30, drawn(30, cut=cut, coin=coin)) for coin in (0.0, 0.5))
        assert [span.size for span in true[:2]] == [span.size for span in strange[:2]]
        assert true[2] != strange[2]


def test_a_text_of_one_document_is_refused_in_a_sentence() -> None:
    task = bound(13)
    rows = Rows(stream([list(range(50))]), task.length).take(np.arange(4))
    with pytest.raises(DataError, match=r"objective.frame: .* needs at least two documents .*set frame=bert"):
        task.inputs(rows, np.random.default_rng(0))


def test_a_document_of_one_token_is_passed_over_where_there_is_more() -> None:
    text = stream([[1], [2, 3, 4, 5], [6], [7, 8, 9]], end=99)
    window = Span(0, 9)  # END 1 END 2 3 4 5 END 6
    for which in np.linspace(0, 0.99, 20):
        first, second, kind = pair(text, window, 9, drawn(9, which=which))
        assert text.ids[first.start : second.stop].tolist() == [2, 3, 4, 5]
        assert kind == FOLLOWS


def test_windows_without_two_tokens_in_a_row_are_still_pairs() -> None:
    task = bound(9)
    rows = Rows(stream([[number] for number in range(20)]), task.length)
    batch = task.inputs(rows.take(np.arange(len(rows))), np.random.default_rng(0))
    assert batch.targets["classes"].tolist() == [STRANGE] * len(rows)
    assert batch.inputs["padding"].sum(1).tolist() == [5] * len(rows)


@pytest.mark.parametrize(
    ("places", "key"),
    [
        (
            {"sentence": PoolerOptions()},
            "model.embedding.segments: objective.frame=pair has two kinds of segment; set it to 2",
        ),
        ({"embedding": TokenEmbeddingOptions(segments=2)}, "model.sentence: .*set it to pooler, with classes=2"),
        (
            {"embedding": TokenEmbeddingOptions(segments=2), "sentence": PoolerOptions(classes=3)},
            "model.sentence: .*classes=2",
        ),
    ],
)
def test_a_model_that_cannot_answer_is_refused(places: dict[str, object], key: str) -> None:
    objective = Masked(frame="pair")
    tokenizer = octets(objective)
    with pytest.raises(ConfigError, match=key):
        objective.bind(tokenizer, tiny("encoder", 16, tokenizer.size, **places))


def test_both_things_that_are_missing_are_said_at_once() -> None:
    objective = Masked(frame="pair")
    tokenizer = octets(objective)
    with pytest.raises(ConfigError) as caught:
        objective.bind(tokenizer, tiny("encoder", 16, tokenizer.size))
    assert len(caught.value.problems) == 2


def test_a_context_without_room_for_two_texts_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"model.context: 4 leaves no room"):
        bound(4)
    assert bound(5).length == 2


def learned(documents: list[list[int]]) -> float:
    """How many pairs of such documents of eight letters a small model tells right after a while."""
    objective = Masked(frame="pair", mask=0.5, random=0.0)
    tokenizer = letters(objective, 8)
    config = tiny("encoder", 16, tokenizer.size, **PLACES)
    task, model, rng = objective.bind(tokenizer, config), build(config, seed=0), np.random.default_rng(0)
    rows = Rows(stream(documents, end=tokenizer.end), task.length)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, fused=True)
    for _ in range(250):
        batch = task.inputs(rows.take(rng.integers(0, len(rows), 32)), rng)
        states = model(**batch.inputs)
        losses = task.loss(model, states, batch.targets)
        optimizer.zero_grad()
        total(losses, batch.counts).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    batch = task.inputs(rows.take(np.arange(1000) % len(rows)), rng)
    with torch.no_grad():
        logits_BC = cast(Pooler, model.sentence).logits(model(**batch.inputs).hidden)
    return (logits_BC.argmax(-1) == batch.targets["classes"]).float().mean().item()


def test_a_model_learns_to_tell_what_goes_together() -> None:
    """Documents of one letter: only a strange pair of the same letter, one of sixteen pairs, cannot be told."""
    assert 0.85 < learned([[number % 8] * 60 for number in range(40)]) < 0.97


def test_nothing_but_the_text_tells_what_goes_together() -> None:
    """Random letters follow each other no better than they follow others."""
    rng = np.random.default_rng(1)
    documents = [rng.integers(0, 8, rng.integers(20, 400)).tolist() for _ in range(200)]
    assert learned(documents) == pytest.approx(0.5, abs=5 * (0.25 / 1000) ** 0.5)
