"""From a recipe to a run's folder: tokenizer, shards and resolved settings, whole or not at all."""

from __future__ import annotations

import errno
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from trivium import config as settings
from trivium import records
from trivium.data import shards as data
from trivium.data.bucketing import Buckets
from trivium.data.packed import PackedPairs
from trivium.data.packing import Rows
from trivium.data.pairs import build as build_shards
from trivium.data.pairs import settled, training_files, training_texts
from trivium.data.shards import Shards
from trivium.errors import ConfigError
from trivium.files import json_line, write_synced
from trivium.models.transformer import build, with_vocab
from trivium.text.kinds import File
from trivium.text.tokenizer import Tokenizer, open_tokenizer
from trivium.training import start
from trivium.training.about import describe, preset_of
from trivium.training.calibrate import fit_micro_batch, plan_budget
from trivium.training.checks import ready, taken
from trivium.training.context import RunContext, bind_context, open_context, with_objective_specials
from trivium.training.device import environment, settle
from trivium.training.fit import fitted
from trivium.training.oom import enough_memory
from trivium.training.process import process_settings
from trivium.training.recipe import Recipe
from trivium.training.scratch import prepared, replaced
from trivium.training.stages import Say, Tick, stage

FitMicroBatch = Callable[[RunContext, Say, Callable[[], float]], RunContext]


def create_run(
    recipe: Recipe,
    runs: Path,
    *,
    parts: Sequence[type[Any]] = (),
    tables: Sequence[Mapping[str, Any]] = (),
    again: bool = False,
    say: Say,
    tick: Tick,
    clock: Callable[[], float] = time.monotonic,
    fit: FitMicroBatch = fit_micro_batch,
) -> RunContext:
    """Create the folder of a new run; nothing is left behind if anything is wrong with the recipe or the text.

    `tables` are those that the recipe was read from; they name its preset. `fit` finds how many rows go at a time.
    With `again` the folder is that of a run which the new one replaces, once it is ready.
    """
    folder = runs / recipe.name
    recipe = ready(recipe, None if again else folder, settle=settle, parts=parts, say=say)
    if again and recipe.start and Path(recipe.start).is_relative_to(folder.absolute()):
        raise ConfigError(f"start: {recipe.start} lies in the run that is to be replaced; set another name")
    recipe = _resolve_data(recipe, say)
    with prepared(folder) as scratch:
        tokenizer, shards = _read_text(recipe, scratch, say, tick, clock)
        recipe = start.with_specials(recipe, tokenizer, say=say)
        recipe = replace(recipe, model=with_vocab(recipe.model, tokenizer.size))
        build(recipe.model, device="meta")  # what only building shows is refused before anything stays behind
        context = bind_context(scratch, recipe, tokenizer, shards)
        _check_length(context)
        for sentence in _describe_pairs(context):
            say(sentence)
        context = replace(context, recipe=fitted(recipe, length=context.longest, say=say))
        context.build_order()  # refuses weights and batches that the rows do not allow
        _try_batches(context)
        with enough_memory(context.recipe), process_settings(context.recipe, runs):
            context = fit(context, say, clock)
            context = plan_budget(context, say, clock)
        _write_files(scratch, context, tables)
        try:
            replaced(folder, scratch) if again else os.rename(scratch, folder)
        except OSError as error:
            if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
                raise
            raise ConfigError(f"name: {taken(folder)}") from None
    return replace(open_context(folder, context.recipe), spent=context.spent, validation=context.validation)


def _resolve_data(recipe: Recipe, say: Say) -> Recipe:
    """The recipe with definite settings of its data; shards that were built before bring their own tokenizer."""
    built = data.built_shards(recipe.data)
    if built is None:
        return replace(recipe, data=settled(recipe.data))
    say(f"the shards in {built} bring their own tokenizer and validation text")
    return replace(recipe, tokenizer=File(path=str(built / "tokenizer.json")))


