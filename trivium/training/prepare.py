"""From a recipe to a run's folder: tokenizer, shards and resolved settings, whole or not at all."""

from __future__ import annotations

import errno
import json
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from trivium import config as settings
from trivium import records
from trivium.data import shards as data
from trivium.data.bucketing import Buckets, Pairs
from trivium.data.loader import Order, Ordering
from trivium.data.mixing import ordering, training_rows
from trivium.data.packed import Examples, PackedPairs
from trivium.data.packing import Rows
from trivium.data.pairs import build as build_shards
from trivium.data.pairs import paired, settled, training_files, training_texts
from trivium.data.shards import Shards, Stream
from trivium.errors import CheckpointError, ConfigError
from trivium.files import json_line, read_inside, write_synced
from trivium.models.transformer import build, with_vocab
from trivium.objectives.objective import Task
from trivium.objectives.options import Seq2Seq
from trivium.optim.onepass import with_twins
from trivium.parts.linear import narrowed
from trivium.text.kinds import File
from trivium.text.tokenizer import Tokenizer, open_tokenizer
from trivium.training import start, track
from trivium.training.about import describe, preset_of
from trivium.training.calibrate import measure, rows_that_fit, warn_of_long_steps
from trivium.training.checks import check_form, ready, taken
from trivium.training.deadline import VALIDATION
from trivium.training.device import autocast, environment, settle
from trivium.training.fit import fitted, surely_fits
from trivium.training.guards import Soundness, enough_memory
from trivium.training.job import Job
from trivium.training.loop import computation
from trivium.training.process import process_settings
from trivium.training.recipe import Budget, Recipe
from trivium.training.scaling import scaler
from trivium.training.scratch import prepared, replaced
from trivium.training.stages import stage
from trivium.training.timeline import Timeline, times
from trivium.training.validate import is_worth_compiling, validate

START = "start.json"  # what the finished model keeps of the one that it began with
_LARGEST = 1 << 20  # bytes of what is kept of a start

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
    spent: float = 0.0  # seconds of the budget that measuring took before the run
    validation: float = 0.0  # seconds of one validation, as measured then
    # Packing takes a while: pairs are made once, when they are first asked for, also for all that `replace` makes.
    _made: dict[tuple[object, ...], Pairs | PackedPairs] = field(default_factory=dict, repr=False, compare=False)

    @property
    def longest(self) -> int:
        """The tokens of the longest row, of one side."""
        rows = self.train
        if isinstance(rows, PackedPairs):
            return max(rows.widths)
        return int(rows.sizes.max()) if isinstance(rows, Pairs) and len(rows) else self.task.length

    @property
    def train(self) -> Examples:
        stream = self.shards.train
        if paired(self.shards):
            return self._pairs("train", stream, self.recipe.seed)
        return training_rows(stream, self.task.length, self.recipe.data)

    @property
    def valid(self) -> Examples:
        stream = self.shards.valid
        return self._pairs("valid", stream, 0) if paired(self.shards) else Rows(stream, self.task.length)

    def _pairs(self, split: str, stream: Stream, seed: int) -> Pairs | PackedPairs:
        length, width = self.task.length, self.recipe.data.pack
        key = (split, length, width, seed)
        if key not in self._made:
            pairs = Pairs(stream, length)
            self._made[key] = PackedPairs(pairs, width, seed) if width and len(pairs) else pairs
        return self._made[key]

    @property
    def identity(self) -> str:
        """Equal exactly when a checkpoint of one run means the same to the other."""
        fixed = settings.flat(self.recipe)
        prefixes = ("model.", "objective.", "optim.kind", "average.kind", "data.weights", "data.shift")
        kept = {key: value for key, value in fixed.items() if key.startswith(prefixes)}
        for name in ("pack", "length"):  # only where they are set: runs from before there were such keys go on
            if value := getattr(self.recipe.data, name):
                kept[f"data.{name}"] = value
        batch = self.recipe.batch
        content = {**kept, "seed": self.recipe.seed, batch.unit: batch.size, "data": self.shards.digest}
        return settings.hashed({**content, "sources": list(self.shards.train.sources)})


