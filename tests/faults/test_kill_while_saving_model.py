"""A process killed at any instant of `m.save` leaves the old model or the new one, whole; the next save cleans up."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.faults.test_full_disk import no_file_above
from tests.faults.test_kill_while_saving import seconds, victim
from tests.generation import tiny
from trivium import api
from trivium.checkpoints import bundle
from trivium.checkpoints.bundle import CARD, TOKENIZER, WEIGHTS
from trivium.checkpoints.card import card
from trivium.checkpoints.model_files import COMMITTED, has_model, is_vacant, withdraw
from trivium.errors import BusyError, CheckpointError, FileError
from trivium.files import Lock
from trivium.handle import Model
from trivium.models.transformer import weights
from trivium.text.kinds import Chars

pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")

FILES = [WEIGHTS, CARD, TOKENIZER]


def made(seed: int, letters: str) -> Model:
    """A model of about 150 kB."""
    tokenizer = Chars().build([letters])
    return Model(tiny.model("gpt-mini", tokenizer, seed=seed), tokenizer, {})


MODELS = (made(1, "abcdefgh"), made(2, "ijklmnopqrs"))  # of two vocabularies: a mixture cannot be opened


def save(folder: Path, number: int) -> None:
    Model(MODELS[number % 2].module, MODELS[number % 2].tokenizer, {"number": number}).save(folder)


def deliver(folder: Path, number: int) -> None:
    """As a run saves its own model, into a folder that may have had one."""
    model = MODELS[number % 2]
    bundle.save(folder, model.config, weights(model.module), model.tokenizer, {"number": number})


def number_in(folder: Path) -> int:
    """The number of the save that `folder` holds, once every weight and the tokenizer are those of that save."""
    found = bundle.open_bundle(folder)
    number = int(found.notes["number"])
    expected = MODELS[number % 2]
    mine, theirs = weights(found.module), weights(expected.module)
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(mine[name], theirs[name]) for name in mine)
    assert found.tokenizer.serialise() == expected.tokenizer.serialise()
    return number


def test_a_killed_save_leaves_the_old_model_or_the_new_one(tmp_path: Path, count: Callable[[int, int], int]) -> None:
    folder = tmp_path / "model"
    seed = 1 if count(1, 0) else random.randrange(2**32)
    dice, span = random.Random(seed), seconds(lambda number: save(folder, number))
    last, cut_short, committed = 0, 0, 0
    for _ in range(count(30, 1_000)):
        acknowledged = victim(lambda number: save(folder, number), last + 1, dice.uniform(0, 4 * span))
        left = {path.name for path in folder.iterdir()} - set(FILES)
        cut_short += bool(left)
        committed += COMMITTED in left
        last = number_in(folder)
        assert last in (acknowledged, acknowledged + 1), f"seed {seed}"
        save(folder, last := last + 1)
        assert sorted(os.listdir(folder)) == sorted(FILES)
        assert number_in(folder) == last
    assert cut_short > 0, "no kill fell into a save: the test proves nothing"
    if count(0, 1):
        print(f"seed {seed}: {cut_short} kills left hidden files, {committed} of them a committed model")


STEPS = ("rename", "replace", "fsync", "mkdir", "rmdir", "unlink", "open")


def dies_before(step: int, work: Callable[[], None]) -> bool:
    """Fork, `work`, exit at the call number `step` that changes a folder or syncs a file; whether it came so far."""
    pid = os.fork()
    if pid == 0:
        calls = 0

        def counted(honest: Callable[..., Any]) -> Callable[..., Any]:
            def call(*arguments: Any, **options: Any) -> Any:
                nonlocal calls
                calls += 1
                if calls == step:
                    os._exit(9)
                return honest(*arguments, **options)

            return call

        try:
            for name in STEPS:
                setattr(os, name, counted(getattr(os, name)))
            work()
            os._exit(0)
        finally:
            os._exit(1)
    _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) in (0, 9)
    return os.waitstatus_to_exitcode(status) == 9


@pytest.mark.parametrize("before", ["nothing", "a model", "a committed model", "a half-moved model"])
def test_a_save_may_end_at_every_single_step(tmp_path: Path, before: str) -> None:
    """Exhaustive where the kills above are random: the process ends at the first call, the second, the third, ..."""
    step = 0
    while True:
        step += 1
        folder = tmp_path / f"{before}-{step}"
        old = prepared(folder, before)
        went_on = not dies_before(step, lambda folder=folder: save(folder, 8))  # type: ignore[misc]
        if before == "nothing" and not has_model(folder):
            assert is_vacant(folder)
            with pytest.raises(CheckpointError):
                api.load(folder)
        else:
            assert number_in(folder) in (old, 8)
        save(folder, 11)
        assert sorted(os.listdir(folder)) == sorted(FILES)
        assert number_in(folder) == 11
        if went_on:
            break
    assert step > 15, "too few steps were seen: the test proves nothing"


def prepared(folder: Path, state: str) -> int:
    """A folder in one of the states that a killed save leaves, and the number of the model that it holds."""
    if state == "nothing":
        return 8
    save(folder, 4)
    if state != "a model":
        other = folder.with_name("other")
        save(other, 5)
        (folder / COMMITTED).mkdir()
        for name in FILES if state == "a committed model" else (CARD, TOKENIZER):
            os.replace(other / name, folder / COMMITTED / name)
        if state == "a half-moved model":
            os.replace(other / WEIGHTS, folder / WEIGHTS)
    number = 4 if state == "a model" else 5
    assert number_in(folder) == number  # also before anybody has tidied up
    return number


def test_a_committed_model_opens_on_a_disk_that_cannot_be_written(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    prepared(folder, "a half-moved model")
    before = sorted(os.listdir(folder))
    (folder / COMMITTED).chmod(0o500)
    folder.chmod(0o500)
    try:
        assert number_in(folder) == 5
        assert api.load(folder, device="cpu").notes["number"] == 5
        assert api.show(folder)["state"] == "finished"
        assert sorted(os.listdir(folder)) == before
    finally:
        folder.chmod(0o700)
        (folder / COMMITTED).chmod(0o700)


def test_a_model_that_was_withdrawn_is_gone_whatever_was_committed(tmp_path: Path) -> None:
    """A finished run that goes on has no model, and no killed save of an earlier sitting brings one back."""
    for state in ("a model", "a committed model", "a half-moved model"):
        folder = tmp_path / state
        prepared(folder, state)
        withdraw(folder)
        withdraw(folder)
        assert not has_model(folder)
        deliver(folder, 8)
        assert number_in(folder) == 8
        assert sorted(os.listdir(folder)) == sorted(FILES)


@pytest.mark.parametrize("limit", [0, 1_000, 100_000])
def test_a_full_disk_leaves_the_old_model_and_nothing_else(tmp_path: Path, limit: int) -> None:
    folder = tmp_path / "model"
    save(folder, 4)
    with no_file_above(limit), pytest.raises(FileError, match=r"model/model.safetensors: File too large"):
        save(folder, 5)
    assert number_in(folder) == 4
    assert sorted(os.listdir(folder)) == sorted(FILES)
    with no_file_above(limit), pytest.raises(FileError, match="File too large"):
        save(tmp_path / "new" / "folder", 5)
    assert not (tmp_path / "new").exists()


def test_a_file_that_cannot_be_replaced_leaves_the_old_model(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    save(folder, 4)
    (folder / WEIGHTS).unlink()
    (folder / WEIGHTS).mkdir()  # as little to be replaced as a file of another owner
    (folder / WEIGHTS / "mine").touch()
    with pytest.raises(FileError, match="Is a directory"):
        save(folder, 5)
    assert sorted(os.listdir(folder)) == sorted(FILES)
    assert card(folder)["notes"] == {"number": 4}


def test_a_folder_without_permission_is_named(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    save(folder, 4)
    folder.chmod(0o500)
    try:
        if os.access(folder, os.W_OK):
            pytest.skip("this user may write anywhere")
        with pytest.raises(FileError, match=r"model.*: Permission denied; change its permissions, or name another"):
            save(folder, 5)
    finally:
        folder.chmod(0o700)
    assert number_in(folder) == 4


def test_leftovers_of_earlier_versions_go_and_files_of_others_stay(tmp_path: Path) -> None:
    save(tmp_path, 4)
    header = (tmp_path / WEIGHTS).read_bytes()[:400]
    ours = [".tmp-model.safetensors-17", ".tmp-model.json-17", ".tmp-tokenizer.json-4", ".tmpAb12Cd"]
    theirs = [".tmpZZZZZZ", ".tmp-metrics.jsonl-17", ".tmp-notes", "model.txt", ".tmpAb12Cde"]
    for name in ours:
        (tmp_path / name).write_bytes(header)
    for name in theirs:
        (tmp_path / name).write_bytes(b"something else")
    save(tmp_path, 5)
    assert sorted(os.listdir(tmp_path)) == sorted([*FILES, *theirs])


def test_an_interrupted_import_can_be_repeated_and_a_model_is_not_overwritten(tmp_path: Path) -> None:
    folder = tmp_path / "models" / "mine"
    assert is_vacant(folder)
    for step in (5, 12):
        assert dies_before(step, lambda: save(folder, 4))
        assert is_vacant(folder) != has_model(folder)
    save(folder, 4)
    assert not is_vacant(folder)


def test_a_link_in_the_place_of_the_committed_folder_is_not_followed(tmp_path: Path) -> None:
    mine, theirs = tmp_path / "mine", tmp_path / "theirs"
    save(mine, 4)
    save(theirs, 5)
    (theirs / COMMITTED).symlink_to(mine)
    assert number_in(theirs) == 5
    withdraw(theirs)
    assert not has_model(theirs)
    deliver(theirs, 7)
    assert number_in(theirs) == 7
    assert number_in(mine) == 4


def test_savers_and_readers_at_the_same_time_see_whole_models_only(tmp_path: Path) -> None:
    save(tmp_path, 0)
    savers = [in_background(tmp_path, first) for first in (1, 1_000_000)]
    seen = set[int | None]()
    try:
        deadline = time.monotonic() + 2
        while time.monotonic() < deadline:
            seen.add(number_or_none(tmp_path))
    finally:
        for pid in savers:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
    numbers = seen - {None}
    assert len(numbers) > 3
    assert {number >= 1_000_000 for number in numbers if number is not None} == {False, True}
    save(tmp_path, 9)
    assert sorted(os.listdir(tmp_path)) == sorted(FILES)


def number_or_none(folder: Path) -> int | None:
    """None where five saves fell into one reading, which a slow machine can make of it."""
    try:
        return number_in(folder)
    except CheckpointError as error:
        if "while it was read" not in str(error):
            raise
        return None


def in_background(folder: Path, first: int) -> int:
    pid = os.fork()
    if pid == 0:
        try:
            for number in range(first, first + 1_000_000):
                save(folder, number)
                time.sleep(0.1)
        finally:
            os._exit(1)
    return pid


def test_a_second_save_waits_for_the_first_and_gives_up_in_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path, 4)
    with Lock(tmp_path, ".model-lock", remove=True):
        waiting = threading.Thread(target=save, args=(tmp_path, 6))
        waiting.start()
        time.sleep(0.2)
        assert number_in(tmp_path) == 4
    waiting.join()
    assert number_in(tmp_path) == 6
    monkeypatch.setattr("trivium.checkpoints.model_files._WAIT", 0.1)
    with (
        Lock(tmp_path, ".model-lock", remove=True),
        pytest.raises(BusyError, match="is in use by process"),
    ):
        save(tmp_path, 5)
    assert number_in(tmp_path) == 6
    assert sorted(os.listdir(tmp_path)) == sorted(FILES)
