"""Hidden spans against the published lengths, the worked example and a slow plain version; the boundary loss beside."""

# B rows, T tokens, N hidden tokens

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

from tests.objectives.samples import letters, octets, random_rows, rows, scripted, tiny
from trivium.data.batch import Batch
from trivium.errors import ConfigError
from trivium.labels import IGNORED
from trivium.models.transformer import Transformer, build
from trivium.objectives.options import CLASS, MASK, SEPARATOR, Spans
from trivium.objectives.spans import SpansTask, borders, ends, lengths
from trivium.parts.boundary import SpanBoundaryHead
from trivium.parts.losses import total
from trivium.parts.options.boundary import SpanBoundaryOptions
from trivium.parts.output import Head

Flags = npt.NDArray[np.bool_]

PMF = [0.2241, 0.1792, 0.1434, 0.1147, 0.0918, 0.0734, 0.0587, 0.0470, 0.0376, 0.0301]


def bound(context: int, *, places: int = 15, **options: object) -> SpansTask:
    objective = replace(Spans(), **options)  # type: ignore[arg-type]
    tokenizer = octets(objective)
    head = {"boundary": SpanBoundaryOptions(rows=places)} if places else {}
    return objective.bind(tokenizer, tiny("encoder", context, tokenizer.size, **head))


def chosen(batch: Batch) -> Flags:
    """Which positions [B, T] have a label."""
    flags = np.zeros(batch.inputs["tokens"].numel(), np.bool_)
    flags[batch.targets["where"][batch.targets["labels"] != IGNORED].numpy()] = True
    return flags.reshape(batch.inputs["tokens"].shape)