def lay(
    recipe: Recipe,
    runs: Path,
    *,
    parts: Sequence[type[Any]] = (),
    tables: Sequence[Mapping[str, Any]] = (),
    again: bool = False,
    say: Say,
    tick: Tick,
    clock: Callable[[], float] = time.monotonic,
) -> Ground:
    """Make the folder of a new run; nothing is left behind if anything is wrong with the recipe or the text.

    `tables` are those that the recipe was read from; they name its preset. With `again` the folder is that of a run
    which the new one replaces, once it is ready.
    """
    folder = runs / recipe.name
    recipe = ready(recipe, None if again else folder, settle=settle, parts=parts, say=say)
    if again and recipe.start and Path(recipe.start).is_relative_to(folder.absolute()):
        raise ConfigError(f"start: {recipe.start} lies in the run that is to be replaced; set another name")
    built = data.built_shards(recipe.data)
    if built is None:
        recipe = replace(recipe, data=settled(recipe.data))
    else:
        say(f"the shards in {built} bring their own tokenizer and validation text")
        recipe = replace(recipe, tokenizer=File(path=str(built / "tokenizer.json")))
    with prepared(folder) as scratch:
        tokenizer, shards = _text(recipe, scratch, say, tick, clock)
        recipe = start.with_specials(recipe, tokenizer, say=say)
        recipe = replace(recipe, model=with_vocab(recipe.model, tokenizer.size))
        build(recipe.model, device="meta")  # what only building shows is refused before anything stays behind
        ground = _ground(scratch, recipe, tokenizer, shards)
        _check_length(ground)
        for sentence in _about_pairs(ground):
            say(sentence)
        recipe = fitted(recipe, length=ground.longest, say=say)
        ground = replace(ground, recipe=recipe)
        _order(recipe, ground.train)
        _try_batches(ground)
        with enough_memory(recipe), process_settings(recipe, runs):
            ground = replace(ground, recipe=_with_micro(ground, say, clock))
            ground = _with_budget(ground, say, clock)
        tokenizer.save(scratch / "tokenizer.json")
        if notes := start.notes(recipe):
            write_synced(scratch / START, json_line(notes))
        write_synced(scratch / "config.toml", settings.write(ground.recipe).encode())
        about = describe(ground.recipe, tokenizer, shards, preset_of(ground.recipe, *tables))
        write_synced(scratch / records.ABOUT, about)
        write_synced(scratch / "env.json", (json.dumps(environment(recipe), indent=2) + "\n").encode())
        try:
            replaced(folder, scratch) if again else os.rename(scratch, folder)
        except OSError as error:
            if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
                raise
            raise ConfigError(f"name: {taken(folder)}") from None
    return replace(reopen(folder, ground.recipe), spent=ground.spent, validation=ground.validation)


def reopen(folder: Path, recipe: Recipe) -> Ground:
    """The ground of a run that was laid before."""
    tokenizer = open_tokenizer(folder)
    built = data.built_shards(recipe.data)
    digest = tokenizer.digest
    if built is not None:  # the run's own may have grown by the objective's special tokens
        own = open_tokenizer(built)
        digest = own.digest if _extended(own, recipe).digest == digest else digest
    shards = data.open_shards(built or folder / "data", tokenizer_digest=digest)
    return _ground(folder, recipe, tokenizer, shards)


def _ground(folder: Path, recipe: Recipe, tokenizer: Tokenizer, shards: Shards) -> Ground:
    check_form(recipe, pairs=paired(shards))
    length, model = recipe.data.length, recipe.model
    task = recipe.objective.bind(tokenizer, replace(model, context=length) if length else model)
    return Ground(folder=folder, recipe=recipe, tokenizer=tokenizer, shards=shards, task=task)


