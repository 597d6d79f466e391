"""How a run looks: a live table on a terminal, plain lines elsewhere; always on standard error."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import IO, Protocol

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.padding import Padding
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from trivium.training.events import Event, Progress, Said, Sampled, Validated, duration, line, terms
from trivium.training.signals import to_standard_error

_BYTES = 1_000_000  # a tick that counts up to more counts bytes; layers and tensors are never so many


_SHOWN, _LONGEST = 3, 400  # samples below the table, and characters of each
_LABELS = {"tokenizer": "training the tokenizer", "data": "encoding the text"}


class Watcher(Protocol):
    """Whoever watches a run."""

    def say(self, text: str) -> None: ...
    def tick(self, what: str, at: int, of: int) -> None: ...
    def event(self, event: Event) -> None: ...
    def alert(self, text: str) -> None:
        """Tell something now, from another thread than the one that trains."""


@contextmanager
def watcher(file: IO[str] | None = None) -> Iterator[Watcher]:
    """The watcher that suits standard error."""
    file = file or sys.stderr
    if not file.isatty():
        yield PlainWatcher(file)
        return
    console = Console(file=file)
    watching = LiveWatcher(console)
    # drawn by a thread of its own: it shows an alert while a step keeps the main thread busy
    with Live(console=console, refresh_per_second=8, get_renderable=watching.draw):
        yield watching


class PlainWatcher:
    """One line per event; reading text is only worth a line per tenth if it takes longer than a few seconds."""

    def __init__(self, file: IO[str], clock: Callable[[], float] = time.monotonic) -> None:
        self.file = file
        self.clock = clock
        self._tenth: tuple[str, int] = ("", -1)
        self._since = 0.0

    def say(self, text: str) -> None:
        print(text, file=self.file, flush=True)

    def tick(self, what: str, at: int, of: int) -> None:
        tenth = (what, 10 * at // max(1, of))
        if what != self._tenth[0]:
            self._since = self.clock()
        changed, self._tenth = tenth != self._tenth, tenth
        if changed and self.clock() - self._since > 3:
            self.say(
                f"{_LABELS.get(what, what)}: {10 * tenth[1]} %" + (f" of {of / 1e6:.1f} MB" if of >= _BYTES else "")
            )

    def event(self, event: Event) -> None:
        text = line(event)
        if text:
            self.say(text)

    def alert(self, text: str) -> None:
        to_standard_error(text)


class LiveWatcher:
    """A table that fills while the run goes, with a bar and the newest sample below it."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self._progress: Progress | None = None
        self._rows: list[tuple[int, float, Validated]] = []
        self._samples: list[Sampled] = []  # of the newest step that has any
        self._reading = ("", 0, 1)
        self._alert = ""

    def say(self, text: str) -> None:
        self._reading = ("", 0, 1)  # the stage has its line: the bar is for the next one
        self.console.print(Text(text))

    def tick(self, what: str, at: int, of: int) -> None:
        self._reading = (what, at, of)

    def alert(self, text: str) -> None:
        self._alert = text  # and no writing here, which would tear the table

    def event(self, event: Event) -> None:
        match event:
            case Progress():
                self._progress = event
            case Validated():
                loss = self._progress.loss if self._progress else float("nan")
                self._rows = [*self._rows, (event.step, loss, event)][-12:]
            case Sampled():
                before = [sample for sample in self._samples if sample.step == event.step]
                self._samples = [*before, event][-_SHOWN:]
            case Said(text):
                self.say(text)

    def draw(self) -> RenderableType:
        """The picture of this moment."""
        if self._progress is None:
            what, at, of = self._reading
            bar = [self._bar(at, max(1, of))] if what else []
            return Group(Text(_LABELS.get(what, what) or "starting"), *bar, *self._alerts())
        now = self._progress
        table = Table(box=None, pad_edge=False)
        measured = any(found.bits_per_byte is not None for _, _, found in self._rows)
        for name in ("step", "train", "valid", *(["bits/byte"] if measured else []), ""):
            table.add_column(name, justify="right")
        for step, loss, found in self._rows:
            bits = [] if found.bits_per_byte is None else [f"{found.bits_per_byte:.4f}"]
            table.add_row(
                str(step), f"{loss:.4f}", f"{found.loss:.4f}{terms(found.losses)}", *bits, "best" if found.best else ""
            )
        now_line = (
            f"step {now.step}/{now.total}  loss {now.loss:.4f}{terms(now.losses)}  norm {now.norm:.2f}  "
            f"rate {now.rate:.2e}  {now.tokens_per_second:,.0f} tok/s  {duration(now.seconds_left)} left"
        )
        parts: list[RenderableType] = [table, Text(now_line), self._bar(now.step, now.total)]
        for sample in self._samples:
            given, written = sample.prompt[:_LONGEST], sample.text[:_LONGEST]
            shown = f"{given}\n  {written}  ({sample.reference[:_LONGEST]})" if sample.reference else given + written
            parts.append(Text(shown, style="dim"))
        return Group(*parts, *self._alerts())

    def _alerts(self) -> list[RenderableType]:
        return [Text(self._alert, style="bold")] if self._alert else []

    def _bar(self, at: int, of: int) -> RenderableType:
        """A bar on a line of its own, with room behind it for the ^C that a terminal shows."""
        bar = ProgressBar(total=of, completed=at, width=max(10, self.console.width - 4))
        return Padding(bar, 0, expand=False)
