from __future__ import annotations

import errno
import math
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trivium.checkpoints import format
from trivium.checkpoints.manifest import FORMAT
from trivium.checkpoints.store import Store
from trivium.errors import CheckpointError, ConfigError


def save(store: Store, step: int, score: float | None = None, mark: int = 0) -> Path:
    tensors = {"model": {"weight": torch.full((4,), float(step))}}
    return store.save(step, tensors=tensors, documents={"state": {"mark": mark}}, score=score)


def steps(store: Store) -> list[int]:
    return [item.step for item in store.checkpoints()]


def silent(message: str) -> None:
    raise AssertionError(message)


def damage(path: Path) -> None:
    file = path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])


def test_an_absent_or_empty_store_has_no_checkpoint(tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "absent"):
        store = Store(folder)
        assert store.checkpoints() == []
        assert store.newest(say=silent) is None
        assert store.best(say=silent) is None
    assert not (tmp_path / "absent").exists()


def test_what_was_saved_is_the_newest(tmp_path: Path) -> None:
    store = Store(tmp_path / "deep" / "checkpoints")
    path = save(store, 120, score=2.5, mark=7)
    assert path == store.folder / "step-00000120"
    found = store.newest(say=silent)
    assert found is not None
    assert (found.path, found.step, found.manifest.notes["score"]) == (path, 120, 2.5)
    assert format.tensors(found.path, "model")["weight"].tolist() == [120.0] * 4
    assert format.document(found.path, "state") == {"mark": 7}


def test_steps_are_ordered_as_numbers(tmp_path: Path) -> None:
    store = Store(tmp_path, keep=9)
    for step in (99_999_999, 100_000_000, 5, 1_000_000_000):
        save(store, step)
    assert steps(store) == [5, 99_999_999, 100_000_000, 1_000_000_000]


@settings(max_examples=25, deadline=None)
@given(
    scores=st.lists(st.none() | st.sampled_from([1.0, 2.0, 3.0, math.nan, math.inf]), min_size=1, max_size=7),
    keep=st.integers(1, 3),
)
def test_the_newest_few_and_the_best_are_kept(
    tmp_path_factory: pytest.TempPathFactory, scores: list[float | None], keep: int
) -> None:
    store = Store(tmp_path_factory.mktemp("store"), keep=keep)
    kept: list[int] = []
    for step, score in enumerate(scores):
        save(store, step, score)
        seen = [(value, at) for at, value in enumerate(scores[: step + 1]) if value is not None and value < math.inf]
        best = min(seen)[1] if seen else None
        kept = sorted({*range(max(0, step - keep + 1), step + 1), *([] if best is None else [best])})
        assert steps(store) == kept
        found = store.best(say=silent)
        assert (found.step if found else None) == best
    assert len(os.listdir(store.folder)) == len(kept)


@settings(max_examples=25, deadline=None)
@given(gaps=st.lists(st.integers(1, 9), min_size=1, max_size=20), keep=st.integers(1, 3), margin=st.integers(0, 15))
def test_one_checkpoint_old_enough_to_go_back_to_is_always_kept(
    tmp_path_factory: pytest.TempPathFactory, gaps: list[int], keep: int, margin: int
) -> None:
    """At most two more than without a margin, and never one much older than necessary."""
    store = Store(tmp_path_factory.mktemp("store"), keep=keep, margin=margin)
    step, saved = 0, []
    for gap in gaps:
        step += gap
        saved.append(step)
        save(store, step)
        kept = steps(store)
        assert kept[-min(keep, len(saved)) :] == saved[-keep:]
        assert len(kept) <= keep + 2
        if saved[0] <= step - margin:
            old = max(at for at in kept if at <= step - margin)
            assert old > step - 2 * margin - 2 * keep * 9


def test_what_is_discarded_goes_newest_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store(tmp_path, keep=9)
    for step in (1, 2, 3, 4):
        save(store, step)
    rename, seen = os.rename, []

    def watching(source: Any, target: Any) -> None:
        rename(source, target)
        seen.append(steps(store))

    monkeypatch.setattr(os, "rename", watching)
    store.discard(item for item in store.checkpoints() if item.step > 2)
    assert seen == [[1, 2, 3], [1, 2]]
    assert sorted(os.listdir(tmp_path)) == ["step-00000001", "step-00000002"]


def test_a_damaged_checkpoint_is_named_and_the_newest_whole_one_is_used(tmp_path: Path) -> None:
    store = Store(tmp_path, keep=3)
    for step in (1, 2, 3):
        save(store, step, score=float(step))
    damage(tmp_path / "step-00000003")
    (tmp_path / "step-00000002" / "manifest.json").unlink()
    said: list[str] = []
    found = store.newest(say=said.append)
    assert found is not None
    assert found.step == 1
    assert len(said) == 2
    assert str(tmp_path / "step-00000003" / "model.safetensors") in said[0]
    assert str(tmp_path / "step-00000002" / "manifest.json") in said[1]


def test_a_damaged_best_gives_way_to_the_next_best(tmp_path: Path) -> None:
    store = Store(tmp_path, keep=3)
    for step, score in ((1, 0.5), (2, 0.9), (3, 0.7)):
        save(store, step, score)
    damage(tmp_path / "step-00000001")
    said: list[str] = []
    found = store.best(say=said.append)
    assert found is not None
    assert found.step == 3
    assert "step-00000001" in said[0]


