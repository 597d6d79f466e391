"""R9, the log of rollbacks: what it says, where it goes back to, and what it gives up; without a run."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trivium.checkpoints.store import Store
from trivium.errors import CheckpointError
from trivium.training.rollback import History, Return, replay
from trivium.training.spikes import Alarm, Rollback, Span

ALARM = Alarm(100, 101, "loss", "the loss was high")
ENTRY = Return(
    step=100,
    found=101,
    trigger="loss",
    why="the loss was high",
    checkpoint="step-00000040",
    to=40,
    action="skip",
    rows=(384, 404),
)


def history(folder: Path, *steps: int, **state: Any) -> History:
    """The log of a run in batches of 4 rows with checkpoints of these steps, whose state is `state`."""
    result = History(
        folder, Store(folder / "checkpoints", keep=99), Rollback(patience=3, margin=30, attempts=3), batch=4
    )
    for step in steps:
        save(result, step, **state)
    return result


def save(log: History, step: int, **state: Any) -> Path:
    return log.store.save(step, tensors={"model": {"weight": torch.zeros(1)}}, documents={"state": state})


def steps(log: History) -> list[int]:
    return [item.step for item in log.store.checkpoints()]


# The log -----------------------------------------------------------------------------------------------------------


def test_a_rollback_is_told_in_a_sentence() -> None:
    before, after = "the loss was high at step 100 (seen at step 101): went back to ", "of the data are left out"
    assert ENTRY.told() == f"{before}step 40; rows 384 to 403 {after}"
    assert replace(ENTRY, to=0).told() == f"{before}the beginning; rows 384 to 403 {after}"


def test_the_log_is_lines_of_json_that_are_read_again(tmp_path: Path) -> None:
    """Other kinds of rows may stand in it, and a run without a rollback has none."""
    log = history(tmp_path)
    assert log.saved
    log.write()
    assert not log.path.exists()
    entries = [ENTRY, replace(ENTRY, why="größer als sonst", to=0, checkpoint="", action="stop")]
    for entry in entries:
        log.add(entry)
        assert not log.saved
    log.write()
    assert log.saved
    text = (tmp_path / "events.jsonl").read_text()
    first, second = map(json.loads, text.splitlines())
    assert first == {
        "kind": "rollback",
        "step": 100,
        "found": 101,
        "trigger": "loss",
        "why": "the loss was high",
        "checkpoint": "step-00000040",
        "to": 40,
        "action": "skip",
        "rows": [384, 404],
    }
    assert second["why"] == "größer als sonst"
    assert "größer" in text  # as a person reads it
    log.path.write_text('{"kind": "note"}\n' + text)
    again = history(tmp_path)
    again.read()
    assert again.returns == entries


NUMBERS: list[Any] = [True, 1.0, "1", None, 2**53, -(2**53)]
PAIRS: list[Any] = [None, 7, [1], [1, 2, 3]]
WORDS: list[Any] = [None, 1, []]
WRONG: list[tuple[dict[str, Any], str]] = [
    *(({name: bad}, name) for name in ("step", "found", "to") for bad in NUMBERS),
    *(({"rows": [bad, 4]}, "rows") for bad in NUMBERS),
    *(({"rows": [0, bad]}, "rows") for bad in NUMBERS),
    *(({"rows": bad}, "rows") for bad in PAIRS),
    *(({name: bad}, name) for name in ("trigger", "why", "checkpoint", "action") for bad in WORDS),
]


@pytest.mark.parametrize(("change", "name"), WRONG, ids=str)
def test_a_damaged_log_is_refused_in_a_sentence(tmp_path: Path, change: dict[str, Any], name: str) -> None:
    """A value of another kind, one beyond what JSON readers agree on, or none."""
    log = history(tmp_path)
    log.add(ENTRY)
    log.write()
    row = json.loads(log.path.read_text())
    missing = {key: value for key, value in row.items() if key != name}
    for bad in ({**row, **change}, missing):
        log.path.write_text(json.dumps(bad))
        with pytest.raises(CheckpointError, match=r"events\.jsonl is damaged; restore it from a copy or delete it"):
            log.read()
    largest = 2**53 - 1
    log.path.write_text(json.dumps({**row, "step": largest, "found": largest, "rows": [-largest, largest]}))
    log.read()
    assert log.returns == [replace(ENTRY, step=largest, found=largest, rows=(-largest, largest))]


def test_only_sound_updates_are_replayed() -> None:
    sound = {"kind": "train", "step": 7, "loss": 2.0, "norm": 0.5}
    changes: list[dict[str, Any]] = [
        {"skipped": True},
        {"kind": "valid"},
        {"kind": "valid", "skipped": True},
        {"loss": None},
        {"norm": None},
        {"loss": None, "norm": None},
    ]
    journal = [sound, *(sound | change for change in changes), sound | {"step": 8, "skipped": False}]
    assert list(replay(journal)) == [(7, 2.0, 0.5), (8, 2.0, 0.5)]


# Rows that are left out --------------------------------------------------------------------------------------------

SPANS = st.lists(st.tuples(st.integers(0, 30), st.integers(1, 6)).map(lambda span: (span[0], sum(span))), max_size=5)


@given(known=SPANS, rolled=SPANS)
@settings(max_examples=100, deadline=None)
def test_spans_are_the_runs_of_rows_that_any_rollback_left_out(known: list[Span], rolled: list[Span]) -> None:
    """Against rows one by one."""
    log = history(Path("nowhere"))
    for span in rolled:
        log.add(replace(ENTRY, rows=span))
    for given_spans, spans in ((known, log.spans(known)), ([], log.spans())):
        left_out = sorted({row for span in [*given_spans, *rolled] for row in range(*span)})
        runs = itertools.groupby(enumerate(left_out), key=lambda pair: pair[1] - pair[0])
        groups = [[row for _, row in run] for _, run in runs]
        assert spans == [(group[0], group[-1] + 1) for group in groups]


def test_each_attempt_reaches_twice_as_far_before_the_spike(tmp_path: Path) -> None:
    """By hand, in batches of 4 rows: 3, 6 and 12 steps before step 100, and behind all that was left out before."""
    log = history(tmp_path)
    spans = []
    for _ in range(3):
        entry, found = log.decide(ALARM, log.spans(), print)
        log.add(entry)
        spans.append(entry.rows)
        assert found is None
        assert entry == replace(ENTRY, to=0, checkpoint="", rows=entry.rows)
    assert spans == [(96 * 4, 101 * 4), (93 * 4, 106 * 4), (87 * 4, 114 * 4)]
    assert log.decide(ALARM, log.spans(), print)[0].action == "stop"


def test_no_row_before_the_checkpoint_is_left_out(tmp_path: Path) -> None:
    """The second attempt would reach to step 93, but what the checkpoint at 95 has learnt from stays."""
    log = history(tmp_path, 95, rollbacks=9)
    log.add(replace(ENTRY, to=0))
    entry, found = log.decide(ALARM, [], print)
    assert found is not None
    assert (found.step, found.path.name) == (95, "step-00000095")
    assert (entry.to, entry.checkpoint, entry.rows) == (95, "step-00000095", (95 * 4, 101 * 4))


@pytest.mark.parametrize(
    ("earlier", "attempts"),
    [
        ([(70, "skip")], 0),
        ([(71, "skip")], 1),
        ([(129, "skip")], 1),
        ([(130, "skip")], 0),
        ([(100, "skip"), (100, "skip"), (100, "stop")], 0),
        ([(100, "stop"), (100, "skip"), (90, "skip")], 2),
        ([(100, "skip"), (20, "stop")], 1),
    ],
)
def test_attempts_count_within_the_margin_since_the_run_last_stopped(
    tmp_path: Path, earlier: list[tuple[int, str]], attempts: int
) -> None:
    log = history(tmp_path)
    for step, action in earlier:
        log.add(replace(ENTRY, step=step, action=action))
    entry, _ = log.decide(ALARM, [], print)
    assert entry.rows[0] == (99 - 3 * 2**attempts) * 4


# Checkpoints -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("there", "damaged", "chosen"),
    [
        ([40, 60, 70, 71, 90], [], 70),  # the newest that is 30 steps old
        ([40, 50, 60, 70, 90], [70], 60),
        ([50, 60, 70, 80, 90], [50, 60, 70], 80),  # none of them whole: the oldest of the young ones
        ([71, 80, 96], [], 71),
        ([96, 97, 99, 100, 101], [], 96),
        ([97, 100, 101], [], None),  # the damage may be in there already
        ([], [], None),
    ],
)
def test_the_newest_whole_checkpoint_a_margin_before_the_spike_is_chosen(
    tmp_path: Path, there: list[int], damaged: list[int], chosen: int | None
) -> None:
    log = history(tmp_path, *there)
    for step in damaged:
        (log.store.folder / f"step-{step:08d}" / "model.safetensors").write_bytes(b"")
    said: list[str] = []
    entry, found = log.decide(ALARM, [], said.append)
    assert (found.step if found else None) == chosen
    assert entry.to == (chosen or 0)
    assert len(said) == len(damaged)
    assert all(
        line.startswith("skipped a checkpoint: ") and f"step-{step:08d}" in line
        for line, step in zip(said, sorted(damaged, reverse=True), strict=True)
    )


def test_what_a_rollback_gave_up_is_removed_once_the_log_is_written(tmp_path: Path) -> None:
    """All behind the checkpoint it went to; one that was saved later knows of the rollback and stays."""
    log = history(tmp_path, 20, 40, 60)
    save(log, 80, rollbacks=0)
    save(log, 90, rollbacks=1)
    log.settle()
    assert not log.path.exists()
    assert steps(log) == [20, 40, 60, 80, 90]
    log.add(ENTRY)
    assert log.decide(ALARM, [], print)[1].step == 40  # type: ignore[union-attr]
    log.settle()
    assert (log.saved, log.cleared) == (True, True)
    assert log.path.exists()
    assert steps(log) == [20, 40, 90]


def test_a_checkpoint_is_given_up_if_any_rollback_it_does_not_know_went_before_it(tmp_path: Path) -> None:
    log = history(tmp_path, 60, rollbacks=0)
    save(log, 61, rollbacks=1)
    save(log, 81, rollbacks=1)
    save(log, 82, rollbacks=2)
    for to in (40, 80):
        log.add(replace(ENTRY, to=to))
    log.write()
    later = history(tmp_path)  # the process was killed before anything was removed
    later.read()
    later.settle()
    assert steps(later) == [61, 82]


@pytest.mark.parametrize("state", ["", "[]", '{"rollbacks": "many"}', '{"rollbacks": null}', '{"rollbacks": Infinity}'])
def test_a_checkpoint_whose_state_cannot_be_read_is_not_removed(tmp_path: Path, state: str) -> None:
    """Whoever looks for a whole one names it."""
    log = history(tmp_path, 60)
    (log.store.folder / "step-00000060" / "state.json").write_text(state)
    log.add(ENTRY)
    log.settle()
    assert steps(log) == [60]
