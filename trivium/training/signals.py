"""Ctrl-C and SIGTERM: acknowledged at once, obeyed after the step that runs."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import weakref
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any

SENTENCE = "stopping after this step, with a checkpoint; Ctrl-C again ends at once and saves nothing"
_STOPS = (signal.SIGINT, signal.SIGTERM)


def to_standard_error(text: str) -> None:
    """A line on standard error, past all buffers: another thread may be in the middle of writing to them."""
    with contextlib.suppress(OSError):  # it may be closed
        begin = "\n" if os.isatty(2) else ""  # behind the ^C that the terminal shows
        os.write(2, f"{begin}{text}\n".encode())


class Signals:
    """`with Signals() as signals:` - `received` is the first Ctrl-C or SIGTERM, for the loop; a second one exits.

    A handler of Python's runs only between two bytecodes of the main thread, and a backward pass is one of them. So a
    thread hears of signals through the file descriptor that the interpreter writes their numbers to at once: it says
    that the first was heard, and ends the process at the second.
    """

    def __init__(self, tell: Callable[[str], None] = to_standard_error) -> None:
        self.received = 0
        self.tell = tell
        self._before: dict[int, Any] = {}
        self._wakeup = -1  # the descriptor that was in use before
        self._read = self._write = -1
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Signals:
        if threading.current_thread() is not threading.main_thread():  # only there may handlers be set
            return self
        self._read, self._write = os.pipe()
        os.set_blocking(self._write, False)
        self._wakeup = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        _forget_in_children(self)
        self._thread = threading.Thread(target=self._listen, args=(self._read,), name="signals", daemon=True)
        self._thread.start()
        for number in _STOPS:
            self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._thread is None:
            return
        for number, handler in self._before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._wakeup)
        os.write(self._write, b"\0")  # no signal has this number: the thread ends
        self._thread.join()
        os.close(self._write)
        os.close(self._read)
        self._read = self._write = -1

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.received = self.received or number

    def _listen(self, pipe: int) -> None:
        heard = False
        while number := os.read(pipe, 1)[0]:
            if number not in _STOPS:
                continue
            if heard:
                os._exit(128 + number)
            heard = True
            self.tell(SENTENCE)


def _forget_in_children(signals: Signals) -> None:
    """A forked worker gets the same Ctrl-C, and must not report it to its parent as a second one."""
    here = weakref.ref(signals)

    def forget() -> None:
        if (found := here()) is not None and found._write >= 0:
            signal.set_wakeup_fd(-1)

    os.register_at_fork(after_in_child=forget)
