"""The validation losses of a run: when the best one was, when the model overfits, when to stop early."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable
from typing import Any

_RISING, _WORSE = 3, 1.01  # validations without a new best one, the last of them worse by this factor: overfitting


class Trend:
    """Counts the validations since the best one; `patience` of them end the run, 0 never."""

    def __init__(self, patience: int, rows: Iterable[dict[str, Any]] = ()) -> None:
        self.patience = patience
        self.best, self.step, self.since = math.inf, 0, 0
        for row in rows:
            if row.get("kind") == "valid":
                with contextlib.suppress(KeyError, TypeError, ValueError):
                    self.see(row["step"], float(row["loss"]))  # "nan" and "inf" are texts in JSON, and count
        self._warned = self.since >= _RISING

    def see(self, step: int, loss: float) -> None:
        """Note a validation."""
        if loss < self.best:
            self.best, self.step, self.since = loss, step, 0
            self._warned = False
        else:
            self.since += 1

    @property
    def is_exhausted(self) -> bool:
        """Whether the run shall stop early."""
        return 0 < self.patience <= self.since

    def warning(self, loss: float, use: str) -> str:
        """A sentence about overfitting, once for each rise of the loss; `use` is what becomes of the weights."""
        if self._warned or self.since < _RISING or loss < _WORSE * self.best:
            return ""
        self._warned = True
        kept = "the weights of that step become the model" if use == "best" else "checkpoint.use=best would keep them"
        return (
            f"the validation loss rises: {loss:.4f} now, {self.best:.4f} at step {self.step}. The model overfits; "
            f"{kept} (evaluate.patience={_RISING} would stop here)"
        )

    def stopped(self, step: int) -> str:
        """The sentence about a run that has stopped early."""
        return (
            f"stopped early at step {step}: the last {self.since} validations were not better than {self.best:.4f} at "
            f"step {self.step} (evaluate.patience={self.patience}; 0 goes on)"
        )
