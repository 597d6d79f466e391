"""Beginning with another model's weights: new data, schedule and budget, the same architecture and tokenizer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from trivium import config as settings
from trivium.checkpoints import bundle, format
from trivium.checkpoints.store import Store
from trivium.errors import CheckpointError, ConfigError
from trivium.files import sha256
from trivium.models.config import ModelConfig
from trivium.models.transformer import load_weights
from trivium.optim.optimizers import OPTIMIZERS
from trivium.text.kinds import File
from trivium.text.tokenizer import Tokenizer, open_tokenizer
from trivium.training.job import Job
from trivium.training.recipe import MODEL, TOKENIZER, Recipe


class Origin(NamedTuple):
    """Where weights come from: a checkpoint or a saved model, and the folder that describes it."""

    path: Path
    home: Path
    settings: Mapping[str, Any]  # `model`, and `optim` where a run wrote it


def taken_over(recipe: Recipe, *, say: Callable[[str], None]) -> Recipe:
    """The recipe with what it takes over from its start: a definite checkpoint, the model and the tokenizer."""
    if not recipe.start:
        return recipe
    origin = _find(Path(recipe.start).absolute(), keep=recipe.start_optimizer == "keep", say=say)
    try:
        model = settings.load(ModelConfig, origin.settings.get("model", {}))
    except ConfigError as error:
        raise CheckpointError(f"{origin.home} cannot be opened: {error}") from None
    given = MODEL if recipe.model == MODEL else replace(recipe.model, vocab=recipe.model.vocab or model.vocab)
    if given not in (MODEL, model):
        raise ConfigError(f"model: it is not that of {origin.home} ({_difference(model, given)}); leave model out")
    if recipe.start_optimizer == "keep":
        _check_optimizer(recipe, origin)
    _verify(origin.path)
    tokenizer = recipe.tokenizer
    if tokenizer == TOKENIZER:
        tokenizer = File(path=str(origin.home / bundle.TOKENIZER))
    say(f"begins with the weights in {origin.path}")
    return replace(recipe, start=str(origin.path), model=model, tokenizer=tokenizer)


def check_tokenizer(recipe: Recipe, tokenizer: Tokenizer) -> None:
    """Refuse text that is encoded with other ids than those that the start's weights know."""
    if not recipe.start:
        return
    home = _home(Path(recipe.start))
    known = open_tokenizer(home / bundle.TOKENIZER)
    if known.digest == tokenizer.digest:
        return
    missing = [spelling for spelling in recipe.objective.specials if spelling not in known.specials]
    if missing:
        raise ConfigError(f"objective: it needs the special token {missing[0]}, which the model in {home} has not")
    raise ConfigError(f"tokenizer: it is not that of {home}; leave tokenizer out, or build the shards with it")


def begin(job: Job) -> None:
    """Fill a job at step 0 with the weights of its recipe's start, if it has one."""
    if not job.recipe.start:
        return
    path = Path(job.recipe.start)
    _verify(path)
    try:
        load_weights(job.model, format.tensors(path, "model"))
    except ConfigError as error:
        raise CheckpointError(f"{path} does not fit: {error}") from None
    if job.recipe.start_optimizer == "keep":
        job.optimizer.load(format.tensors(path, "optimizer"))
    job.average.reset()


def _verify(path: Path) -> None:
    """Refuse a checkpoint or a saved model that is not as it was written; both keep their weights in one file."""
    if (path / format.MANIFEST).is_file():
        format.verify(path)
        return
    weights, facts = path / bundle.WEIGHTS, bundle.card(path / bundle.CARD)
    if not weights.is_file() or sha256(weights) != facts["weights"]:
        raise CheckpointError(f"{weights} is missing or damaged; restore it from a copy")


def _find(path: Path, *, keep: bool, say: Callable[[str], None]) -> Origin:
    """What `start` names, with the newest checkpoint of a run made definite."""
    if (path / format.MANIFEST).is_file():
        home = _home(path)
        return Origin(path, home, settings.read(home / "config.toml"))
    if (path / bundle.CARD).is_file() and not keep:
        return Origin(path, path, {"model": bundle.card(path / bundle.CARD)["config"]})
    if not (path / "config.toml").is_file():
        what = "keeps no optimizer; set start_optimizer=fresh" if keep and path.is_dir() else "is not one"
        raise ConfigError(f"start: name a run, a checkpoint in it or a saved model; {path} {what}")
    newest = Store(path / "checkpoints").newest(say=say)
    if newest is None:
        raise CheckpointError(f"start: {path} has no checkpoint yet; go on with `trivium train {path}` first")
    return Origin(newest.path, path, settings.read(path / "config.toml"))


def _home(path: Path) -> Path:
    """The folder that describes a checkpoint or a saved model."""
    if not (path / format.MANIFEST).is_file():
        return path
    home = path.parent.parent  # RUN/checkpoints/step-N
    if not (home / "config.toml").is_file():
        raise ConfigError(f"start: {path} lies in no run; name a checkpoint where its run wrote it")
    return home


def _check_optimizer(recipe: Recipe, origin: Origin) -> None:
    kind = settings.kind_of(recipe.optim, OPTIMIZERS)
    there = origin.settings.get("optim", {}).get("kind")
    if kind != there:
        raise ConfigError(
            f"start_optimizer: {origin.home} was trained with optim={there}, not {kind}; "
            f"set optim={there} or start_optimizer=fresh"
        )


def _difference(model: ModelConfig, given: ModelConfig) -> str:
    there, here = settings.flat(model), settings.flat(given)
    key = next(key for key in [*there, *here] if there.get(key) != here.get(key))
    return f"{key} is {there.get(key)!r} there and {here.get(key)!r} here"
