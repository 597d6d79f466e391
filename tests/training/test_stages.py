"""Where the time before the first step goes, a line for each stage."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.training.conftest import silent
from trivium.training.events import Said
from trivium.training.recipe import Recipe
from trivium.training.session import Session
from trivium.training.setup import create_run
from trivium.training.stages import stage

Make = Callable[..., Recipe]


class Clock:
    """Two seconds pass between two looks."""

    now = 0.0

    def __call__(self) -> float:
        self.now += 2.0
        return self.now


def test_a_stage_says_what_came_out_and_how_long_it_took() -> None:
    said: list[str] = []
    with stage("tokenizer", said.append, Clock()) as current:
        current.detail = "257 ids"
    with stage("nothing", said.append, lambda: 0.0):
        pass
    assert said == ["tokenizer: 257 ids, 2.0 s"]


def test_a_stage_that_fails_says_nothing() -> None:
    said: list[str] = []
    with pytest.raises(ZeroDivisionError), stage("data", said.append, Clock()):
        raise ZeroDivisionError
    assert said == []


def test_a_run_accounts_for_the_time_before_its_first_step(small: Make, tmp_path: Path) -> None:
    said: list[str] = []
    clock = Clock()
    recipe = small(**{"budget.steps": 0, "budget.minutes": 1})
    context = create_run(recipe, tmp_path, say=said.append, tick=silent, clock=clock)
    stages = [line.split(":")[0] for line in said if line.endswith(" s")]
    assert stages == ["tokenizer", "data", "timing"]
    train, valid = (len(stream) - 1 for stream in (context.shards.train, context.shards.valid))  # all are predicted
    assert f"data: {train:,} tokens for training, {valid:,} for validation, 2.0 s" in said
    told = []
    for event in Session(context, clock).events():
        if not isinstance(event, Said):
            break
        told.append(event.text)
    assert [line.split(":")[0] for line in told] == ["model", "first step"]
