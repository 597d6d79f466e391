"""What a recipe is refused for before any text is read or a model is built, all of it at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from shlex import quote
from typing import Any, TypeVar

from trivium.data import shards as data
from trivium.data.config import DataConfig
from trivium.data.pairs import pair_files
from trivium.data.sources import COMPRESSED, files, total_bytes
from trivium.errors import ConfigError, DataError, UserError
from trivium.objectives.options import Masked, Seq2Seq
from trivium.text.kinds import Bpe, Bytes, Chars, File, Words
from trivium.text.tokenizer import open_tokenizer
from trivium.training import track
from trivium.training.fit import fitted
from trivium.training.machine import this_machine
from trivium.training.recipe import Recipe
from trivium.training.recipes import is_about, read_recipe, repaired_recipe, resumed_recipe, with_data_below

T = TypeVar("T")

# The most that a tokenizer makes of a byte: one for it and one for the end of a document. One that normalises may write
# the 18 letters of a ligature (U+FDFA) for three bytes, and a space in front.
_TOKENS_PER_BYTE = 8


def check_source(source: Path, layer: Mapping[str, Any], *, runs: Path, data_dir: Path | None) -> None:
    """Refuse what `train` would refuse before it reads text, without torch unless the recipe starts from a model."""
    if source.is_dir():
        resumed_recipe(source, layer, this_machine().settle)
        return
    check_recipe(source, layer, runs=runs, data_dir=data_dir)


def check_recipe(source: Path, layer: Mapping[str, Any], *, runs: Path | None, data_dir: Path | None) -> Recipe:
    """The recipe of a file as it is written, or all that is wrong with it; `runs` None asks for no folder."""

    def check(recipe: Recipe) -> None:
        recipe = with_data_below(recipe, data_dir)
        ready(recipe, None if runs is None else runs / recipe.name, settle=this_machine().settle, say=lambda text: None)

    try:
        recipe = read_recipe(source, layer)
    except ConfigError as error:
        rest, further = repaired_recipe(source, layer, error)
        gone = [problem.split(":")[0] for found in (error, *further) for problem in found.problems]
        try:
            if rest is not None:
                check(rest)
        except UserError as found:
            problems = found.problems if isinstance(found, ConfigError) else (str(found),)
            further += [ConfigError(problem) for problem in problems if not is_about(problem, gone)]
        ConfigError.gather([error, *further])
        raise
    check(recipe)
    return recipe


def ready(
    recipe: Recipe,
    folder: Path | None,
    *,
    settle: Callable[[Recipe], Recipe],
    parts: Sequence[type[Any]] = (),
    say: Callable[[str], None],
) -> Recipe:
    """The recipe for this machine, with its start and the absolute paths of its data, or all that is wrong with it.

    `folder` is where the run is to be made, which must not exist; None does not ask. `settle` decides what depends on
    the machine.
    """
    problems: list[UserError] = []

    def attempt(step: Callable[[], T], otherwise: T) -> T:
        try:
            return step()
        except UserError as error:
            problems.append(error)
            return otherwise

    if not recipe.name:
        problems.append(ConfigError("name: a run needs a name; add name=NAME"))
    elif folder is not None and folder.exists():
        problems.append(ConfigError(f"name: {taken(folder)}"))
    if not (recipe.budget.steps or recipe.budget.tokens or recipe.budget.minutes):
        problems.append(
            ConfigError(
                "budget: nothing says how long to train; add budget.steps=N, budget.tokens=N or budget.minutes=N"
            )
        )
    recipe = replace(recipe, data=recipe.data.below(Path.cwd()))
    for check in _checks(recipe):
        attempt(check, None)
    recipe = attempt(lambda: settle(recipe), recipe)
    recipe = attempt(lambda: _started(recipe, parts, say), recipe)
    pairs = isinstance(recipe.objective, Seq2Seq) and not recipe.data.pack
    recipe = replace(recipe, batch=recipe.batch.settled(pairs=pairs))
    attempt(lambda: _length(recipe), None)
    if not problems:  # a model far too large is refused before its text is read
        attempt(lambda: fitted(recipe, length=recipe.data.length, say=lambda text: None), recipe)
    if len(problems) == 1:
        raise problems[0]
    ConfigError.gather([error if isinstance(error, ConfigError) else ConfigError(str(error)) for error in problems])
    return recipe


TAKEN = "exists already"


def taken(folder: Path) -> str:
    """The sentence about a run's folder that is there already."""
    return f"{folder} {TAKEN}; go on with `trivium train {quote(str(folder))}` or set another name"


