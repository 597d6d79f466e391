"""Masked tokens against the worked example, the original's counts and a slow plain version."""

# B rows, T tokens

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.objectives.samples import letters, octets, part, random_rows, rows, scripted, tiny
from trivium.data.batch import Batch
from trivium.data.packing import RowBatch
from trivium.errors import ConfigError
from trivium.labels import IGNORED
from trivium.models.transformer import build
from trivium.objectives.masked import MaskedTask
from trivium.objectives.options import CLASS, MASK, PADDING, SEPARATOR, Masked

Flags = npt.NDArray[np.bool_]


def bound(context: int, **options: object) -> MaskedTask:
    objective = replace(Masked(), **options)  # type: ignore[arg-type]
    tokenizer = octets(objective)
    return objective.bind(tokenizer, tiny("encoder", context, tokenizer.size))


def chosen(batch: Batch) -> Flags:
    """Which positions [B, T] have a label."""
    flags = np.zeros(batch.inputs["tokens"].numel(), np.bool_)
    flags[batch.targets["where"][batch.targets["labels"] != IGNORED].numpy()] = True
    return flags.reshape(batch.inputs["tokens"].shape)


def test_the_worked_example() -> None:
    task = bound(6, frame="bert", rate=1 / 3)
    ids = {CLASS: 101, SEPARATOR: 102, MASK: 103, PADDING: 0}
    is_special = np.isin(np.arange(104), list(ids.values()))
    tables = replace(task.vocabulary, ids=ids, is_special=is_special, random_ids=np.flatnonzero(~is_special))
    task = replace(task, vocabulary=tables)
    draws = [
        [0.0, 0.9, 0.1, 0.8, 0.2, 0.0],  # positions 2 and 4 are chosen; the frame would be, if it could
        [0.0, 0.0, 0.5, 0.0, 0.95, 0.0],  # the first becomes [MASK], the second stays
        [0.5] * 6,
    ]
    batch = task.inputs(rows([[7, 8, 9, 10, 0]], [5]), scripted([draws]))
    assert batch.inputs["tokens"].tolist() == [[101, 7, 103, 9, 10, 102]]
    assert batch.targets["where"].tolist() == [2, 4]
    assert batch.targets["labels"].tolist() == [8, 10]
    assert batch.counts["tokens"] == 2
    assert set(batch.inputs) == {"tokens"}


def test_a_draw_between_mask_and_keep_gives_another_token() -> None:
    task = bound(4, rate=0.25)
    draws = [[0.9, 0.1, 0.8, 0.8], [0.85] * 4, [0.5] * 4]
    batch = task.inputs(rows([[7, 8, 9, 10, 0]], [5]), scripted([draws]))
    assert batch.inputs["tokens"].tolist() == [[7, 128, 9, 10]]  # the middle one of 256
    assert batch.targets["labels"].tolist() == [8]


def test_a_framed_row_is_filled_up_behind_its_separator() -> None:
    task = bound(8, frame="bert")
    batch = task.inputs(rows([[1, 2, 3, 4, 5, 6, 7], [1, 2, 3, 4, 0, 0, 0]], [7, 4]), np.random.default_rng(0))
    where, labels = batch.targets["where"], batch.targets["labels"]
    tokens = batch.inputs["tokens"].flatten().index_put((where,), labels).view(2, 8)  # undo the masks
    start, end, fill = (task.vocabulary.ids[spelling] for spelling in (CLASS, SEPARATOR, PADDING))
    assert tokens.tolist() == [[start, 1, 2, 3, 4, 5, 6, end], [start, 1, 2, 3, end, fill, fill, fill]]
    assert batch.inputs["padding"].tolist() == [[True] * 8, [True] * 5 + [False] * 3]


