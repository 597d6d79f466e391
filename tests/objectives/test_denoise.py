"""Span corruption against T5's worked examples and lengths, and a slow plain version."""

# B rows, N tokens of raw text, S of the corrupted text, T of the targets

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.objectives.samples import octets, random_rows, rows, scripted, tiny
from trivium.errors import ConfigError
from trivium.labels import IGNORED
from trivium.models.transformer import build
from trivium.objectives.denoise import DenoiseTask, collapse, span_noise
from trivium.objectives.noise_lengths import room_for, span_counts
from trivium.objectives.options import Denoise, sentinel

Flags = npt.NDArray[np.bool_]
SENTINELS = np.arange(32099, 31999, -1)
SENTENCE = list(range(21, 32))
OPTIONS = [{}, {"noise": "iid"}, {"density": 0.5, "mean_span": 1.0}, {"density": 0.3, "mean_span": 8.0}]


def bound(family: str, context: int, **options: object) -> DenoiseTask:
    objective = replace(Denoise(), **options)  # type: ignore[arg-type]
    tokenizer = octets(objective)
    return objective.bind(tokenizer, tiny(family, context, tokenizer.size))


def flags(text: str) -> Flags:
    return np.array([[character == "1" for character in text]])


def collapsed(ids: list[int], away: Flags, real: int | None = None) -> list[int]:
    lengths = np.array([len(ids) if real is None else real])
    result, sizes = collapse(np.array([ids]), away, lengths, SENTINELS, end=1, fill=0, width=len(ids) + 3)
    assert (result[0, sizes[0] :] == 0).all()
    return [int(id) for id in result[0, : sizes[0]]]


@pytest.mark.parametrize(
    ("mask", "inputs", "targets"),
    [
        ("00110000100", [21, 22, 32099, 25, 26, 27, 28, 32098, 30, 31, 1], [32099, 23, 24, 32098, 29, 32097, 1]),
        ("00011000011", [21, 22, 23, 32099, 26, 27, 28, 29, 32098, 1], [32099, 24, 25, 32098, 30, 31, 1]),
    ],
)
def test_the_worked_examples(mask: str, inputs: list[int], targets: list[int]) -> None:
    assert collapsed(SENTENCE, flags(mask)) == inputs
    assert collapsed(SENTENCE, ~flags(mask)) == targets


@settings(max_examples=150, deadline=None)
@given(mask=st.text("01", min_size=1, max_size=30), missing=st.integers(0, 5))
def test_collapsing_is_what_a_plain_loop_does(mask: str, missing: int) -> None:
    ids, real = list(range(100, 100 + len(mask))), max(1, len(mask) - missing)
    expected: list[int] = []
    groups = itertools.groupby(zip(ids[:real], mask, strict=False), key=lambda pair: pair[1])
    names = iter(SENTINELS.tolist())
    for away, group in groups:
        expected += [next(names)] if away == "1" else [id for id, _ in group]
    assert collapsed(ids, flags(mask), real) == [*expected, 1]


@pytest.mark.parametrize(
    ("context", "raw", "targets"), [(512, 568, 114), (256, 284, 58), (128, 141, 29), (1024, 1137, 229)]
)
def test_the_lengths_of_t5(context: int, raw: int, targets: int) -> None:
    task = bound("encoder-decoder", context)
    assert (task.length, task.room.inputs, task.room.targets) == (raw, context, targets)
    batch = task.inputs(random_rows(3, raw, 256), np.random.default_rng(0))
    assert batch.inputs["source"].shape == (3, context)
    assert batch.inputs["tokens"].shape == batch.targets["labels"].shape == (3, targets)
    assert set(batch.inputs) == {"source", "tokens"}  # nothing is padded
    assert batch.counts["tokens"] == 3 * targets


