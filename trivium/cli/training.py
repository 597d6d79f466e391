"""Training as the command line shows it: every event of a run goes to the watcher that suits standard error."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trivium.cli.render import watcher
from trivium.training.events import Opened
from trivium.training.recipe import Recipe
from trivium.training.run import train_run


def show_training(source: Path | Recipe, layer: Mapping[str, Any], *, runs: Path, data_dir: Path | None = None) -> Path:
    """Train from a recipe, its file or a run's folder, show what happens, and return the run's folder."""
    folder = Path()
    with watcher() as watch:
        events = train_run(
            source, layer, runs=runs, data_dir=data_dir, say=watch.say, tick=watch.tick, alert=watch.alert
        )
        for event in events:
            if isinstance(event, Opened):
                folder = event.folder
            watch.event(event)
    return folder
