"""What a run does before its first step, a line with its seconds for each stage."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

Say = Callable[[str], None]
Tick = Callable[[str, int, int], None]  # what is being done, how far, of how much

_SHORT = 0.05  # seconds: a stage that took less is not worth a line


class Stage:
    """A stage that is under way; `detail` says what came out of it."""

    def __init__(self) -> None:
        self.detail = ""


@contextlib.contextmanager
def stage(what: str, say: Say, clock: Callable[[], float]) -> Iterator[Stage]:
    """Say how long the work inside took, unless it failed."""
    before, current = clock(), Stage()
    yield current
    if (seconds := clock() - before) >= _SHORT:
        say(f"{what}: {f'{current.detail}, ' if current.detail else ''}{seconds:.1f} s")