def runs(flags_T: Flags) -> list[tuple[int, int]]:
    """First and last of every run of True."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], flags_T.astype(int), [0]])))
    return [(int(first), int(stop) - 1) for first, stop in edges.reshape(-1, 2)]


def test_lengths_are_geometric_and_renormalised() -> None:
    pmf = np.diff(lengths(0.2, 10), prepend=0)
    assert pmf == pytest.approx(np.array(PMF), abs=5e-5)
    assert (pmf * np.arange(1, 11)).sum() == pytest.approx(3.797, abs=5e-4)
    clipped = np.minimum(np.random.default_rng(0).geometric(0.2, 10**6), 10).mean()
    assert clipped == pytest.approx(4.46, abs=0.01)  # what it is not


def test_drawn_spans_have_those_lengths(count: Callable[[int, int], int]) -> None:
    """Rows of sixty one-letter words of which ten may be hidden: the first span drawn is always whole."""
    task, total = bound(60, frame="none", rate=1 / 6), count(3000, 30_000)
    draws = np.random.default_rng(0).random((total, 4, 60))
    draws[:, 0, :40] = 0.9
    draws[:, 0, 20] = 0.0  # the first span begins here,
    draws[:, 0, 40:] = 0.5  # the others far behind it
    batch = task.inputs(rows([[*b"a " * 30, 0]] * total, [61] * total), scripted(draws))
    sizes = np.argmin(np.pad(chosen(batch)[:, 20:31], ((0, 0), (0, 1))), axis=1)
    seen = np.bincount(sizes, minlength=11)[1:] / total
    assert seen == pytest.approx(np.array(PMF), abs=5 * (0.25 / total) ** 0.5)


def test_the_worked_example() -> None:
    """x0 .. x9 with the span 4..6: each of its tokens from x3, x7 and the places 1, 2, 3."""
    task = bound(10, frame="none", rate=0.25)
    text = b"a b c d e "
    order = [0.9] * 10
    order[4] = 0.1  # "c" and the two tokens behind it
    draws = [order, [0.5] * 10, [0.5] * 10, [0.5] * 10]
    batch = task.inputs(rows([[*text, 0]], [11]), scripted([draws]))
    assert np.flatnonzero(chosen(batch)[0]).tolist() == [4, 5, 6]
    mask = task.vocabulary.ids[MASK]
    assert batch.inputs["tokens"].tolist() == [[*text[:4], mask, mask, mask, *text[7:]]]
    assert batch.targets["where"].tolist() == [4, 5, 6]
    assert batch.targets["left"].tolist() == [3, 3, 3]
    assert batch.targets["right"].tolist() == [7, 7, 7]
    assert batch.targets["places"].tolist() == [0, 1, 2]  # p1, p2, p3
    assert batch.targets["bordered"].tolist() == batch.targets["labels"].tolist() == [*text[4:7]]
    assert (batch.counts["tokens"], batch.counts["boundary"]) == (3, 3)


def test_neighbouring_spans_are_one_before_borders_and_fates() -> None:
    flags = np.array([[False, True, True, True, False, True, True, False]])
    first, last = ends(flags)
    assert first.tolist() == [[-1, 1, 1, 1, -1, 5, 5, -1]]
    assert last.tolist() == [[-1, 3, 3, 3, -1, 6, 6, -1]]
    task = bound(8, frame="none", rate=0.5)
    # four spans of one word each, together 2..5; the fates of the later ones would keep them
    draws = [
        [0.9, 0.9, 0.4, 0.2, 0.1, 0.3, 0.9, 0.9],
        [0.0] * 8,
        [0.5, 0.5, 0.1, 0.95, 0.95, 0.95, 0.5, 0.5],
        [0.5] * 8,
    ]
    batch = task.inputs(rows([[*b"a b c d ", 0]], [9]), scripted([draws]))
    assert np.flatnonzero(chosen(batch)[0]).tolist() == [2, 3, 4, 5]
    assert batch.inputs["tokens"][0, 2:6].tolist() == [task.vocabulary.ids[MASK]] * 4
    assert batch.targets["left"].tolist() == [1] * 4
    assert batch.targets["right"].tolist() == [6] * 4
    assert batch.targets["places"].tolist() == [0, 1, 2, 3]


def test_a_span_at_an_edge_and_places_beyond_the_table_have_no_boundary_loss() -> None:
    flags = np.zeros((2, 12), np.bool_)
    flags[0, [0, 1, 4, 5, 6, 11]] = True
    flags[1, [2, 3, 8, 9]] = True
    around = borders(*ends(flags), np.array([12, 10]), 2)
    assert around.known.tolist() == [False, False, True, True, False, False, True, True, False, False]
    assert around.left[around.known].tolist() == [3, 3, 13, 13]
    assert around.right[around.known].tolist() == [7, 7, 16, 16]
    assert around.places[around.known].tolist() == [0, 1, 0, 1]
    assert not np.concatenate([around.left, around.right, around.places])[np.tile(~around.known, 3)].any()


@settings(max_examples=150, deadline=None)
@given(
    text=st.text(alphabet="ab  \x00", min_size=1, max_size=40),
    rate=st.floats(0.05, 0.95),
    seed=st.integers(0, 99),
)
def test_spans_are_what_a_plain_loop_takes(text: str, rate: float, seed: int) -> None:
    """The reference's loop, except that a start is drawn among words and not among pieces; NUL stands for END."""
    task = bound(len(text), frame="none", rate=rate)
    tokenizer = octets(task.options)
    ids = [tokenizer.end if byte == 0 else byte for byte in text.encode()]
    batch = task.inputs(rows([[*ids, 0]], [len(text) + 1]), np.random.default_rng(seed))
    order, size, _, _ = np.random.default_rng(seed).random((1, 4, len(text)))[0]
    words: list[list[int]] = []
    for at, id in enumerate(ids):
        if id == tokenizer.end:
            continue
        begins = not at or ids[at - 1] == tokenizer.end
        if begins or tokenizer.starts_word(id) or tokenizer.ends_word(ids[at - 1]):
            words.append([])
        words[-1].append(at)
    budget = int(np.ceil(sum(map(len, words)) * rate))
    hidden: set[int] = set()
    for number in sorted(range(len(words)), key=lambda number: order[words[number][0]]):
        if words[number][0] in hidden:
            continue
        draw = size[words[number][0]]
        wanted = 1 + int(np.sum(draw >= np.cumsum(0.2 * 0.8 ** np.arange(10) / (1 - 0.8**10))[:-1]))
        span = [at for word in words[number : number + wanted] for at in word]
        for place, at in enumerate(span):
            if len(hidden) == budget or at != span[0] + place:
                break
            hidden.add(at)
    assert set(np.flatnonzero(chosen(batch)[0]).tolist()) == hidden
    assert len(hidden) == budget


def test_the_budget_is_rounded_up_and_counts_no_frame() -> None:
    task = bound(42)
    batch = task.inputs(random_rows(6, 40, 256), np.random.default_rng(0))
    assert chosen(batch).sum(1).tolist() == [6] * 6
    task = bound(43)
    assert chosen(task.inputs(random_rows(6, 41, 256), np.random.default_rng(0))).sum(1).tolist() == [7] * 6


def test_the_frame_is_a_border_and_never_hidden() -> None:
    task = bound(22, rate=0.9)
    batch = task.inputs(random_rows(50, 20, 256), np.random.default_rng(0))
    flags = chosen(batch)
    assert not flags[:, [0, -1]].any()
    assert batch.counts["tokens"] == 50 * 18
    ids = batch.inputs["tokens"]
    assert ids[:, 0].tolist() == [task.vocabulary.ids[CLASS]] * 50
    assert ids[:, -1].tolist() == [task.vocabulary.ids[SEPARATOR]] * 50
    assert batch.counts["boundary"] == sum(min(last - first + 1, 15) for row in flags for first, last in runs(row))


