"""The numbers of a run for other tools: metrics.csv, and TensorBoard where it is installed."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from trivium.errors import ConfigError
from trivium.files import write_atomic

COLUMNS = ("step", "kind", "loss", "norm", "rate", "scale", "tokens", "bits_per_byte", "skipped", "seconds")


class Tracker(Protocol):
    """Takes the rows of metrics.jsonl as they come."""

    def write(self, rows: Iterable[Mapping[str, Any]]) -> None: ...

    def cut(self, step: int) -> None:
        """Drop what was written after `step`: the run went on from an earlier checkpoint."""

    def close(self) -> None: ...


class Csv:
    """A table with one line per row and the same columns in every run."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def write(self, rows: Iterable[Mapping[str, Any]]) -> None:
        new = not self.path.exists()
        with self.path.open("a", encoding="utf-8", newline="") as file:
            table = _table(file)
            if new:
                table.writeheader()
            table.writerows(rows)

    def cut(self, step: int) -> None:
        if not self.path.exists():
            return
        whole = self.path.read_text(encoding="utf-8", errors="replace").rpartition("\n")[0]  # a crash tears a last line
        lines = csv.DictReader(io.StringIO(whole, newline=""))
        kept = [row for row in lines if (row["step"] or "").isdecimal() and int(row["step"]) <= step]
        text = io.StringIO(newline="")
        table = _table(text)
        table.writeheader()
        table.writerows(kept)
        write_atomic(self.path, text.getvalue().encode())

    def close(self) -> None:
        """Nothing: the file is not kept open."""


def _table(file: Any) -> csv.DictWriter[str]:
    return csv.DictWriter(file, COLUMNS, restval="", extrasaction="ignore", lineterminator="\n")


class TensorBoard:
    """One curve per kind and number, such as train/loss."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._writer: Any = None
        _summary_writer()  # a missing library is refused before the first step

    def write(self, rows: Iterable[Mapping[str, Any]]) -> None:
        if self._writer is None:
            self._writer = _summary_writer()(str(self.folder))
        for row in rows:
            for name, value in row.items():
                if name not in ("step", "kind", "seconds") and type(value) in (int, float):
                    self._writer.add_scalar(f"{row['kind']}/{name}", value, row["step"])
        self._writer.flush()

    def cut(self, step: int) -> None:
        # its own way to take back: readers leave out what other files of the folder say from this step on
        self.close()
        if self.folder.is_dir():
            self._writer = _summary_writer()(str(self.folder), purge_step=step + 1)

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None


def _summary_writer() -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise ConfigError("track: tensorboard is not installed; type `pip install trivium[track]`") from None
    return SummaryWriter


def trackers(folder: Path, names: Sequence[str]) -> list[Tracker]:
    """The trackers that `track` names, for the run in `folder`."""
    made: dict[str, Tracker] = {}
    for name in names:
        made[name] = Csv(folder / "metrics.csv") if name == "csv" else TensorBoard(folder / "tensorboard")
    return list(made.values())