def job(ground: Ground, total: int | Timeline, *, begin: bool = True) -> Job:
    """A job at step 0 with newly drawn weights, or with those that the recipe starts from.

    Without `begin` it is about to take up a checkpoint, and the recipe's start need not be there any more.
    """
    recipe = ground.recipe
    device = torch.device(recipe.device)
    model = build(recipe.model, seed=recipe.seed, device=device)
    model.recompute = recipe.recompute == "blocks"
    model.stream = torch.bfloat16 if recipe.stream == "bf16" else None
    narrowed(model, recipe.precision == "fp8")
    rows = ground.train
    optimizer, twins = recipe.optim.build(model), None
    if twinned(recipe):
        optimizer, twins = with_twins(optimizer, model)
    order, compiled, pairs = _order(recipe, rows), recipe.compile != "off", isinstance(rows, Pairs)
    often = len(rows) < _OFTEN * order.size
    made = Job(
        recipe=recipe,
        model=model,
        task=ground.task,
        optimizer=optimizer,
        twins=twins,
        average=recipe.average.build(model),
        scaler=scaler(recipe.precision),
        rows=rows,
        order=order,
        soundness=Soundness(recipe.nonfinite, device),
        compute=computation(model, ground.task, autocast(recipe), compiled, pairs, often),
        evaluate=computation(model, ground.task, autocast(recipe), False),
        timeline=total if isinstance(total, Timeline) else Timeline.fixed(total),
        micro=recipe.micro,
    )
    if recipe.compile == "graphs":
        made.optimizer.compile()
        made.average.compile()
    if begin:
        start.begin(made)
    return made


_OFTEN = 10  # batches an epoch: with fewer, the one that has the last row of the text is not seldom

# A kernel for each weight is started by the host, in some 20 us. In a CUDA graph that is free, and behind the long step
# of a large model it does not show; a small one without a graph would wait for it.
LARGE = 100_000_000


def twinned(recipe: Recipe) -> bool:
    """Whether a step multiplies by twins of its matrices: one compiled for a GPU, whose batch goes through as a whole.

    What that is worth in an eager step has not been measured.
    """
    if torch.device(recipe.device).type != "cuda" or recipe.precision not in ("bf16", "fp8"):
        return False
    worth = recipe.compile == "graphs" or (recipe.compile == "on" and recipe.model.parameters() >= LARGE)
    return worth and recipe.micro >= recipe.batch.size


def beginning(ground: Ground, total: int | Timeline) -> Job:
    """The job at step 0 to copy from, on the CPU: the device has no room for two."""
    recipe = replace(ground.recipe, device="cpu", compile="off")
    try:
        return job(replace(ground, recipe=recipe), total)
    except CheckpointError as error:
        raise CheckpointError(
            f"the run must go back to its beginning, and its start is gone ({error}); "
            f"restore that and go on with `trivium train {ground.folder}`"
        ) from None


def start_notes(folder: Path) -> dict[str, Any]:
    """What the model of a run keeps of its start."""
    try:
        found = json.loads(read_inside(folder, START, _LARGEST))
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def trackers(ground: Ground) -> list[track.Tracker]:
    """Who hears of a run's numbers beside metrics.jsonl, as `track` says."""
    return track.trackers(ground.folder, ground.recipe.track)


def _text(recipe: Recipe, scratch: Path, say: Say, tick: Tick, clock: Callable[[], float]) -> tuple[Tokenizer, Shards]:
    built = data.built_shards(recipe.data)
    if built is not None:
        own = open_tokenizer(built)
        # new ids come after the old ones, so the shards stay what they are
        return _extended(own, recipe), data.open_shards(built, tokenizer_digest=own.digest)
    size, done = sum(path.stat().st_size for path in training_files(recipe.data)), 0

    def read(count: int) -> None:
        nonlocal done
        done += count
        tick("tokenizer", done, size)

    with stage("tokenizer", say, clock) as current:
        found = start.known_tokenizer(recipe) or recipe.tokenizer.build(training_texts(recipe.data, read=read))
        tokenizer = _extended(found, recipe)
        current.detail = f"{tokenizer.size:,} ids"
    with stage("data", say, clock) as current:
        shards = build_shards(
            recipe.data, tokenizer, scratch / "data", progress=lambda at, of: tick("data", at, of), say=say
        )
        # of each stream but the END that it begins with: a model predicts all the others
        learned, held = (max(0, len(stream) - 1) for stream in (shards.train, shards.valid))
        current.detail = f"{learned:,} tokens for training, {held:,} for validation"
    return tokenizer, shards


