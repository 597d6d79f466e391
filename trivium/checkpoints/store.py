"""The checkpoints of a run: saved by step, the newest few and the best kept, damaged ones skipped."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from trivium.checkpoints import format
from trivium.checkpoints.manifest import Manifest, NewerFormat, manifest
from trivium.distributed import world
from trivium.errors import CheckpointError, ConfigError
from trivium.files import remove, remove_leftovers, sync_folder, temporary

# A step saved again appears as step-N.new beside the old step-N before it takes its place: a folder cannot be renamed
# over another, and a process killed in between must leave one of the two in sight.
_STEP = re.compile(r"step-(\d{8,})(\.new)?")


@dataclass(frozen=True, kw_only=True, slots=True)
class Listed:
    """A checkpoint that is there, whole or not."""

    path: Path
    step: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Checkpoint:
    """A checkpoint of which every byte was verified."""

    path: Path
    step: int
    manifest: Manifest


class Store:
    """The folder that holds a run's checkpoints; one process at a time saves into it (the run's lock sees to that)."""

    def __init__(self, folder: Path, *, keep: int = 2, margin: int = 0) -> None:
        if keep < 1:
            raise ConfigError(f"keep: at least 1 checkpoint must be kept, not {keep}")
        self.folder = folder
        self.keep = keep
        self.margin = margin  # one checkpoint at least so many steps old is kept for going back

    def save(
        self,
        step: int,
        *,
        tensors: Mapping[str, Mapping[str, Tensor]],
        documents: Mapping[str, Mapping[str, Any]],
        score: float | None = None,
    ) -> Path:
        """The checkpoint of `step`, on the disk when this returns; then older ones go.

        `score` is the validation loss: lower is better. An OSError leaves all earlier checkpoints as they were. Of
        sharded tensors all processes call this, and the first writes the same checkpoint as one process would.
        """
        if not world.any_sharded(tensors):
            return self._save(step, tensors, documents, score)
        gathered = world.gather_on_first(tensors)
        world.first_only(lambda: self._save(step, gathered, documents, score))
        return self._path(step)

    def _path(self, step: int) -> Path:
        return self.folder / f"step-{step:08d}"

    def _save(
        self,
        step: int,
        tensors: Mapping[str, Mapping[str, Tensor]],
        documents: Mapping[str, Mapping[str, Any]],
        score: float | None,
    ) -> Path:
        if not self.folder.is_dir():
            self.folder.mkdir(parents=True)
            sync_folder(self.folder.parent)
        remove_leftovers(self.folder)
        for item in self.checkpoints():
            if item.path.suffix == ".new":  # a process was killed in the middle of saving a step again
                self._settle(item.path)
        path = self._path(step)
        first = path.with_name(f"{path.name}.new") if path.exists() else path
        format.write(first, step=step, tensors=tensors, documents=documents, notes={"score": score})
        if first != path:
            self._settle(first)
        self._prune(step)
        return path

    def _settle(self, new: Path) -> None:
        """Let step-N.new take the place of step-N."""
        path = new.with_suffix("")
        if path.exists():
            self._retire([path], then=lambda: os.rename(new, path))
        else:
            os.rename(new, path)
            sync_folder(self.folder)

    def _retire(self, paths: Iterable[Path], then: Callable[[], None] = lambda: None) -> None:
        """Take checkpoints out of sight in one step each, then delete them: deleting in place would tear them."""
        hidden = [(path, temporary(path)) for path in paths]
        for path, aside in hidden:
            os.rename(path, aside)
        then()
        sync_folder(self.folder)
        for _, aside in hidden:
            remove(aside)

    def discard(self, items: Iterable[Listed]) -> None:
        """Delete checkpoints, newest first, so that what a killed process leaves is still the past of the run."""
        newest_first = sorted(items, key=lambda item: item.step, reverse=True)
        if newest_first:
            self._retire(item.path for item in newest_first)

    def _prune(self, saved: int) -> None:
        """Keep the newest few up to the step just saved, the best, and whatever lies ahead of a run that went back."""
        listed = self.checkpoints()
        behind = [item for item in listed if item.step <= saved]
        best = self._by_score(listed, lambda _: None)[:1]
        # the newest old one, and the oldest young one, which takes its place when it is old enough
        old = [item for item in behind if item.step <= saved - self.margin]
        spare = [*old[-1:], *behind[len(old) :][:1]]
        kept = {item.path for item in (*behind[-self.keep :], *best, *spare)}
        if gone := [item.path for item in behind if item.path not in kept]:
            self._retire(gone)

    def checkpoints(self) -> list[Listed]:
        """What is there, oldest step first, without opening a file."""
        if not self.folder.is_dir():
            return []
        found = [(_STEP.fullmatch(path.name), path) for path in self.folder.iterdir()]
        listed = [(int(match[1]), bool(match[2]), path) for match, path in found if match and path.is_dir()]
        return [Listed(path=path, step=step) for step, _, path in sorted(listed)]

    def newest(self, *, say: Callable[[str], None]) -> Checkpoint | None:
        """The newest whole checkpoint; damaged ones are named through `say`, and all damaged is an error."""
        return self._first_whole(self.checkpoints()[::-1], say)

    def best(self, *, say: Callable[[str], None]) -> Checkpoint | None:
        """The whole checkpoint with the lowest score, the earlier one of equals; None if none has a score."""
        return self._first_whole(self._by_score(self.checkpoints(), say), say)

    def _first_whole(self, candidates: list[Listed], say: Callable[[str], None]) -> Checkpoint | None:
        for item in candidates:
            try:
                manifest = format.verify(item.path)
            except NewerFormat:
                raise  # it is whole: going on from an older one would throw its steps away
            except CheckpointError as error:
                say(f"skipped a checkpoint: {error}")
                continue
            return Checkpoint(path=item.path, step=manifest.step, manifest=manifest)
        if candidates:
            raise CheckpointError(
                f"{self.folder} holds no whole checkpoint among {len(candidates)}; "
                "restore one from a copy, or delete the folder to start from the beginning"
            )
        return None

    def _by_score(self, listed: list[Listed], say: Callable[[str], None]) -> list[Listed]:
        """Those with a finite score, best first."""
        scored: list[tuple[float, int, Listed]] = []
        for item in listed:
            try:
                score = manifest(item.path).notes.get("score")
            except CheckpointError as error:
                say(f"skipped a checkpoint: {error}")
                continue
            if isinstance(score, int | float) and math.isfinite(score):
                scored.append((score, item.step, item))
        return [item for _, _, item in sorted(scored, key=lambda entry: entry[:2])]