def test_a_whole_span_has_one_fate() -> None:
    task = bound(402, rate=0.3)
    given_rows = random_rows(300, 400, 256)
    batch = task.inputs(given_rows, np.random.default_rng(0))
    tokens, flags = batch.inputs["tokens"].numpy()[:, 1:-1], chosen(batch)[:, 1:-1]
    fates = {"mask": 0, "random": 0, "kept": 0}
    for row, text, hidden in zip(tokens, given_rows.text, flags, strict=True):
        for first, last in runs(hidden):
            now, before = row[first : last + 1], text[first : last + 1]
            masked = now == task.vocabulary.ids[MASK]
            assert masked.all() or not masked.any()
            fates["mask" if masked.all() else "kept" if (now == before).all() else "random"] += 1
        assert (row == text)[~hidden].all()
    total = sum(fates.values())
    error = 5 * (0.25 / total) ** 0.5
    assert total > 4000
    assert [fates[name] / total for name in ("mask", "random", "kept")] == pytest.approx([0.8, 0.1, 0.1], abs=error)


def test_what_was_hidden_leaves_no_trace_in_the_inputs() -> None:
    task = bound(66, rate=0.4, random=0.2)
    given_rows = random_rows(8, 64, 256)
    first = task.inputs(given_rows, np.random.default_rng(0))
    hidden = (chosen(first) & (first.inputs["tokens"].numpy() != np.pad(given_rows.text, ((0, 0), (1, 1)))))[:, 1:-1]
    altered = given_rows.ids.copy()
    # Other letters instead of letters: the borders of words stay where they are.
    letters_ = hidden & (altered[:, :-1] >= 97) & (altered[:, :-1] <= 121)
    assert letters_.sum() > 3
    altered[:, :-1][letters_] += 1
    second = task.inputs(given_rows._replace(ids=altered), np.random.default_rng(0))
    assert torch.equal(first.inputs["tokens"], second.inputs["tokens"])
    assert not torch.equal(first.targets["bordered"], second.targets["bordered"])


def test_a_model_without_a_boundary_head_has_the_tokens_alone() -> None:
    task = bound(42, places=0)
    batch = task.inputs(random_rows(4, 40, 256), np.random.default_rng(0))
    assert set(batch.targets) == {"where", "labels"}
    assert batch.counts.keys() == {"tokens", "sequences"}


def test_borders_learn_what_they_can_tell_and_no_more() -> None:
    """Runs of one letter: its neighbours tell a hidden letter inside a run, but nothing tells random letters."""
    objective = Spans(rate=0.2, longest=3, frame="none")
    tokenizer = letters(objective, 6)
    config = tiny("encoder", 24, tokenizer.size, boundary=SpanBoundaryOptions(size=8))
    for size, least, most in ((8, 0.7, 1.0), (1, 1 / 6 - 0.06, 1 / 6 + 0.06)):
        task, model, rng = objective.bind(tokenizer, config), build(config, seed=0), np.random.default_rng(0)
        task = replace(task, vocabulary=replace(task.vocabulary, starts_word=~task.vocabulary.is_special))
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, fused=True)
        for step in range(121):
            text = np.repeat(rng.integers(0, 6, (32, 25 // size + 4)), size, axis=1)[:, 3:28]
            batch = task.inputs(rows(text.tolist(), [25] * 32), rng)
            states = model(**batch.inputs)
            losses = task.loss(model, states, batch.targets)
            assert list(losses) == ["tokens", "boundary"]
            if step < 120:
                optimizer.zero_grad()
                total(losses, batch.counts).backward()  # type: ignore[no-untyped-call]
                optimizer.step()
        with torch.no_grad():
            right = _right(model, batch, states.hidden)
        assert least < right < most


def _right(model: Transformer, batch: Batch, hidden: torch.Tensor) -> float:
    flat, targets, head = hidden.flatten(0, 1), batch.targets, cast(SpanBoundaryHead, model.boundary)
    states = head.states(flat[targets["left"]], flat[targets["right"]], targets["places"])
    real = targets["bordered"] != IGNORED
    guess = cast(Head, head.output).logits(states).argmax(-1)
    return float((guess == targets["bordered"])[real].float().mean())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rate": 1.0}, "rate: 1.0 is not between 0 and 1"),
        ({"mask": 0.95}, "mask: 0.95 and random: 0.1 are more than all"),
        ({"stop": 0.0}, "stop: 0.0 is not between 0 and 1"),
        ({"longest": 0}, "longest: 0 is less than 1"),
    ],
)
def test_settings_that_make_no_sense_are_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        replace(Spans(), **options)  # type: ignore[arg-type]