def _extended(tokenizer: Tokenizer, recipe: Recipe) -> Tokenizer:
    """The tokenizer with the special tokens that the objective needs."""
    specials = recipe.objective.specials
    return tokenizer if tokenizer.specials.keys() >= set(specials) else tokenizer.extended(specials)


def _with_micro(ground: Ground, say: Say, clock: Callable[[], float]) -> Recipe:
    """The recipe with as many rows at a time as fit the device."""
    recipe = ground.recipe
    if recipe.batch.micro or not tried(torch.device(recipe.device)) or surely_fits(recipe, ground.longest):
        return recipe
    with stage("memory", say, clock) as current:
        micro = rows_that_fit(lambda: job(ground, 1))
        current.detail = f"{micro} {recipe.batch.unit} at a time fit"
    if micro == recipe.micro:
        return recipe
    what = f"{recipe.micro} {recipe.batch.unit} at a time"
    say(f"{what} do not fit the memory of {recipe.device}: batch.micro is {micro}")
    return replace(recipe, batch=replace(recipe.batch, micro=micro))


def tried(device: torch.device) -> bool:
    """Whether a step is tried before a run begins: not on the CPU, whose system ends a process that takes too much."""
    return device.type != "cpu"


def _with_budget(ground: Ground, say: Say, clock: Callable[[], float]) -> Ground:
    """The ground with a budget in steps, or with a plan for one in minutes."""
    recipe = ground.recipe
    if recipe.budget.tokens:
        steps = math.ceil(recipe.budget.tokens / _tokens_per_step(recipe, ground.train))
        return replace(ground, recipe=replace(recipe, budget=Budget(steps=steps)))
    if not recipe.budget.minutes or recipe.budget.planned:  # the file of a run in minutes repeats it
        return ground
    seconds = recipe.budget.minutes * 60
    rows = _validated_rows(ground)
    say("timing some steps, to plan the minutes by")
    with stage("timing", say, clock) as current:
        trial = partial(job, ground, 1_000_000)
        timing = measure(seconds, trial, lambda made, batches: _validation(made, ground, batches, clock), clock)
        current.detail = f"{timing.step:.3g} s a step"
    if slow := warn_of_long_steps(timing, recipe):
        say(slow)
    planned = max(1, int((seconds - timing.measuring) * (1 - VALIDATION) / max(timing.step, 1e-9)))
    recipe = replace(recipe, budget=replace(recipe.budget, planned=planned))
    # a margin for a machine that is busier later on
    allowed = 0.8 * VALIDATION * seconds / times(recipe.evaluate.every, planned)
    if rows and timing.validation > allowed:
        fewer = max(1, int(rows * allowed / timing.validation))
        say(
            f"each validation reads {fewer:,} of {rows:,} rows, so that all of them take less than a tenth of "
            f"{recipe.budget.minutes:g} minutes (evaluate.rows)"
        )
        recipe = replace(recipe, evaluate=replace(recipe.evaluate, rows=fewer))
    each = timing.validation * (recipe.evaluate.rows or rows) / max(1, rows)
    return replace(ground, recipe=recipe, spent=timing.measuring, validation=each)


def _validated_rows(ground: Ground) -> int:
    """How many rows each validation reads."""
    return min(len(ground.valid), ground.recipe.evaluate.rows or len(ground.valid))


