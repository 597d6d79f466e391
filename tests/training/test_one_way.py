"""One way from a recipe to a trained run: `train_run`, which every front door renders."""

from __future__ import annotations

import ast
import math
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.training.conftest import finish, silent, start
from trivium import api
from trivium.errors import ConfigError, Interrupted
from trivium.training.events import Event, Opened, Progress, Said, Saved
from trivium.training.metrics import rows
from trivium.training.recipe import Recipe
from trivium.training.run import train_run
from trivium.training.signals import SENTENCE

Make = Callable[..., Recipe]
PACKAGE = Path(__file__).resolve().parents[2] / "trivium"
TRAINING = "trivium.training"
BEHIND = {"open_run", "create_run", "Session"}  # what `train_run` is made of


def without_clock(events: list[Event]) -> list[Event]:
    """Events without what differs from run to run: folders, speeds, and sentences about how long a stage took."""
    found = list[Event]()
    for event in events:
        if isinstance(event, Progress):
            found.append(event._replace(tokens_per_second=0, seconds_left=0))
        elif isinstance(event, Saved):
            found.append(event._replace(path=Path(event.path.name)))
        elif not isinstance(event, Said):
            found.append(event)
    return found


def train(source: Path | Recipe, runs: Path, layer: dict[str, Any] | None = None, **more: Any) -> list[Event]:
    return list(train_run(source, layer or {}, runs=runs, say=more.pop("say", silent), tick=silent, **more))


def test_a_run_is_opened_and_then_tells_what_its_session_tells(small: Make, tmp_path: Path) -> None:
    opened, *events = train(small(), tmp_path / "one")
    session = start(small(), tmp_path / "other")
    assert opened == Opened(tmp_path / "one" / "small", session.recipe)
    assert without_clock(events) == without_clock(finish(session))
    found, expected = (
        [row["loss"] for row in rows(tmp_path / name / "small" / "metrics.jsonl")] for name in ("one", "other")
    )
    assert found == expected


def test_the_folder_of_a_run_goes_on_and_its_recipe_is_refused(small: Make, tmp_path: Path) -> None:
    recipe = small(**{"sample.every": 0})
    events = train_run(recipe, {}, runs=tmp_path, say=silent, tick=silent)
    for event in events:
        if isinstance(event, Saved) and event.step == 10:
            break
    events.close()  # early: what is there is a valid run
    with pytest.raises(ConfigError, match="exists already"):
        train(recipe, tmp_path)
    told: list[str] = []
    opened, *rest = train(recipe, tmp_path, exists="resume", say=told.append)
    assert isinstance(opened, Opened)
    assert told == [f"{opened.folder} exists and goes on"]
    assert [event.step for event in rest if isinstance(event, Saved)] == [15, 20]
    assert [event for event in train(opened.folder, tmp_path) if isinstance(event, Saved)] == []  # all is done


def test_an_alert_goes_where_it_was_asked_to(small: Make, tmp_path: Path) -> None:
    alerts: list[str] = []
    events = train_run(small(log=1), {}, runs=tmp_path, say=silent, tick=silent, alert=alerts.append)
    assert any(isinstance(event, Progress) and event.step == 2 for event in events)
    signal.raise_signal(signal.SIGINT)
    with pytest.raises(Interrupted):
        list(events)
    assert alerts == [SENTENCE]


def test_python_trains_the_same_run(small: Make, tmp_path: Path) -> None:
    run = api.train(small(), runs=tmp_path / "api", quiet=True)
    train(small(), tmp_path / "events")
    losses = [
        [row["loss"] for row in rows(folder / "metrics.jsonl")] for folder in (run.path, tmp_path / "events" / "small")
    ]
    assert losses[0] == losses[1]
    assert all(math.isfinite(loss) for loss in losses[0])


def test_no_front_door_has_a_way_of_its_own() -> None:
    """Only training/ itself names what `train_run` is made of."""
    for path in PACKAGE.rglob("*.py"):
        if path.parent.name == "training" and path.name in ("run.py", "setup.py", "session.py"):
            continue
        imports = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ImportFrom)]
        named = {alias.name for node in imports for alias in node.names if str(node.module).startswith(TRAINING)}
        assert not named & BEHIND, path