def test_too_few_sentinels_are_refused_with_the_number_that_is_enough() -> None:
    with pytest.raises(ConfigError, match=r"objective.sentinels: a row of 2274 tokens .* 114 runs .* set it to 114"):
        bound("encoder-decoder", 2048)
    task = bound("encoder-decoder", 2048, sentinels=114)
    assert (task.length, task.room.targets) == (2274, 456)
    assert bound("encoder-decoder", 512, noise="iid").length == 511
    with pytest.raises(ConfigError, match=r"objective.sentinels: a row of 1023 tokens"):
        bound("encoder-decoder", 1024, noise="iid")
    assert bound("encoder-decoder", 1024, noise="iid", sentinels=200).length == 1023


@pytest.mark.parametrize(("length", "noise", "runs"), [(30, 4, 1), (568, 85, 28), (11, 2, 1), (2, 1, 1), (1, 0, 0)])
def test_halves_round_to_even(length: int, noise: int, runs: int) -> None:
    assert [int(number) for number in span_counts(np.array(length), 0.15, 3.0)] == [noise, runs]


@settings(max_examples=150, deadline=None)
@given(
    lengths=st.lists(st.integers(2, 90), min_size=1, max_size=4),
    density=st.floats(0.02, 0.98),
    mean=st.floats(1, 9),
    seed=st.integers(0, 99),
)
def test_a_mask_has_its_numbers_begins_kept_and_ends_in_noise(
    lengths: list[int], density: float, mean: float, seed: int
) -> None:
    draws = np.random.default_rng(seed).random((len(lengths), 90))
    masks = span_noise(draws, np.array(lengths), density, mean)
    for mask, length in zip(masks, lengths, strict=True):
        noise = min(max(round(length * density), 1), length - 1)
        runs = min(max(round(noise / mean), 1), noise, length - noise)
        groups = [value for value, _ in itertools.groupby(mask[:length].tolist())]
        assert mask[:length].sum() == noise
        assert groups == [False, True] * runs
        assert not mask[length:].any()


def test_the_mean_span_of_a_full_row_is_the_same_in_every_draw() -> None:
    masks = span_noise(np.random.default_rng(0).random((50, 568)), np.full(50, 568), 0.15, 3.0)
    for mask in masks:
        runs = sum(value for value, _ in itertools.groupby(mask.tolist()))
        assert mask.sum() / runs == pytest.approx(85 / 28)
    assert len({mask.tobytes() for mask in masks}) == 50


def test_every_way_to_split_a_text_is_equally_likely(count: Callable[[int, int], int]) -> None:
    total = count(21_000, 210_000)
    # 12 tokens, 4 of them noise in 2 runs: 3 ways to split the noise, 7 to split the rest
    masks = span_noise(np.random.default_rng(0).random((total, 12)), np.full(total, 12), 1 / 3, 2.0)
    seen = Counter(mask.tobytes() for mask in masks)
    assert len(seen) == 21
    chi_square = sum((times - total / 21) ** 2 / (total / 21) for times in seen.values())
    assert chi_square < 52  # 20 degrees of freedom: once in 10,000


def restored(source: list[int], target: list[int], names: list[int], end: int) -> list[int]:
    """The text, with every sentinel of `source` replaced by what follows it in `target`."""
    assert source[-1] == target[-1] == end
    spans: dict[int, list[int]] = {}
    for id in target[:-1]:
        if id in names:
            spans[id] = []
        else:
            spans[list(spans)[-1]].append(id)
    return [out for id in source[:-1] for out in (spans[id] if id in names else [id])]


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("last", [0, 1, 2, 5, 40])
def test_substituting_the_spans_back_restores_the_text(options: dict[str, object], last: int) -> None:
    task = bound("encoder-decoder", 60, **options)
    given = random_rows(20, task.length, 256, last=last)
    batch = task.inputs(given, np.random.default_rng(0))
    labels, source = batch.targets["labels"], batch.inputs["source"]
    real = batch.inputs.get("source_padding", torch.ones_like(source, dtype=torch.bool))
    for row, length in enumerate(given.lengths.tolist()):
        target = [id for id in labels[row].tolist() if id != IGNORED]
        names = task.sentinels.tolist()
        assert restored(source[row][real[row]].tolist(), target, names, task.end) == given.text[row, :length].tolist()
        used = [id for id in target if id in names]
        assert used == names[: len(used)]
        if task.options.noise == "span" and length > 1:
            assert target[-2] not in names  # masks end in noise, so nothing closes the targets
        # the decoder reads what it had to say one step before
        assert batch.inputs["tokens"][row, : len(target)].tolist() == [task.pad, *target[:-1]]


