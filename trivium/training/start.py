"""Beginning with another model's weights: new data, schedule and budget, the same architecture and tokenizer.

The optimizer decides which weights: a fresh one begins with those for use, averaged where the start kept an average; a
kept one with the raw weights that its moments belong to. An objective that needs special tokens which the start has not
adds them, with new rows; nothing else may differ. A published model (a Hugging Face folder, a GGUF or llama2.c file)
is a start as it is.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from trivium import config as settings
from trivium.checkpoints import bundle, format
from trivium.checkpoints.card import card
from trivium.checkpoints.manifest import MANIFEST, Manifest
from trivium.checkpoints.model_files import TOKENIZER as TOKENIZER_FILE
from trivium.checkpoints.model_files import WEIGHTS, has_model, home_of
from trivium.checkpoints.store import Store
from trivium.errors import CheckpointError, ConfigError, shown
from trivium.files import read_inside
from trivium.interop.foreign import Foreign
from trivium.interop.load import is_foreign, open_foreign
from trivium.models.config import ModelConfig
from trivium.models.transformer import empty, load_weights, weights
from trivium.models.vocabulary import extend
from trivium.objectives.options import OBJECTIVES
from trivium.optim.options import OPTIMIZERS
from trivium.parts.options.output import NoOutputOptions
from trivium.text.kinds import File
from trivium.text.tokenizer import Tokenizer, open_tokenizer
from trivium.training.job import Job
from trivium.training.recipe import MODEL, TOKENIZER, Recipe

NOTES = "start.json"  # in a run's folder: what the finished model keeps of the one that it began with
_LARGEST = 1 << 20  # bytes of that file


class Origin(NamedTuple):
    """Where weights come from: a checkpoint, a saved or a published model, and the folder that describes it."""

    path: Path
    home: Path
    settings: Mapping[str, Any]  # `model`, and `optim` where a run wrote it
    notes: Mapping[str, Any] = {}
    published: Foreign | None = None

    def tokenizer(self) -> Tokenizer:
        """The tokenizer whose ids the weights know."""
        if self.published is None:
            return open_tokenizer(self.home / bundle.TOKENIZER)
        if self.published.tokenizer is None:
            raise ConfigError(f"start: {self.path} brings no tokenizer, so no text can be read for it; add its files")
        return self.published.tokenizer


def taken_over(recipe: Recipe, *, parts: Sequence[type[Any]] = (), say: Callable[[str], None]) -> Recipe:
    """The recipe with what it takes over from its start: a definite checkpoint, the model and the tokenizer."""
    if not recipe.start:
        return recipe
    origin = _find(Path(recipe.start).absolute(), keep=recipe.start_optimizer == "keep", say=say)
    try:
        model = settings.load(ModelConfig, origin.settings.get("model", {}), parts=parts)
    except ConfigError as error:
        raise CheckpointError(f"{origin.home} cannot be opened: {error.sentence}") from None
    # a written recipe names the vocabulary that the model grew to; whether it has to is seen with the tokenizer
    grown = replace(model, vocab=max(model.vocab, recipe.model.vocab))
    given = MODEL if recipe.model == MODEL else replace(recipe.model, vocab=recipe.model.vocab or model.vocab)
    if given not in (MODEL, grown):
        raise ConfigError(f"model: it is not that of {origin.home} ({_difference(model, given)}); leave model out")
    if isinstance(model.output, NoOutputOptions):
        raise ConfigError(
            f"start: {origin.home} has no output over its vocabulary, so objective="
            f"{settings.kind_of(recipe.objective, OBJECTIVES)} cannot train it; name a model that has one"
        )
    origin.tokenizer()
    if recipe.start_optimizer == "keep":
        _check_optimizer(recipe, origin)
    _verify(origin.path)
    tokenizer = recipe.tokenizer
    if tokenizer == TOKENIZER:
        own = origin.home if origin.published else home_of(origin.home, TOKENIZER_FILE) / TOKENIZER_FILE
        tokenizer = File(path=str(own))
    say(f"begins with the weights in {origin.path}")
    return replace(recipe, start=str(origin.path), model=grown, tokenizer=tokenizer)


def known_tokenizer(recipe: Recipe) -> Tokenizer | None:
    """The tokenizer of a published start, if the recipe takes it over: its file is none of ours."""
    if not recipe.start or recipe.tokenizer != File(path=recipe.start):
        return None
    return _described(Path(recipe.start)).tokenizer()


def notes(recipe: Recipe) -> dict[str, Any]:
    """What a model that goes on from the recipe's start keeps of it: how to talk to it, and what its ids mean."""
    if not recipe.start:
        return {}
    found = _described(Path(recipe.start)).notes
    return {name: found[name] for name in ("chat_template", "ids", "labels", "sentences") if name in found}