def _validation(trial: Job, ground: Ground, batches: float, clock: Callable[[], float]) -> float:
    """The seconds that one validation takes, by a part of it."""
    recipe, rows, wanted = ground.recipe, ground.valid, _validated_rows(ground)
    if not wanted:
        return 0.0
    tokens = int(rows.sizes.max(axis=1).mean()) if isinstance(rows, Pairs) and recipe.batch.tokens else 1
    part = min(wanted, max(1, int(batches * trial.micro) // tokens))
    # as the run will: the number of steps is not known yet, that of validations is, or they are few
    often = times(recipe.evaluate.every, 1_000_000) if isinstance(recipe.evaluate.every, float) else 10
    compiled = is_worth_compiling(trial, often * wanted)
    if recipe.compile != "off":  # once before the clock runs: a model in evaluation is another program to compile
        validate(trial, rows, limit=part, compiled=compiled)
    before = clock()
    validate(trial, rows, limit=part, compiled=compiled)
    return (clock() - before) * wanted / part


def _order(recipe: Recipe, rows: Examples) -> Ordering:
    """Which rows each step of a run sees."""
    batch, seed = recipe.batch, recipe.seed
    if isinstance(rows, Rows):
        return ordering(rows, recipe.data.weights, batch.rows, seed)
    if isinstance(rows, PackedPairs):
        return Order(len(rows), batch.rows, seed, shifts=rows.shifts, apart=len(rows))
    assert isinstance(recipe.objective, Seq2Seq)
    if batch.tokens:
        return Buckets(rows.sizes, batch.tokens, seed, size=batch.rows, align=recipe.objective.align)
    return Order(len(rows), batch.rows, seed)


def _tokens_per_step(recipe: Recipe, rows: Examples) -> float:
    """The labels of an update, on average."""
    if isinstance(rows, Rows):
        return recipe.batch.rows * rows.length
    order = _order(recipe, rows)
    steps = len(order) if isinstance(order, Buckets) else len(rows) / order.size  # of an epoch
    return rows.labels / steps


def _try_batches(ground: Ground) -> None:
    """Refuse what only a batch shows, such as texts that are too few for the objective."""
    for rows in (ground.train, ground.valid):
        if len(rows):
            ground.task.inputs(rows.take(np.zeros(1, np.int64)), np.random.default_rng(ground.recipe.seed))


def _check_length(ground: Ground) -> None:
    """Refuse a text that does not fill a single row: a model would only learn it by heart."""
    rows = ground.train
    if isinstance(rows, Rows) and (tokens := len(rows.stream) - 1) < rows.length:
        raise ConfigError(
            f"data.paths: the training text has {tokens:,} tokens, less than one row of {rows.length:,}; name more "
            "text, or set a smaller data.length"
        )


def _about_pairs(ground: Ground) -> Iterator[str]:
    """What somebody who trains on pairs should know; a split of which no pair fits the model is refused."""
    limit = ground.recipe.data.limit
    for name, rows in (("training", ground.train), ("validation", ground.valid)):
        if isinstance(rows, Rows):
            return
        if rows.too_long and not len(rows):
            raise ConfigError(f"{limit}: no {name} pair has both sides within {rows.length} tokens; raise it")
        if rows.too_long:
            left = f"{name} pairs with a side of more than {rows.length} tokens, which are left out: {rows.too_long:,}"
            kept = len(rows.pairs) if isinstance(rows, PackedPairs) else len(rows)
            yield f"{left} of {rows.too_long + kept:,} ({limit})"
    rows = ground.train
    order = _order(ground.recipe, rows)
    if isinstance(order, Buckets):
        pairs = f"{len(rows):,} pairs make {len(order):,} batches an epoch"
        yield f"{pairs}; {order.padding:.1%} of them is padding"
    if isinstance(rows, PackedPairs):
        pairs = f"{len(rows.pairs):,} pairs fill {len(rows):,} rows of {sum(rows.widths)} tokens"
        yield f"{pairs}; {rows.padding:.1%} of them is padding"
