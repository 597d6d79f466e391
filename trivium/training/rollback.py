"""Going back before a spike: which checkpoint, which rows are left out from then on, and the log that decides both.

`events.jsonl` is written first and is the truth: a checkpoint that knows less of it than the log and lies behind the
place a later rollback went to is left over from a time that was given up, wherever the process was killed.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from trivium.checkpoints import format
from trivium.checkpoints.store import Checkpoint, Listed, Store
from trivium.errors import CheckpointError
from trivium.files import write_atomic
from trivium.training.metrics import rows
from trivium.training.spikes import Alarm, Rollback, Span, position

LOG = "events.jsonl"


@dataclass(frozen=True, kw_only=True, slots=True)
class Return:
    """One rollback as the log tells it."""

    step: int  # where the spike began
    found: int
    trigger: str
    why: str
    checkpoint: str  # the name of its folder; empty for the beginning of the run
    to: int  # its step
    action: str  # skip, or stop after too many attempts
    rows: Span  # left out from then on, in positions of the data order

    def told(self) -> str:
        """The sentence for whoever watches."""
        where = f"step {self.to}" if self.to else "the beginning"
        return (
            f"{self.why} at step {self.step} (seen at step {self.found}): went back to {where}; "
            f"rows {self.rows[0]} to {self.rows[1] - 1} of the data are left out"
        )


class History:
    """The rollbacks of a run, from its log."""

    def __init__(self, folder: Path, store: Store, options: Rollback, batch: int) -> None:
        self.path = folder / LOG
        self.store = store
        self.options = options
        self.batch = batch  # rows
        self.returns: list[Return] = []
        self.saved = True  # whether the log on the disk says the same
        self.cleared = False  # whether the checkpoints that it gives up are gone

    def read(self) -> None:
        """Take the rollbacks of earlier sittings from the log."""
        try:
            found = rows(self.path, damaged=True)  # a rollback that is left out would be forgotten
            self.returns = [_parsed(row) for row in found if row.get("kind") == "rollback"]
        except (KeyError, TypeError, ValueError):
            raise CheckpointError(f"{self.path} is damaged; restore it from a copy or delete it") from None

    def add(self, entry: Return) -> None:
        """One more rollback, in memory until the log is written."""
        self.returns.append(entry)
        self.saved = self.cleared = False

    def write(self) -> None:
        """Bring the log to the disk."""
        if not self.returns:
            return
        lines = (json.dumps({"kind": "rollback", **asdict(entry)}, ensure_ascii=False) for entry in self.returns)
        write_atomic(self.path, "".join(line + "\n" for line in lines).encode())
        self.saved = True

    def spans(self, known: Iterable[Span] = ()) -> list[Span]:
        """All rows to leave out, as few disjoint spans in order; `known` are those of a checkpoint."""
        merged: list[Span] = []
        for first, end in sorted([*known, *(entry.rows for entry in self.returns)]):
            if merged and first <= merged[-1][1]:
                merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
            else:
                merged.append((first, end))
        return merged

    def settle(self) -> None:
        """Bring the log to the disk, then remove the checkpoints that it gives up; an OSError leaves the rest."""
        if not self.saved:
            self.write()
        if not self.cleared:
            self.store.discard(item for item in self.store.checkpoints() if self._stale(item))
            self.cleared = True

    def _stale(self, item: Listed) -> bool:
        try:
            known = int(format.document(item.path, "state").get("rollbacks", 0))
        except (CheckpointError, TypeError, ValueError, OverflowError):
            return False  # damaged: whoever looks for a whole one will say so
        return any(item.step > entry.to for entry in self.returns[known:])

    def decide(self, alarm: Alarm, skipped: list[Span], say: Callable[[str], None]) -> tuple[Return, Checkpoint | None]:
        """The answer to an alarm and the checkpoint it goes back to; None is the beginning of the run."""
        attempts = self._attempts(alarm.onset)
        found = self._checkpoint(alarm.onset, say)
        to = found.step if found else 0
        # the update that did the damage may lie before the first bad number: further before it each time
        reach = self.options.patience * 2**attempts
        first = position(skipped, max(to, alarm.onset - 1 - reach), self.batch)
        end = position(skipped, alarm.found - 1, self.batch) + self.batch
        entry = Return(
            step=alarm.onset,
            found=alarm.found,
            trigger=alarm.trigger,
            why=alarm.words,
            checkpoint=found.path.name if found else "",
            to=to,
            action="skip" if attempts < self.options.attempts else "stop",
            rows=(first, end),
        )
        return entry, found

    def _attempts(self, onset: int) -> int:
        """How often this region was left already, since somebody last restarted a run that had given up."""
        count = 0
        for entry in self.returns:
            if abs(entry.step - onset) < self.options.margin:
                count = 0 if entry.action == "stop" else count + 1
        return count

    def _checkpoint(self, onset: int, say: Callable[[str], None]) -> Checkpoint | None:
        """The newest whole one `margin` steps before the onset; else the oldest before the damage; else none."""
        before = [item for item in self.store.checkpoints() if item.step < onset - self.options.patience]
        listed = [item for item in before if not self._stale(item)]  # the disk may have refused to let go of some
        old = [item for item in listed if item.step <= onset - self.options.margin]
        for item in [*old[::-1], *listed[len(old) :]]:
            try:
                return Checkpoint(path=item.path, step=item.step, manifest=format.verify(item.path))
            except CheckpointError as error:
                say(f"skipped a checkpoint: {error}")
        return None


def _parsed(row: dict[str, Any]) -> Return:
    first, end = row["rows"]
    numbers = {name: row[name] for name in ("step", "found", "to")}
    words = {name: row[name] for name in ("trigger", "why", "checkpoint", "action")}
    if not all(type(number) is int and abs(number) < 2**53 for number in (first, end, *numbers.values())):
        raise ValueError("not a whole number")
    if not all(type(word) is str for word in words.values()):
        raise ValueError("not text")
    return Return(**numbers, **words, rows=(first, end))


def replay(journal: Iterable[dict[str, Any]]) -> Iterator[tuple[int, float, float]]:
    """Step, loss and norm of every sound update in a run's journal."""
    for row in journal:
        loss, norm = row.get("loss"), row.get("norm")
        sound = row.get("kind") == "train" and not row.get("skipped")
        if sound and isinstance(loss, float) and isinstance(norm, float):
            yield row["step"], loss, norm
