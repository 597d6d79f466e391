"""One look at a test part: the results file of a run, made once for its weights and shown again from then on."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from trivium import api, records
from trivium.evaluation import results
from trivium.evaluation.tasks import Outcome


def look(model: api.Model, folder: Path, name: str, measure: Callable[[], Outcome]) -> dict[str, Any]:
    """What the results file NAME-test.json says of exactly these weights; if it says nothing yet they are measured."""
    path = folder / records.RESULTS / f"{name}-test.json"
    try:
        told = records.table(path)
        if told["model"]["weights"] == results.weights_digest(model.module):
            return dict(told)
    except (records.Broken, KeyError, TypeError):
        pass  # absent or damaged: it is made anew
    began = time.monotonic()
    return results.record(
        folder,
        measure(),
        model=model.module,
        tokenizer=model.tokenizer,
        notes=model.notes,
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        seconds=time.monotonic() - began,
    )
