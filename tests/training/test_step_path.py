"""How much of the package a reader meets on the way through one step: functions, files and the deepest chain."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest

import trivium
from tests.training.conftest import create
from trivium.training.build_job import build_job
from trivium.training.loop import train_step, updates
from trivium.training.prefetch import Prefetcher
from trivium.training.recipe import Recipe
from trivium.training.step import StepScalars, at_least_one

PACKAGE = str(Path(trivium.__file__).parent)


class Profile:
    """The functions of the package that run while it is on, and how many of them wait for each other at most.

    Lambdas and comprehensions belong to the function that they stand in.
    """

    def __init__(self) -> None:
        self.functions: set[CodeType] = set()
        self.depth = 0
        self.deepest: list[str] = []

    def __enter__(self) -> Profile:
        sys.setprofile(self)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)

    @property
    def files(self) -> set[str]:
        return {code.co_filename for code in self.functions}

    def __call__(self, frame: FrameType, event: str, argument: object) -> None:
        if event != "call" or not _is_ours(frame.f_code):
            return
        self.functions.add(frame.f_code)
        chain, caller = list[str](), frame
        while caller is not None:
            if _is_ours(caller.f_code):
                chain.append(caller.f_code.co_qualname)
            caller = caller.f_back  # type: ignore[assignment]
        if len(chain) > self.depth:
            self.depth, self.deepest = len(chain), chain[::-1]

    def listed(self) -> str:
        """Every function with its file, for a message."""
        return "\n".join(sorted(f"{Path(code.co_filename).name}: {code.co_qualname}" for code in self.functions))


def _is_ours(code: CodeType) -> bool:
    return code.co_filename.startswith(PACKAGE) and not code.co_name.startswith("<")


def one_step(recipe: Recipe, runs: Path) -> Profile:
    """What `train_step` passes through, from the batches of a step to updated weights, in the second step of a run."""
    job = build_job(create(recipe, runs), 3)
    next(updates(job, ahead=0))
    batches = Prefetcher(job, 0).take()
    here, scalars = batches.to(job.model.device), StepScalars(at_least_one(batches.counts), 1.0, 0.0)
    with Profile() as profile:
        train_step(job, here, scalars)
    return profile


def one_update(recipe: Recipe, runs: Path) -> Profile:
    """The same with what is around it: the order of the data, the schedule, another try with less memory."""
    steps = updates(build_job(create(recipe, runs), 3), ahead=0)
    next(steps)
    with Profile() as profile:
        next(steps)
    return profile


def settings(kind: str) -> dict[str, Any]:
    """The plain floor; both sides of a model have the same positions."""
    sides = [side for side in ("encoder", "decoder") if side in kind.split("-")]
    return {"fast": "off", **{f"model.{side}.block.position": "learned" for side in sides}}


@pytest.mark.parametrize("kind", ["decoder", "encoder", "encoder-decoder"])
def test_one_step_on_the_plain_floor_is_short(small: Callable[..., Recipe], tmp_path: Path, kind: str) -> None:
    profile = one_step(small(kind, **settings(kind)), tmp_path)
    assert len(profile.functions) <= 80, profile.listed()
    assert len(profile.files) <= 25, "\n".join(sorted(profile.files))
    assert profile.depth <= 12, " > ".join(profile.deepest)


def test_what_is_around_a_step_does_not_grow(small: Callable[..., Recipe], tmp_path: Path) -> None:
    profile = one_update(small(**settings("decoder")), tmp_path)
    assert len(profile.functions) <= 100, profile.listed()
    assert len(profile.files) <= 36
    assert profile.depth <= 15


def test_the_profile_sees_the_step(small: Callable[..., Recipe], tmp_path: Path) -> None:
    profile = one_step(small(**settings("decoder")), tmp_path)
    names = {code.co_qualname for code in profile.functions}
    assert {"train_step", "MultiHeadAttention.forward", "MlpFeedForward.forward", "CausalTask.loss"} <= names
    assert profile.depth > 8
    assert names < {code.co_qualname for code in one_update(small(**settings("decoder")), tmp_path / "2").functions}
