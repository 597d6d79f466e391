"""From a recipe to a run's folder: tokenizer, shards and resolved settings, whole or not at all."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from trivium import config as settings
from trivium.checkpoints.store import Store
from trivium.data import shards as data
from trivium.data.mixing import ordering
from trivium.data.packing import Rows
from trivium.data.shards import Shards
from trivium.data.sources import files, texts, total_bytes
from trivium.errors import CheckpointError, ConfigError, DataError
from trivium.files import remove, temporary, write_synced
from trivium.models.transformer import build, with_vocab
from trivium.objectives.objective import Task
from trivium.text.kinds import File
from trivium.text.tokenizer import Tokenizer, open_tokenizer
from trivium.training import start, track
from trivium.training.calibrate import rows_that_fit, steps_for
from trivium.training.device import autocast, environment, keep_compiled, keep_memory, repeatable, settle
from trivium.training.guards import Soundness, enough_memory
from trivium.training.job import Job
from trivium.training.loop import computation
from trivium.training.recipe import Recipe
from trivium.training.scaling import scaler
from trivium.training.validate import validate

Say = Callable[[str], None]
Tick = Callable[[str, int, int], None]  # what is going on, how far, of how much


@dataclass(frozen=True, kw_only=True, slots=True)
class Ground:
    """What a run stands on: its folder, resolved recipe, tokenizer, data and what is to be learned from it."""

    folder: Path
    recipe: Recipe
    tokenizer: Tokenizer
    shards: Shards
    task: Task

    @property
    def train(self) -> Rows:
        return Rows(self.shards.train, self.task.length)

    @property
    def valid(self) -> Rows:
        return Rows(self.shards.valid, self.task.length)

    @property
    def identity(self) -> str:
        """Equal exactly when a checkpoint of one run means the same to the other."""
        fixed = settings.flat(self.recipe)
        prefixes = ("model.", "objective.", "optim.kind", "average.kind", "data.weights")
        kept = {key: value for key, value in fixed.items() if key.startswith(prefixes)}
        content = {**kept, "seed": self.recipe.seed, "rows": self.recipe.batch.rows, "data": self.shards.digest}
        return settings.hashed({**content, "sources": list(self.shards.train.sources)})


def lay(recipe: Recipe, runs: Path, *, say: Say, tick: Tick, clock: Callable[[], float] = time.monotonic) -> Ground:
    """Make the folder of a new run; nothing is left behind if anything is wrong with the recipe or the text."""
    folder = runs / recipe.name
    if not recipe.name:
        raise ConfigError("name: a run needs a name; add name=NAME")
    if folder.exists():
        raise ConfigError(f"name: {folder} exists already; go on with `trivium train {folder}` or set another name")
    if not recipe.data.paths:
        raise ConfigError("data.paths: no text is named; add data.paths=FILE")
    if not (recipe.budget.steps or recipe.budget.tokens or recipe.budget.minutes):
        raise ConfigError(
            "budget: nothing says how long to train; add budget.steps=N, budget.tokens=N or budget.minutes=N"
        )
    recipe = replace(settle(recipe), data=replace(recipe.data, paths=_absolute(recipe.data.paths)))
    recipe = start.taken_over(recipe, say=say)
    built = data.built_shards(recipe.data)
    if built is None:
        files(recipe.data.paths)  # a missing file is refused before a folder is made
    else:
        say(f"the shards in {built} bring their own tokenizer and validation text")
        recipe = replace(recipe, tokenizer=File(path=str(built / "tokenizer.json")))
    with _scratch(folder) as scratch:
        tokenizer, shards = _text(recipe, scratch, say, tick)
        start.check_tokenizer(recipe, tokenizer)
        recipe = replace(recipe, model=with_vocab(recipe.model, tokenizer.size))
        build(recipe.model, device="meta")  # what only building shows is refused before anything stays behind
        ground = _ground(scratch, recipe, tokenizer, shards)
        ordering(ground.train, recipe.data.weights, recipe.batch.rows, recipe.seed)
        with enough_memory(recipe):
            ground = replace(ground, recipe=_with_micro(ground, say))
            ground = replace(ground, recipe=_with_steps(ground, clock))
        tokenizer.save(scratch / "tokenizer.json")
        write_synced(scratch / "config.toml", settings.write(ground.recipe).encode())
        write_synced(scratch / "env.json", (json.dumps(environment(recipe), indent=2) + "\n").encode())
        try:
            os.rename(scratch, folder)
        except OSError as error:
            if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
                raise
            raise ConfigError(f"name: {folder} exists already; go on with `trivium train {folder}`") from None
    return reopen(folder, ground.recipe)


def reopen(folder: Path, recipe: Recipe) -> Ground:
    """The ground of a run that was laid before."""
    tokenizer = open_tokenizer(folder / "tokenizer.json")
    built = data.built_shards(recipe.data)
    digest = tokenizer.digest
    if built is not None:  # the run's own may have grown by the objective's special tokens
        own = open_tokenizer(built / "tokenizer.json")
        digest = own.digest if _extended(own, recipe).digest == digest else digest
    shards = data.open_shards(built or folder / "data", tokenizer_digest=digest)
    return _ground(folder, recipe, tokenizer, shards)


def _ground(folder: Path, recipe: Recipe, tokenizer: Tokenizer, shards: Shards) -> Ground:
    task = recipe.objective.bind(tokenizer, recipe.model)
    return Ground(folder=folder, recipe=recipe, tokenizer=tokenizer, shards=shards, task=task)


def job(ground: Ground, total: int) -> Job:
    """A job at step 0 with newly drawn weights, or with those that the recipe starts from."""
    recipe = ground.recipe
    device = torch.device(recipe.device)
    torch.set_num_threads(recipe.threads)
    keep_memory(device)
    repeatable(recipe)
    if recipe.compile == "on":
        keep_compiled(ground.folder.parent)
    model = build(recipe.model, seed=recipe.seed, device=device)
    model.recompute = recipe.recompute == "blocks"
    rows = ground.train
    made = Job(
        recipe=recipe,
        model=model,
        task=ground.task,
        optimizer=recipe.optim.build(model),
        average=recipe.average.build(model),
        scaler=scaler(recipe.precision),
        rows=rows,
        order=ordering(rows, recipe.data.weights, recipe.batch.rows, recipe.seed),
        soundness=Soundness(recipe.nonfinite, device),
        compute=computation(model, ground.task, autocast(recipe), recipe.compile == "on"),
        total=total,
        micro=recipe.micro,
    )
    try:
        start.begin(made)
    except CheckpointError:
        # a run that has checkpoints of its own goes on without the model that it began with
        if not Store(ground.folder / "checkpoints").checkpoints():
            raise
    return made


def trackers(ground: Ground) -> list[track.Tracker]:
    """Who hears of a run's numbers beside metrics.jsonl, as `track` says."""
    return track.trackers(ground.folder, ground.recipe.track)