@pytest.mark.parametrize(
    ("length", "most", "expected"), [(128, 20, 19), (512, 77, 77), (512, 20, 20), (3, 20, 1), (10, 0, 2), (30, 0, 4)]
)
def test_exact_takes_the_originals_number_of_tokens(length: int, most: int, expected: int) -> None:
    task = bound(length, frame="bert", max_predictions=most)
    batch = task.inputs(random_rows(4, length - 2, 256), np.random.default_rng(0))
    assert chosen(batch).sum(1).tolist() == [expected] * 4
    assert max(1, round(length * 0.15)) == expected or most == expected  # create_pretraining_data.py


@pytest.mark.parametrize("unit", ["piece", "word"])
@pytest.mark.parametrize("mode", ["exact", "bernoulli"])
def test_specials_and_padding_are_never_chosen(unit: str, mode: str) -> None:
    task = bound(16, rate=0.9, unit=unit, mode=mode)
    end = octets(task.options).end
    batch = task.inputs(
        rows([[end, 1, 2, end, 3, 4, 5, end, end, 6, 7, end, 8, 9, 1, 2, 3], [end, 1, 2, 3] + [end] * 13], [17, 5]),
        np.random.default_rng(0),
    )
    flags = chosen(batch)
    assert not flags[0, [0, 3, 7, 8, 11]].any()
    assert not flags[1, [0, *range(4, 16)]].any()
    assert flags.any()


def test_coins_choose_and_change_their_shares(count: Callable[[int, int], int]) -> None:
    task = bound(500, mode="bernoulli")
    total = count(400, 2000)
    given = random_rows(total, 500, 256)
    batch = task.inputs(given, np.random.default_rng(1))
    flags, tokens = chosen(batch), batch.inputs["tokens"].numpy()
    assert flags.mean() == pytest.approx(0.15, abs=0.002)
    masked = tokens[flags] == task.vocabulary.ids[MASK]
    assert masked.mean() == pytest.approx(0.8, abs=0.01)
    changed = (tokens != given.text)[flags] & ~masked
    assert changed.mean() == pytest.approx(0.1 * 255 / 256, abs=0.01)  # a random token can be the old one
    assert (tokens == given.text)[~flags].all()
    places = flags.mean(0)
    assert abs(places - 0.15).max() < 6 * (0.15 * 0.85 / total) ** 0.5  # no place is preferred


def test_random_tokens_are_uniform_and_special_only_if_asked() -> None:
    for draw, least in (("text", 256), ("all", 258)):
        task = bound(200, rate=0.5, mask=0.0, random=0.999, draw=draw)
        batch = task.inputs(random_rows(400, 200, 256), np.random.default_rng(0))
        seen = np.bincount(batch.inputs["tokens"].numpy()[chosen(batch)], minlength=258)
        assert (seen > 0).sum() == least
        expected = 40_000 / least
        assert abs(seen[seen > 0] - expected).max() < 7 * expected**0.5


@settings(max_examples=100, deadline=None)
@given(
    text=st.text(alphabet="ab  ", min_size=4, max_size=40),
    rate=st.floats(0.05, 0.95),
    most=st.integers(0, 9),
    seed=st.integers(0, 99),
)
def test_whole_words_are_what_a_plain_loop_takes(text: str, rate: float, most: int, seed: int) -> None:
    task = bound(len(text), rate=rate, unit="word", max_predictions=most)
    batch = task.inputs(rows([[*text.encode(), 0]], [len(text) + 1]), np.random.default_rng(seed))
    draws = np.random.default_rng(seed).random((1, 3, len(text)))[0, 0]
    tokenizer = octets(task.options)
    words: list[list[int]] = []
    for at, id in enumerate(text.encode()):
        if not at or tokenizer.starts_word(id) or tokenizer.ends_word(text.encode()[at - 1]):
            words.append([])
        words[-1].append(at)
    budget = max(1, round(rate * len(text)))
    budget = min(budget, most) if most else budget
    expected: list[int] = []
    for word in sorted(words, key=lambda word: draws[word[0]]):
        if len(expected) + len(word) <= budget:
            expected += word
    assert np.flatnonzero(chosen(batch)[0]).tolist() == sorted(expected)