@pytest.mark.parametrize("attention", ["causal", "prefix"])
@pytest.mark.parametrize("noise", ["span", "iid"])
def test_one_stack_reads_the_inputs_and_then_the_targets(noise: str, attention: str) -> None:
    two = bound("encoder-decoder", 256, noise=noise)
    one = replace(two, two_sides=False, options=replace(two.options, attention=attention))  # type: ignore[arg-type]
    given = random_rows(8, two.length, 256, last=30)
    apart, joined = (task.inputs(given, np.random.default_rng(5)) for task in (two, one))
    real = apart.inputs.get("source_padding", torch.ones_like(apart.inputs["source"], dtype=torch.bool))
    for row in range(8):
        source = apart.inputs["source"][row][real[row]].tolist()
        target = [id for id in apart.targets["labels"][row].tolist() if id != IGNORED]
        tokens, labels = joined.inputs["tokens"][row].tolist(), joined.targets["labels"][row].tolist()
        whole = [*source, *target]
        assert tokens[: len(whole) - 1] == whole[:-1]
        assert labels[: len(source) - 1] == [IGNORED] * (len(source) - 1)
        assert labels[len(source) - 1 : len(whole) - 1] == target
        assert set(labels[len(whole) - 1 :]) <= {IGNORED}
        if attention == "prefix":
            assert joined.inputs["prefix"][row] == len(source)
    assert joined.counts["tokens"] == apart.counts["tokens"]
    assert ("prefix" in joined.inputs) == (attention == "prefix")


def test_all_of_a_joined_row_can_count() -> None:
    task = bound("decoder", 64, loss_on="all")
    batch = task.inputs(random_rows(3, task.length, 256), np.random.default_rng(0))
    assert torch.equal(batch.targets["labels"][:, :-1], batch.inputs["tokens"][:, 1:])
    assert batch.counts["tokens"] == 3 * (task.room.joined - 1)


@pytest.mark.parametrize("options", [{}, {"attention": "prefix"}, {"noise": "iid", "attention": "prefix"}])
def test_no_state_of_one_stack_sees_the_target_it_predicts(options: dict[str, object]) -> None:
    task = bound("decoder", 48, **options)
    model = build(tiny("decoder", 48, 358), seed=2).eval()
    batch = task.inputs(random_rows(1, task.length, 256), np.random.default_rng(0))
    places = (batch.targets["labels"][0] != IGNORED).nonzero().flatten().tolist()
    with torch.no_grad():
        before = model(**batch.inputs).hidden
        for place in places[:-1]:
            tokens = batch.inputs["tokens"].clone()
            tokens[0, place + 1 :] = (tokens[0, place + 1 :] + 1) % 256
            after = model(**{**batch.inputs, "tokens": tokens}).hidden
            torch.testing.assert_close(after[:, : place + 1], before[:, : place + 1])
            assert not torch.allclose(after[:, place + 1], before[:, place + 1])


@pytest.mark.parametrize("options", OPTIONS)
def test_neither_side_shows_what_the_other_is_for(options: dict[str, object]) -> None:
    task = bound("encoder-decoder", 60, **options)
    given = rows([list(range(task.length + 1))] * 6, [task.length + 1] * 6)  # every id once: its side is plain
    assert task.length < 120
    first = task.inputs(given, np.random.default_rng(0))
    said = first.targets["labels"].numpy()
    noise = (given.text[:, :, None] == said[:, None, :]).any(2)
    assert noise.any()
    without_noise, without_text = given.ids.copy(), given.ids.copy()
    without_noise[:, :-1][noise] += 120
    without_text[:, :-1][~noise] += 120
    second = task.inputs(given._replace(ids=without_noise), np.random.default_rng(0))
    assert torch.equal(first.inputs["source"], second.inputs["source"])
    assert not torch.equal(first.targets["labels"], second.targets["labels"])
    third = task.inputs(given._replace(ids=without_text), np.random.default_rng(0))
    assert torch.equal(first.targets["labels"], third.targets["labels"])
    assert not torch.equal(first.inputs["source"], third.inputs["source"])


