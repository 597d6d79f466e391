"""How a run looks: a live table on a terminal, plain lines elsewhere; always on standard error."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import IO, Protocol

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from trivium.training.events import Event, Progress, Said, Sampled, Saved, Validated, duration, line

_BYTES = 1_000_000  # a tick that counts up to more counts bytes; layers and tensors are never so many


class Watcher(Protocol):
    """Whoever watches a run."""

    def say(self, text: str) -> None: ...
    def tick(self, what: str, at: int, of: int) -> None: ...
    def event(self, event: Event) -> None: ...


@contextmanager
def watcher(file: IO[str] | None = None) -> Iterator[Watcher]:
    """The watcher that suits standard error."""
    file = file or sys.stderr
    if not file.isatty():
        yield PlainWatcher(file)
        return
    console = Console(file=file)
    with Live(console=console, refresh_per_second=8, transient=False) as live:
        yield LiveWatcher(live)


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
            self.say(f"{what}: {10 * tenth[1]} %" + (f" of {of / 1e6:.1f} MB" if of >= _BYTES else ""))

    def event(self, event: Event) -> None:
        text = line(event)
        if text:
            self.say(text)


class LiveWatcher:
    """A table that fills while the run goes, with a bar and the newest sample below it."""

    def __init__(self, live: Live) -> None:
        self.live = live
        self._progress: Progress | None = None
        self._rows: list[tuple[int, float, Validated]] = []
        self._sample: Sampled | None = None
        self._reading = ("", 0, 1)

    def say(self, text: str) -> None:
        self.live.console.print(Text(text))

    def tick(self, what: str, at: int, of: int) -> None:
        self._reading = (what, at, of)
        self.live.update(self._draw())

    def event(self, event: Event) -> None:
        match event:
            case Progress():
                self._progress = event
            case Validated():
                loss = self._progress.loss if self._progress else float("nan")
                self._rows = [*self._rows, (event.step, loss, event)][-12:]
            case Sampled():
                self._sample = event
            case Said(text):
                self.say(text)
            case Saved():
                return
        self.live.update(self._draw())

    def _draw(self) -> RenderableType:
        if self._progress is None:
            what, at, of = self._reading
            return Group(Text(f"reading: {what}" if what else "starting"), ProgressBar(total=max(1, of), completed=at))
        now = self._progress
        table = Table(box=None, pad_edge=False)
        for name in ("step", "train", "valid", "bits/byte", ""):
            table.add_column(name, justify="right")
        for step, loss, found in self._rows:
            mark = "best" if found.best else ""
            bits = "" if found.bits_per_byte is None else f"{found.bits_per_byte:.4f}"
            table.add_row(str(step), f"{loss:.4f}", f"{found.loss:.4f}", bits, mark)
        now_line = (
            f"step {now.step}/{now.total}  loss {now.loss:.4f}  norm {now.norm:.2f}  rate {now.rate:.2e}  "
            f"{now.tokens_per_second:,.0f} tok/s  {duration(now.seconds_left)} left"
        )
        parts: list[RenderableType] = [table, Text(now_line), ProgressBar(total=now.total, completed=now.step)]
        if self._sample is not None:
            parts.append(Text(self._sample.prompt + self._sample.text[:400], style="dim"))
        return Group(*parts)