def _read_text(
    recipe: Recipe, scratch: Path, say: Say, tick: Tick, clock: Callable[[], float]
) -> tuple[Tokenizer, Shards]:
    """The tokenizer, trained or opened, and the shards, written below `scratch` or opened where they were built."""
    built = data.built_shards(recipe.data)
    if built is not None:
        own = open_tokenizer(built)
        # new ids come after the old ones, so the shards stay what they are
        return with_objective_specials(own, recipe), data.open_shards(built, tokenizer_digest=own.digest)
    size, done = sum(path.stat().st_size for path in training_files(recipe.data)), 0

    def read(count: int) -> None:
        nonlocal done
        done += count
        tick("tokenizer", done, size)

    with stage("tokenizer", say, clock) as current:
        found = start.known_tokenizer(recipe) or recipe.tokenizer.build(training_texts(recipe.data, read=read))
        tokenizer = with_objective_specials(found, recipe)
        current.detail = f"{tokenizer.size:,} ids"
    with stage("data", say, clock) as current:
        shards = build_shards(
            recipe.data, tokenizer, scratch / "data", progress=lambda at, of: tick("data", at, of), say=say
        )
        # of each stream but the END that it begins with: a model predicts all the others
        learned, held = (max(0, len(stream) - 1) for stream in (shards.train, shards.valid))
        current.detail = f"{learned:,} tokens for training, {held:,} for validation"
    return tokenizer, shards


def _write_files(scratch: Path, context: RunContext, tables: Sequence[Mapping[str, Any]]) -> None:
    """Write what a run's folder holds before its first step, beside the shards."""
    recipe = context.recipe
    context.tokenizer.save(scratch / "tokenizer.json")
    if notes := start.notes(recipe):
        write_synced(scratch / start.NOTES, json_line(notes))
    write_synced(scratch / "config.toml", settings.write(recipe).encode())
    about = describe(recipe, context.tokenizer, context.shards, preset_of(recipe, *tables))
    write_synced(scratch / records.ABOUT, about)
    write_synced(scratch / "env.json", (json.dumps(environment(recipe), indent=2) + "\n").encode())


def _try_batches(context: RunContext) -> None:
    """Refuse what only a batch shows, such as texts that are too few for the objective."""
    for rows in (context.train, context.valid):
        if len(rows):
            context.task.inputs(rows.take(np.zeros(1, np.int64)), np.random.default_rng(context.recipe.seed))


def _check_length(context: RunContext) -> None:
    """Refuse a text that does not fill a single row: a model would only learn it by heart."""
    rows = context.train
    if isinstance(rows, Rows) and (tokens := len(rows.stream) - 1) < rows.length:
        raise ConfigError(
            f"data.paths: the training text has {tokens:,} tokens, less than one row of {rows.length:,}; name more "
            "text, or set a smaller data.length"
        )


def _describe_pairs(context: RunContext) -> Iterator[str]:
    """How many pairs are too long, and how much of a batch is padding; a split of which no pair fits is refused."""
    limit = context.recipe.data.limit
    for name, rows in (("training", context.train), ("validation", context.valid)):
        if isinstance(rows, Rows):
            return
        if rows.too_long and not len(rows):
            raise ConfigError(f"{limit}: no {name} pair has both sides within {rows.length} tokens; raise it")
        if rows.too_long:
            left = f"{name} pairs with a side of more than {rows.length} tokens, which are left out: {rows.too_long:,}"
            kept = len(rows.pairs) if isinstance(rows, PackedPairs) else len(rows)
            yield f"{left} of {rows.too_long + kept:,} ({limit})"
    rows = context.train
    order = context.build_order()
    if isinstance(order, Buckets):
        pairs = f"{len(rows):,} pairs make {len(order):,} batches an epoch"
        yield f"{pairs}; {order.padding:.1%} of them is padding"
    if isinstance(rows, PackedPairs):
        pairs = f"{len(rows.pairs):,} pairs fill {len(rows):,} rows of {sum(rows.widths)} tokens"
        yield f"{pairs}; {rows.padding:.1%} of them is padding"
