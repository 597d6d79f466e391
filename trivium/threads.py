"""Threads that wait for each other on a busy machine.

The threads of OpenMP, with which torch computes on a CPU, spin for milliseconds while they wait. Where another process
needs the cores they spin away the time of the very thread that they wait for, and everything takes ten times as long
instead of twice. How often they spin is read from GOMP_SPINCOUNT at the moment in which torch is loaded.
"""

from __future__ import annotations

import os
import sys

SETTING, SPINS = "GOMP_SPINCOUNT", 2000  # a process alone loses 0 to 4 %, one beside another gains much (bench/busy.py)
_OTHER = "OMP_WAIT_POLICY"  # the user's own choice

_late = False  # whether torch was loaded before anybody could decide
_told = False


def limit_spinning() -> None:
    """Let waiting threads give up their core soon, unless the user decided otherwise or torch is loaded already."""
    global _late
    if SETTING in os.environ or _OTHER in os.environ:
        return
    if "torch" in sys.modules:
        _late = True
    else:
        os.environ[SETTING] = str(SPINS)


def advice() -> str:
    """What to do about threads that spin, if this machine is busy now; said once, else ""."""
    global _told
    if not _late or _told or _load() < (os.cpu_count() or 1) / 2:
        return ""
    _told = True
    return (
        "this machine is busy, and threads that wait for each other slow it down: "
        f"import trivium before torch, or set {SETTING}={SPINS}"
    )


def _load() -> float:
    try:
        return os.getloadavg()[0]
    except OSError:
        return 0.0