def test_word_coins_fall_once_for_every_word() -> None:
    task = bound(400, unit="word", mode="bernoulli", rate=0.3)
    text = b"abc def " * 50
    flags = chosen(task.inputs(rows([[*text, 0]] * 50, [401] * 50), np.random.default_rng(0)))
    border = np.array([task.vocabulary.starts_word[id] for id in text]) | np.roll(
        [task.vocabulary.ends_word[id] for id in text], 1
    )
    words = np.cumsum(border)
    for row in flags:
        assert set(words[row]).isdisjoint(words[~row])
    assert flags.mean() == pytest.approx(0.3, abs=0.03)


def test_the_fate_of_a_words_pieces_is_drawn_for_each() -> None:
    task = bound(400, unit="word", rate=0.5)
    text = b"abcdefg " * 50
    tokens = task.inputs(rows([[*text, 0]], [401]), np.random.default_rng(0)).inputs["tokens"][0]
    masked = (tokens == task.vocabulary.ids[MASK]).view(50, 8).sum(1)
    assert {0, 5, 6, 7} <= set(masked.tolist())


def test_coins_beyond_all_odds_still_fit() -> None:
    task = bound(40, mode="bernoulli")
    draws = np.zeros((2, 3, 40))  # every coin falls
    batch = task.inputs(random_rows(2, 40, 256), scripted(draws))
    assert batch.counts["tokens"] == 80
    usual = task.inputs(random_rows(2, 40, 256), np.random.default_rng(0)).targets["where"]
    assert len(batch.targets["where"]) % len(usual) == 0


def test_a_row_of_specials_alone_has_a_loss_of_exactly_zero() -> None:
    task = bound(4)
    end = octets(task.options).end
    batch = task.inputs(rows([[end] * 5], [5]), np.random.default_rng(0))
    assert batch.counts["tokens"] == 0
    model = build(tiny("encoder", 4, 258), seed=0)
    assert task.loss(model, model(**batch.inputs), batch.targets)["tokens"].sum.item() == 0


@pytest.mark.parametrize("options", [{}, {"mode": "bernoulli"}, {"frame": "bert"}, {"unit": "word"}])
def test_what_was_masked_or_replaced_leaves_no_trace_in_the_inputs(options: dict[str, object]) -> None:
    task = bound(64, **options, rate=0.4)
    given = random_rows(8, task.length, 256)
    first = task.inputs(given, np.random.default_rng(0))
    frame = 1 if task.options.frame == "bert" else 0
    hidden = chosen(first) & (first.inputs["tokens"].numpy() != np.pad(given.text, ((0, 0), (frame, frame))))
    hidden = hidden[:, frame : frame + task.length]
    altered = given.ids.copy()
    # Other letters instead of letters: the borders of words stay where they are.
    letters_ = hidden & (altered[:, :-1] >= 97) & (altered[:, :-1] <= 121)
    assert letters_.sum() > 3
    altered[:, :-1][letters_] += 1
    second = task.inputs(given._replace(ids=altered), np.random.default_rng(0))
    assert torch.equal(first.inputs["tokens"], second.inputs["tokens"])
    assert not torch.equal(first.targets["labels"], second.targets["labels"])


def test_a_copying_model_learns_the_kept_tokens_and_nothing_about_the_masked_ones() -> None:
    objective = Masked(rate=0.3, mask=0.5, random=0.0)
    tokenizer = letters(objective, 8)
    config = tiny("encoder", 16, tokenizer.size)
    task, model = objective.bind(tokenizer, config), build(config, seed=0)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    rng = np.random.default_rng(0)
    for step in range(120):
        batch = task.inputs(random_rows(32, 16, 8, seed=step), rng)
        optimizer.zero_grad()
        (task.loss(model, model(**batch.inputs), batch.targets)["tokens"].sum / batch.counts["tokens"]).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    given = np.random.default_rng(1).integers(0, 8, (1000, 17))  # uniform, unlike the training rows
    batch = task.inputs(rows(given.tolist(), [17] * 1000), rng)
    with torch.no_grad():
        guess = model.head.logits(model(**batch.inputs).hidden).argmax(-1).flatten()[batch.targets["where"]]
    right = guess == batch.targets["labels"]
    masked = batch.inputs["tokens"].flatten()[batch.targets["where"]] == task.vocabulary.ids[MASK]
    assert right[~masked].float().mean() > 0.95
    error = (1 / 8 * 7 / 8 / int(masked.sum())) ** 0.5
    assert right[masked].float().mean().item() == pytest.approx(1 / 8, abs=5 * error)