def _text(recipe: Recipe, scratch: Path, say: Say, tick: Tick) -> tuple[Tokenizer, Shards]:
    built = data.built_shards(recipe.data)
    if built is not None:
        own = open_tokenizer(built / "tokenizer.json")
        # new ids come after the old ones, so the shards stay what they are
        return _extended(own, recipe), data.open_shards(built, tokenizer_digest=own.digest)
    size, done = total_bytes(recipe.data.paths), 0

    def read(count: int) -> None:
        nonlocal done
        done += count
        tick("tokenizer", done, size)

    tokenizer = _extended(recipe.tokenizer.build(texts(recipe.data, read=read)), recipe)
    shards = data.build(recipe.data, tokenizer, scratch / "data", progress=lambda at, of: tick("data", at, of), say=say)
    return tokenizer, shards


def _extended(tokenizer: Tokenizer, recipe: Recipe) -> Tokenizer:
    """The tokenizer with the special tokens that the objective needs."""
    specials = recipe.objective.specials
    return tokenizer if tokenizer.specials.keys() >= set(specials) else tokenizer.extended(specials)


def _with_micro(ground: Ground, say: Say) -> Recipe:
    """The recipe with as many rows at a time as fit the device."""
    recipe = ground.recipe
    if recipe.batch.micro or not tried(torch.device(recipe.device)):
        return recipe
    micro = rows_that_fit(lambda: job(ground, 1))
    if micro == recipe.micro:
        return recipe
    say(f"{recipe.micro} rows at a time do not fit the memory of {recipe.device}: batch.micro is {micro}")
    return replace(recipe, batch=replace(recipe.batch, micro=micro))


def tried(device: torch.device) -> bool:
    """Whether a step is tried before a run begins: not on the CPU, whose system ends a process that takes too much."""
    return device.type != "cpu"


def _with_steps(ground: Ground, clock: Callable[[], float]) -> Recipe:
    """The recipe with its budget as a number of steps."""
    recipe = ground.recipe
    per_step = recipe.batch.rows * ground.task.length
    if recipe.budget.steps:
        return recipe
    if recipe.budget.tokens:
        steps = -(-recipe.budget.tokens // per_step)
    else:
        seconds = recipe.budget.minutes * 60
        every = recipe.evaluate.every
        steps = steps_for(
            seconds,
            lambda: job(ground, 1_000_000),
            lambda trial: _validation(trial, ground, clock),
            lambda steps: steps // int(every) + 1 if every >= 1 else round(1 / every) if every else 1,
            clock,
        )
    return replace(recipe, budget=replace(recipe.budget, steps=steps, tokens=0, minutes=0.0))


def _validation(trial: Job, ground: Ground, clock: Callable[[], float]) -> float:
    """The seconds that one validation takes, by a part of it."""
    recipe, rows = ground.recipe, ground.valid
    if not len(rows):
        return 0.0
    wanted = min(len(rows), recipe.evaluate.rows or len(rows))
    part = min(wanted, 4 * trial.micro)
    before = clock()
    validate(trial, rows, limit=part)
    return (clock() - before) * wanted / part


def _absolute(paths: tuple[str, ...]) -> tuple[str, ...]:
    """The paths as they are found from any folder, so that a run can go on from elsewhere."""
    return tuple(str(Path(path).absolute()) for path in paths)


@contextlib.contextmanager
def _scratch(folder: Path) -> Iterator[Path]:
    """A hidden folder beside `folder` to prepare it in; removed unless it was renamed into place."""
    made = [parent for parent in (folder.parent, *folder.parent.parents) if not parent.exists()]
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DataError(f"{folder.parent} cannot be made: {error.strerror}") from None
    _sweep(folder)
    scratch = temporary(folder)
    scratch.mkdir()
    try:
        yield scratch
    finally:
        if scratch.exists():
            remove(scratch)
            for parent in made:  # nothing is left behind: not even the folder of runs
                with contextlib.suppress(OSError):
                    parent.rmdir()


def _sweep(folder: Path) -> None:
    """Remove what killed processes were still preparing under this name."""
    pattern = re.compile(rf"\.tmp-{re.escape(folder.name)}-(\d+)")
    for path in folder.parent.iterdir():
        found = pattern.fullmatch(path.name)
        if found and not _alive(int(found[1])):
            remove(path)


def _alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return process != os.getpid()
