"""The numbers of a run for other tools: metrics.csv, and TensorBoard where it is installed."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from trivium.errors import ConfigError, pip_install
from trivium.files import write_atomic

COLUMNS = ("step", "kind", "loss", "norm", "rate", "scale", "tokens", "bits_per_byte", "skipped", "seconds")
LOSSES = "losses/"  # before the name of a loss


class Tracker(Protocol):
    """Takes the rows of metrics.jsonl as they come."""

    def write(self, rows: Iterable[Mapping[str, Any]]) -> None: ...

    def restart(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Have these rows and no others: the run went back, or something was lost."""

    def close(self) -> None: ...


class Csv:
    """A table with one line per row: the same columns in every run, then one for each loss where there are several."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def write(self, rows: Iterable[Mapping[str, Any]]) -> None:
        lines = [flat(row) for row in rows]
        if not self.path.exists():
            self._rewrite(lines)
            return
        with self.path.open("r+", encoding="utf-8", newline="") as file:
            table = csv.DictReader(file)
            columns = table.fieldnames or ()
            if not any(name.startswith(LOSSES) and name not in columns for line in lines for name in line):
                file.seek(0, io.SEEK_END)
                _table(file, columns).writerows(lines)
                return
            held = list(table)
        self._rewrite([*held, *lines])

    def restart(self, rows: Iterable[Mapping[str, Any]]) -> None:
        self._rewrite([flat(row) for row in rows])

    def _rewrite(self, lines: Sequence[Mapping[str, Any]]) -> None:
        text = io.StringIO(newline="")
        names = dict.fromkeys(name for line in lines for name in line if name.startswith(LOSSES))
        table = _table(text, (*COLUMNS, *names))
        table.writeheader()
        table.writerows(lines)
        write_atomic(self.path, text.getvalue().encode())

    def close(self) -> None:
        """Nothing: the file is not kept open."""


def flat(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row whose named losses are columns of their own, as `losses/tokens`."""
    losses = row.get("losses")
    named = losses if isinstance(losses, Mapping) else {}
    return {**row, **{f"{LOSSES}{name}": value for name, value in named.items()}}


def _table(file: Any, columns: Sequence[str]) -> csv.DictWriter[str]:
    return csv.DictWriter(file, columns, restval="", extrasaction="ignore", lineterminator="\n")


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
            for name, value in flat(row).items():
                if name not in ("step", "kind", "seconds") and type(value) in (int, float):
                    self._writer.add_scalar(f"{row.get('kind')}/{name}", value, row.get("step"))
        self._writer.flush()

    def restart(self, rows: Iterable[Mapping[str, Any]]) -> None:
        self.close()
        for path in self.folder.glob("events.out.tfevents.*"):
            path.unlink(missing_ok=True)
        # its own way to take back, for readers that have seen the old files: nothing from step 0 on was ever said
        self._writer = _summary_writer()(str(self.folder), purge_step=0)
        self.write(rows)

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None


def _summary_writer() -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise ConfigError(_missing()) from None
    return SummaryWriter


def check(names: Sequence[str]) -> None:
    """Refuse a tracker whose library is missing, without importing it."""
    if "tensorboard" in names and find_spec("tensorboard") is None:
        raise ConfigError(_missing())


def _missing() -> str:
    return f"track: tensorboard is not installed; type `{pip_install('tensorboard')}`"


def trackers(folder: Path, names: Sequence[str]) -> list[Tracker]:
    """The trackers that `track` names, for the run in `folder`."""
    made: dict[str, Tracker] = {}
    for name in names:
        made[name] = Csv(folder / "metrics.csv") if name == "csv" else TensorBoard(folder / "tensorboard")
    return list(made.values())