def _checks(recipe: Recipe) -> Iterator[Callable[[], object]]:
    """The checks that depend on nothing but the recipe and on which files exist."""
    config = recipe.data
    if not (config.paths or config.paired):
        yield _no_text
    elif data.built_shards(config) is None:
        yield partial(check_form, recipe, pairs=config.paired)
        yield from _files(config)
        yield partial(_size, recipe)
        yield partial(_weights, config)
        if not recipe.start or recipe.tokenizer != File(path=recipe.start):  # a published start brings its own
            yield partial(_tokenizer, recipe.tokenizer)
    yield partial(_objective, recipe)
    yield partial(track.check, recipe.track)


def _started(recipe: Recipe, parts: Sequence[type[Any]], say: Callable[[str], None]) -> Recipe:
    if not recipe.start:
        return recipe
    if not (path := Path(recipe.start).absolute()).exists():
        raise ConfigError(f"start: {path} does not exist; name a run, a checkpoint in it, a saved or a published model")
    from trivium.training import start  # not above: it opens models, and so needs torch

    return start.taken_over(recipe, parts=parts, say=say)


def _length(recipe: Recipe) -> None:
    length, context = recipe.data.length, recipe.model.context
    if length > context:
        raise ConfigError(f"data.length: {length} is more than the {context} of model.context; lower it")


def _no_text() -> None:
    raise ConfigError("data.paths: no text is named; add data.paths=FILE")


def _files(config: DataConfig) -> Iterator[Callable[[], object]]:
    """A check for each file or folder of the data."""
    if config.paired:
        yield partial(pair_files, config)
        return
    for path in config.paths:
        yield partial(files, [path])
    if config.valid_path:
        yield partial(files, [config.valid_path], key="data.valid")


def _size(recipe: Recipe) -> None:
    """Refuse a text that fills no row, however it is encoded; what only its tokens show is refused when it is read."""
    config, row = recipe.data, recipe.data.length or (0 if recipe.start else recipe.model.context)
    try:
        found = [] if config.paired else files(config.paths)
    except DataError:
        return  # said for each of the files
    if not found or any(path.suffix.lower() in COMPRESSED for path in found):
        return
    size = total_bytes(found)
    most = size * (2 if isinstance(recipe.tokenizer, Bytes | Bpe | Chars | Words) else _TOKENS_PER_BYTE)
    if most < row // 2:  # an objective may cut rows that are shorter than the context, but not by half
        raise ConfigError(
            f"data.paths: the training text has {size:,} bytes, less than one row of {row:,} tokens; name more text, "
            "or set a smaller data.length"
        )


def _weights(config: DataConfig) -> None:
    if config.weights and len(config.weights) != len(config.paths):
        count = f"{len(config.weights)} weights for {len(config.paths)} sources"
        raise ConfigError(f"data.weights: {count}; give one for each")


def _objective(recipe: Recipe) -> None:
    """What an objective asks of its model; one from outside the package may ask for nothing."""
    check = getattr(recipe.objective, "check", None)
    if check is not None and not recipe.start:  # which decides what the model is
        length = recipe.data.length
        check(replace(recipe.model, context=length) if length else recipe.model)


def _tokenizer(options: Any) -> None:
    if isinstance(options, File):
        if not options.path:
            raise ConfigError("tokenizer.path: names no file; give a tokenizer.json or a folder that holds one")
        try:
            open_tokenizer(Path(options.path))
        except UserError as error:
            raise ConfigError(f"tokenizer.path: {error}") from None


def check_form(recipe: Recipe, *, pairs: bool) -> None:
    """Refuse pairs without an objective that reads them, and an objective or a batch of pairs without pairs."""
    errors: list[str] = []
    asks = isinstance(recipe.objective, Seq2Seq)
    if pairs and not asks:
        errors.append("objective: pairs are learned with objective=seq2seq; set it, or name text in data.paths")
    if asks and not pairs:
        errors.append("data: objective=seq2seq learns from pairs; set data.source and data.target, or data.pairs")
    if recipe.data.pack and not pairs:
        errors.append("data.pack: text fills its rows anyway, only pairs are packed; leave it out")
    if recipe.data.pack and recipe.batch.tokens:
        errors.append("batch.tokens: packed pairs fill rows of one length; set batch.rows instead")
    elif recipe.batch.tokens and not pairs:
        errors.append("batch.tokens: rows of text are all of one length; set batch.rows instead")
    framed = isinstance(recipe.objective, Masked) and recipe.objective.frame == "pair"
    if recipe.data.shift != "none" and (pairs or framed):
        errors.append("data.shift: only rows that are cut from a text one after another can be; leave it out")
    if errors:
        raise ConfigError(*errors)