def saved_notes(folder: Path) -> dict[str, Any]:
    """The `notes` that a run saved when it was created; none if its file cannot be read."""
    try:
        found = json.loads(read_inside(folder, NOTES, _LARGEST))
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def with_specials(recipe: Recipe, tokenizer: Tokenizer, *, say: Callable[[str], None]) -> Recipe:
    """The recipe with room for the special tokens that the objective adds to the start's tokenizer.

    Text that is encoded with any other ids than those that the start's weights know is refused.
    """
    if not recipe.start:
        return recipe
    origin = _described(Path(recipe.start))
    known = origin.tokenizer()
    if tokenizer.digest not in (known.digest, known.extended(recipe.objective.specials).digest):
        raise ConfigError(
            f"tokenizer: it is not that of {origin.home}; leave tokenizer out, or build the shards with it"
        )
    before = int(origin.settings["model"].get("vocab", 0))
    after = max(before, tokenizer.size)
    if recipe.model.vocab not in (before, after):
        raise ConfigError(f"model.vocab: it is {before} in {origin.home}, not {recipe.model.vocab}; leave model out")
    if after > before and recipe.start_optimizer == "keep":
        raise ConfigError(
            f"start_optimizer: the objective needs special tokens that the optimizer in {origin.home} knows nothing "
            "of; set start_optimizer=fresh"
        )
    if tokenizer.size > known.size:
        new = [spelling for spelling in recipe.objective.specials if spelling not in known.specials]
        names = new[0] if len(new) == 1 else f"{new[0]} to {new[-1]}"
        rows = "it has rows for them" if after == before else f"the model grows from {before} to {after} ids"
        say(f"the objective needs {len(new)} special token(s) that {origin.home} has not ({names}): {rows}")
    return replace(recipe, model=replace(recipe.model, vocab=after))


def begin(job: Job) -> None:
    """Fill a job at step 0 with the weights of its recipe's start, if it has one."""
    if not job.recipe.start:
        return
    path, keep = Path(job.recipe.start), job.recipe.start_optimizer == "keep"
    if _is_published(path):
        tensors = weights(open_foreign(path, say=_silent, tick=_silent).module)
    elif (manifest := _verify(path)) is None:
        tensors = format.read_tensors(home_of(path, WEIGHTS) / WEIGHTS)
    else:
        tensors = format.tensors(path, "model") if keep else bundle.weights_in(path, manifest)
    try:
        load_weights(job.model, _grown(job.model.config, tensors, job.recipe.seed))
    except ConfigError as error:
        raise CheckpointError(f"{path} does not fit: {error.sentence}") from None
    if keep:
        job.optimizer.load(format.tensors(path, "optimizer"))
    job.average.reset()


def _grown(config: ModelConfig, tensors: dict[str, Tensor], seed: int) -> dict[str, Tensor]:
    """The weights with new rows, drawn from `seed`, for ids that the start has not."""
    embedding = tensors.get("embedding.weight")
    if embedding is None or len(embedding) >= config.vocab:
        return tensors
    small = empty(replace(config, vocab=len(embedding)))
    load_weights(small, tensors)
    return weights(extend(small, config.vocab, seed=seed))


def _verify(path: Path) -> Manifest | None:
    """Refuse a checkpoint or a saved model that is not as it was written; only a checkpoint has a manifest.

    Both keep their weights in one file of the same name.
    """
    if (path / MANIFEST).is_file():
        return format.verify(path)
    if _is_published(path):
        return None  # every shape was checked when it was described
    bundle.checked_weights(path, card(path))
    return None


def _find(path: Path, *, keep: bool, say: Callable[[str], None]) -> Origin:
    """What `start` names, with the newest checkpoint of a run made definite."""
    if (path / MANIFEST).is_file() or (has_model(path) and not keep):
        return _described(path)
    if _is_published(path) and not keep:
        return _described(path, say)
    if not (path / "config.toml").is_file():
        what = "keeps no optimizer; set start_optimizer=fresh" if keep and path.exists() else "is not one"
        raise ConfigError(f"start: name a run, a checkpoint in it, a saved or a published model; {path} {what}")
    newest = Store(path / "checkpoints").newest(say=say)
    if newest is None:
        raise CheckpointError(f"start: {path} has no checkpoint yet; go on with `trivium train {path}` first")
    return _described(newest.path)


def _silent(*_: object) -> None:
    """Nobody watches."""


def _is_published(path: Path) -> bool:
    """Whether a start is a model of another program."""
    own = (MANIFEST, bundle.CARD, "config.toml")
    return is_foreign(path) and not any((path / name).is_file() for name in own)


def _described(path: Path, say: Callable[[str], None] = _silent) -> Origin:
    """A checkpoint, a saved or a published model with what its folder says of it."""
    if _is_published(path):
        found = open_foreign(path, say=say, tick=_silent, fill=False)
        return Origin(path, path, {"model": settings.dump(found.module.config)}, found.notes, found)
    if not (path / MANIFEST).is_file():
        facts = card(path)
        if "bits" in facts:
            raise ConfigError(
                f"start: the weights of {path} have {facts['bits']} bits, which cannot be trained; name the model that "
                "it was made from"
            )
        return Origin(path, path, {"model": facts["config"]}, facts["notes"])
    home = path.parent.parent  # RUN/checkpoints/step-N
    if not (home / "config.toml").is_file():
        raise ConfigError(f"start: {path} lies in no run; name a checkpoint where its run wrote it")
    return Origin(path, home, settings.read_of(home))


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
    one, other = (shown(found[key]) if key in found else "nothing" for found in (there, here))
    return f"model.{key} is {one} there and {other} here"
