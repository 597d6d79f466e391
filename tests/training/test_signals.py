"""Ctrl-C and SIGTERM while the interpreter is inside one long call, as a backward pass is (R14)."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from rich.console import Console
from rich.live import Live

from trivium.cli.render import LiveWatcher
from trivium.training.signals import SENTENCE, Signals

ROOT = Path(__file__).resolve().parents[2]
# a key derivation is one call into C that holds no lock of the interpreter and asks for no signal: some seconds of it
BUSY = """
import hashlib
from trivium.training.signals import Signals
with Signals() as signals:
    print("busy", flush=True)
    hashlib.pbkdf2_hmac("sha256", b"", b"", 12_000_000)
    print("done", signals.received, flush=True)
"""


def spawned() -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", BUSY], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "busy\n"
    return process


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_is_acknowledged_while_a_call_runs_and_a_second_one_ends_it(number: int, code: int) -> None:
    process = spawned()
    process.send_signal(number)
    assert process.stderr is not None
    assert process.stderr.readline() == SENTENCE + "\n"
    assert process.poll() is None  # still at it
    process.send_signal(number)
    out, _ = process.communicate(timeout=30)
    assert (process.returncode, out) == (code, "")


def test_the_loop_finds_the_signal_after_the_call() -> None:
    told: list[str] = []
    with Signals(told.append) as signals:
        assert signals.received == 0
        signal.raise_signal(signal.SIGTERM)
        assert signals.received == signal.SIGTERM
    assert told == [SENTENCE]


def test_everything_is_as_before_afterwards() -> None:
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    threads, descriptors = threading.active_count(), len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        with Signals():
            assert threading.active_count() == threads + 1
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before
    assert (threading.active_count(), len(os.listdir("/proc/self/fd"))) == (threads, descriptors)
    assert signal.set_wakeup_fd(-1) == -1


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_signal_to_a_forked_worker_is_none_for_the_run() -> None:
    told: list[str] = []
    with Signals(told.append) as signals:
        for _ in range(2):
            child = os.fork()
            if child == 0:
                os.kill(os.getpid(), signal.SIGINT)
                os._exit(7)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        time.sleep(0.1)
        assert (signals.received, told) == (0, [])


def test_the_live_table_shows_an_alert_by_itself(tmp_path: Path) -> None:
    with (tmp_path / "screen").open("w+") as file:
        watching = LiveWatcher(Console(file=file, force_terminal=True, width=120))
        with Live(console=watching.console, refresh_per_second=20, get_renderable=watching.draw):
            threading.Thread(target=watching.alert, args=(SENTENCE,)).start()
            deadline = time.monotonic() + 10
            while SENTENCE not in (tmp_path / "screen").read_text() and time.monotonic() < deadline:
                time.sleep(0.02)
    assert SENTENCE in (tmp_path / "screen").read_text()