def test_a_store_of_damaged_checkpoints_is_an_error_not_a_new_beginning(tmp_path: Path) -> None:
    store = Store(tmp_path)
    for step in (1, 2):
        damage(save(store, step))
    said: list[str] = []
    with pytest.raises(CheckpointError, match="no whole checkpoint among 2") as caught:
        store.newest(say=said.append)
    assert str(tmp_path) in str(caught.value)
    assert len(said) == 2


def test_a_checkpoint_of_a_newer_trivium_is_not_skipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store(tmp_path)
    save(store, 1)
    with monkeypatch.context() as later:
        later.setattr(format, "FORMAT", FORMAT + 1)
        save(store, 2)
    with pytest.raises(CheckpointError, match="newer trivium"):
        store.newest(say=silent)


def test_a_run_that_went_back_keeps_what_it_saves(tmp_path: Path) -> None:
    store = Store(tmp_path, keep=1)
    save(store, 200)
    damage(tmp_path / "step-00000200")
    for step in (100, 120):
        save(store, step)
        found = store.newest(say=lambda _: None)
        assert found is not None
        assert found.step == step
    save(store, 200, mark=2)
    found = store.newest(say=silent)
    assert found is not None
    assert format.document(found.path, "state") == {"mark": 2}
    assert steps(store) == [200]


def test_a_step_saved_again_replaces_the_first(tmp_path: Path) -> None:
    store = Store(tmp_path)
    for mark in range(3):
        path = save(store, 7, mark=mark)
        assert path.name == "step-00000007"
        assert os.listdir(tmp_path) == ["step-00000007"]
        assert format.document(path, "state") == {"mark": mark}
        format.verify(path)


def test_a_step_saved_again_is_visible_and_whole_at_every_rename(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Store(tmp_path)
    save(store, 7, mark=0)
    rename = os.rename
    marks: list[int] = []

    def watching(source: Any, target: Any) -> None:
        rename(source, target)
        found = Store(tmp_path).newest(say=silent)
        assert found is not None
        marks.append(format.document(found.path, "state")["mark"])

    monkeypatch.setattr(os, "rename", watching)
    save(store, 7, mark=1)
    assert marks == [1, 1, 1]


def test_a_checkpoint_is_out_of_sight_before_its_first_file_goes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Store(tmp_path, keep=1)
    save(store, 1)
    rmtree = shutil.rmtree
    deleted = 0

    def in_slow_motion(path: Path, *rest: Any, **options: Any) -> None:
        nonlocal deleted
        if path.exists():
            (path / "model.safetensors").unlink()
            deleted += 1
            for item in store.checkpoints():
                format.verify(item.path)
        rmtree(path, *rest, **options)

    monkeypatch.setattr(shutil, "rmtree", in_slow_motion)
    save(store, 2)
    save(store, 2)
    assert deleted == 2


@pytest.mark.parametrize("retired", [False, True])
def test_a_replacement_cut_short_is_settled_by_the_next_save(tmp_path: Path, retired: bool) -> None:
    store = Store(tmp_path)
    old = save(store, 7, mark=0)
    shutil.move(save(Store(tmp_path / "other"), 7, mark=1), tmp_path / "step-00000007.new")
    shutil.rmtree(tmp_path / "other")
    if retired:
        old.rename(tmp_path / ".tmp-step-00000007-1")
    found = store.newest(say=silent)
    assert found is not None
    assert format.document(found.path, "state") == {"mark": 1}
    save(store, 8)
    assert sorted(os.listdir(tmp_path)) == ["step-00000007", "step-00000008"]
    assert format.document(tmp_path / "step-00000007", "state") == {"mark": 1}


def test_saving_removes_what_a_killed_process_left(tmp_path: Path) -> None:
    (tmp_path / f".tmp-step-00000001-{os.getpid()}").mkdir()
    (tmp_path / ".tmp-step-00000001-1").mkdir()
    (tmp_path / ".tmp-step-00000001-1" / "model.safetensors").write_bytes(b"half")
    save(Store(tmp_path), 1)
    assert os.listdir(tmp_path) == ["step-00000001"]


@pytest.mark.parametrize("again", [False, True])
def test_a_full_disk_leaves_the_previous_checkpoint_and_the_next_save_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, again: bool
) -> None:
    store = Store(tmp_path)
    save(store, 1, mark=1)
    calls = 0
    fsync = os.fsync

    def full(descriptor: int) -> None:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        fsync(descriptor)

    step = 1 if again else 2
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(OSError, match="No space left") as caught:
            save(store, step, mark=2)
    assert caught.value.errno == errno.ENOSPC
    assert os.listdir(tmp_path) == ["step-00000001"]
    found = store.newest(say=silent)
    assert found is not None
    assert format.document(found.path, "state") == {"mark": 1}
    assert format.document(save(store, step, mark=3), "state") == {"mark": 3}


def test_a_folder_that_vanished_is_made_again(tmp_path: Path) -> None:
    store = Store(tmp_path / "checkpoints")
    save(store, 1)
    shutil.rmtree(tmp_path / "checkpoints")
    save(store, 2)
    assert steps(store) == [2]


def test_other_peoples_files_are_neither_listed_nor_touched(tmp_path: Path) -> None:
    for name in ("step-1", "step-00000001.bak", "notes.new", "step-latest.new"):
        (tmp_path / name).mkdir()
    (tmp_path / "step-00000009").write_bytes(b"a file")
    store = Store(tmp_path, keep=1)
    for step in (2, 3):
        save(store, step)
    assert steps(store) == [3]
    assert len(os.listdir(tmp_path)) == 6


def test_a_store_that_keeps_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="keep"):
        Store(tmp_path, keep=0)