def masks(task: MaskedTask, given: RowBatch, seeds: Iterable[int]) -> list[bytes]:
    """The first row of the batch, as it is under each of these seeds."""
    batches = [task.inputs(given, np.random.default_rng(seed)) for seed in seeds]
    return [batch.inputs["tokens"][0].numpy().tobytes() for batch in batches]


def test_dynamic_masks_are_new_in_every_epoch_and_the_same_after_a_restart() -> None:
    """RoBERTa: the seed of a step stands for (seed, epoch, index)."""
    task, given = bound(64), random_rows(1, 64, 256)
    served = masks(task, given, range(20))
    assert len(set(served)) == 20
    assert masks(task, given, range(20)) == served


def test_static_masks_come_back() -> None:
    """BERT: the text was masked ten times before training began."""
    task, given = bound(64, copies=10), random_rows(8, 64, 256)
    served = [masks(task, part(given, [row]), range(300)) for row in range(8)]
    assert all(len(set(seen)) == 10 for seen in served)
    once = [masks(bound(64, copies=1), part(given, [row]), range(5)) for row in range(8)]
    assert all(len(set(seen)) == 1 for seen in once)
    assert all(set(seen) <= set(more) for seen, more in zip(once, served, strict=True))  # the first copy


def test_a_static_mask_depends_on_the_number_of_its_row_alone() -> None:
    task, given = bound(64, copies=1), random_rows(8, 64, 256)
    alone = [masks(task, part(given, [row]), [0])[0] for row in range(8)]
    for order in ([3, 1], [3, 7, 0, 5]):
        assert masks(task, part(given, order), [99])[0] == alone[3]
    together = task.inputs(given, np.random.default_rng(99)).inputs["tokens"].numpy()
    assert [row.tobytes() for row in together] == alone
    text = part(given, [0, 0])  # the same text under two numbers
    flags = chosen(task.inputs(text._replace(numbers=np.array([0, 1])), np.random.default_rng(0)))
    assert (flags[0] != flags[1]).any()


def test_static_copies_are_served_equally_often() -> None:
    task, given = bound(64, copies=4), random_rows(1, 64, 256)
    served = masks(task, given, range(2000))
    counts = [served.count(mask) for mask in set(served)]
    assert counts == pytest.approx([500] * 4, abs=5 * (2000 * 0.25 * 0.75) ** 0.5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rate": 0.0}, "rate: 0.0 is not between 0 and 1"),
        ({"rate": 1.0}, "rate: 1.0 is not between 0 and 1"),
        ({"mask": 0.95}, "mask: 0.95 and random: 0.1 are more than all"),
        ({"mask": -0.1}, "mask: -0.1 and random"),
        ({"random": -0.1}, "random: -0.1 is not in"),
        ({"max_predictions": -1}, "max_predictions: -1 is less than 0"),
        ({"copies": -1}, "copies: -1 is less than 0"),
    ],
)
def test_settings_that_make_no_sense_are_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        replace(Masked(), **options)  # type: ignore[arg-type]


def test_nine_and_one_tenths_are_everything() -> None:
    assert Masked(mask=0.9, random=0.1).mask == 0.9


def test_a_context_without_room_for_text_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"model.context: 2 leaves no room"):
        bound(2, frame="bert")