def test_coins_have_their_share_and_their_number_of_sentinels(count: Callable[[int, int], int]) -> None:
    task = bound("encoder-decoder", 513, noise="iid", sentinels=110)
    total = count(400, 2000)
    labels = task.inputs(random_rows(total, 512, 256), np.random.default_rng(0)).targets["labels"].numpy()
    names = np.isin(labels, task.sentinels)
    noise = (labels != IGNORED) & (labels != task.end) & ~names
    assert noise.sum() / total / 512 == pytest.approx(0.15, abs=0.002)
    closing = 0.85  # of the texts end in a kept token
    assert names.sum() / total - closing == pytest.approx(65, abs=1)


def test_luck_beyond_the_fixed_lengths_stays_text() -> None:
    task = bound("encoder-decoder", 256, noise="iid")
    given = random_rows(2, 255, 256)
    for pattern in (np.zeros((2, 255)), np.tile([0.9, 0.0, 0.9], (2, 85))):
        batch = task.inputs(given, scripted(pattern))
        assert batch.inputs["source"].shape == (2, 256)
        real = batch.inputs["source_padding"]
        for row in range(2):
            target = [id for id in batch.targets["labels"][row].tolist() if id != IGNORED]
            source = batch.inputs["source"][row][real[row]].tolist()
            assert restored(source, target, task.sentinels.tolist(), task.end) == given.text[row].tolist()


def test_the_first_sentinel_has_the_largest_id() -> None:
    objective = Denoise(sentinels=7)
    tokenizer = octets(objective)
    ids = [tokenizer.specials[sentinel(number)] for number in range(7)]
    assert ids == list(range(tokenizer.size - 1, tokenizer.size - 8, -1))
    assert sentinel(0) == "<extra_id_0>"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"density": 0.0}, "density: 0.0 is not between 0 and 1"),
        ({"density": 1.0}, "density: 1.0 is not between 0 and 1"),
        ({"mean_span": 0.5}, "mean_span: 0.5 is less than 1"),
        ({"sentinels": 0}, "sentinels: 0 is less than 1"),
        ({"loss_on": "all", "attention": "prefix"}, "loss_on: .* set loss_on=targets"),
    ],
)
def test_settings_that_make_no_sense_are_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        replace(Denoise(), **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("family", ["decoder", "encoder-decoder"])
@pytest.mark.parametrize("noise", ["span", "iid"])
def test_a_row_is_as_long_as_the_context_allows(family: str, noise: str) -> None:
    # "a S0 END" and "S0 b END": 3 and 3, joined without the last 5; coins are given room for one token more
    least = {"decoder span": 5, "decoder iid": 6, "encoder-decoder span": 3, "encoder-decoder iid": 5}[
        f"{family} {noise}"
    ]
    for context in range(1, least):
        with pytest.raises(ConfigError, match=rf"model.context: {context} is too short"):
            bound(family, context, noise=noise)
    for context in range(least, 40):
        task = bound(family, context, noise=noise)
        batch = task.inputs(random_rows(2, task.length, 256), np.random.default_rng(0))
        assert max(tensor.shape[1] for tensor in batch.inputs.values()) <= context
        more = room_for(task.options, task.length + 1)
        need = more.joined - 1 if family == "decoder" else max(more.inputs, more.targets)
        assert need > context


def test_documents_may_begin_anywhere_in_a_row() -> None:
    task = bound("encoder-decoder", 24)
    end = task.end
    given = rows([([end, 1, 2] * task.length)[: task.length + 1]] * 2, [task.length + 1] * 2)
    batch = task.inputs(given, np.random.default_rng(0))
    for row in range(2):
        source, target = batch.inputs["source"][row].tolist(), batch.targets["labels"][row].tolist()
        assert restored(source, target, task.sentinels.tolist(), end) == given.text[row].tolist()
