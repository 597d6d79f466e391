"""The functions of `import trivium as tv`: how the object `m` is built, trained, loaded and shown."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from trivium import config as settings
from trivium import records, threads
from trivium.checkpoints import bundle, format
from trivium.checkpoints.format import Stored
from trivium.checkpoints.manifest import MANIFEST
from trivium.checkpoints.model_files import has_model, require_there
from trivium.checkpoints.store import Store
from trivium.errors import CheckpointError, ConfigError, RequestError, shown, with_file_errors
from trivium.evaluation.likelihood import Score
from trivium.fast.choose import for_inference
from trivium.files import as_path
from trivium.generation.classify import Verdict
from trivium.generation.embed import Neighbour, neighbours
from trivium.generation.fill import Filling
from trivium.generation.text import Completion
from trivium.generation.translation import Hypothesis
from trivium.handle import Model, printed
from trivium.interop import quantize
from trivium.interop.foreign import Say, Tick
from trivium.interop.load import open_foreign
from trivium.models.config import ModelConfig
from trivium.models.presets import PRESETS
from trivium.models.transformer import Lay, Transformer, weights
from trivium.models.transformer import build as build_module
from trivium.overview import show
from trivium.planner.memory import enough_for, model_memory, require_memory
from trivium.text.missing import MissingTokenizer
from trivium.text.tokenizer import open_tokenizer
from trivium.training import metrics
from trivium.training.checks import TAKEN
from trivium.training.device import choose
from trivium.training.events import Opened, line
from trivium.training.recipe import TOKENIZER, Recipe
from trivium.training.recipes import RUNS, is_run, read_recipe
from trivium.training.run import Exists, train_run

__all__ = [
    "Completion",
    "Filling",
    "Hypothesis",
    "Model",
    "Neighbour",
    "Recipe",
    "Run",
    "Score",
    "Verdict",
    "build",
    "load",
    "neighbours",
    "preset",
    "presets",
    "recipe",
    "show",
    "train",
]


Memory = Literal["check", "try"]


def presets() -> list[str]:
    """The names of all presets."""
    return list(PRESETS)


def preset(name: str) -> ModelConfig:
    """The configuration of a named system."""
    if not isinstance(name, str) or name not in PRESETS:
        raise settings.unknown("preset", name, PRESETS)
    return PRESETS[name]()


def build(
    config: ModelConfig | str,
    *,
    vocab: int = 0,
    device: str = "cpu",
    seed: int = 0,
    memory: Memory = "check",
    overrides: Mapping[str, Any] | None = None,
    **more: Any,
) -> Transformer:
    """A new module with weights drawn from `seed`; on the device "meta" it only has shapes.

    `vocab` is for a configuration that leaves its vocabulary open, as gpt-mini does; 0 is the size of the default
    tokenizer. Other settings of the model go by their names: `tv.build("gpt-mini", width=64, overrides=
    {"decoder.layers": 2})`. A model that is larger than the memory that is free is refused unless `memory` is "try".
    """
    if not isinstance(config, ModelConfig | str):
        raise RequestError(f"config: {shown(config)} is neither a ModelConfig nor the name of a preset")
    if type(seed) is not int or not 0 <= seed < 2**63:
        raise RequestError(f"seed: {shown(seed)} is not a whole number from 0 up to 2**63")
    _require_known(memory)
    if overrides is not None and not isinstance(overrides, Mapping):
        raise RequestError(f'overrides: expects a mapping such as {{"decoder.layers": 2}}, not {shown(overrides)}')
    layer = settings.overrides({**(overrides or {}), **more, **({"vocab": vocab} if vocab else {})})
    base = preset(config) if isinstance(config, str) else config
    model = settings.load(ModelConfig, layer, start=base) if layer else base
    model = model if model.vocab else replace(model, vocab=TOKENIZER.size)
    where = torch.device("meta") if isinstance(device, str) and device == "meta" else choose(device)
    name = config if isinstance(config, str) else f"a model of {model.parameters():,} parameters"
    if memory == "check" and where.type != "meta":
        require_memory(model_memory(model), str(where), name)
    with enough_for(name, str(where)):
        return build_module(model, seed=seed, device=where)


def _require_known(memory: object) -> None:
    if not isinstance(memory, str) or memory not in ("check", "try"):
        raise RequestError(f"memory: {shown(memory)} is neither check nor try")


@with_file_errors
def load(
    path: str | Path,
    *,
    device: str = "auto",
    average: int = 0,
    bits: int = 0,
    parts: Sequence[type[Any]] = (),
    memory: Memory = "check",
    fast: Literal["on", "off"] = "on",
    say: Say | None = None,
    tick: Tick = lambda what, done, of: None,
) -> Model:
    """The model in a run's folder (or one written by `m.save`); an unfinished run gives its newest checkpoint.

    `RUN/checkpoints/step-N` opens that checkpoint. A folder of Hugging Face, a .gguf file or a llama2.c .bin file opens
    too; `say` receives the names of settings that were not read. `average` = k gives the mean of the weights of the
    run's newest k checkpoints instead; `bits` = 8 or 4 quantises the weights. Weights that are larger than the memory
    that is free are refused unless `memory` is "try". With `fast` = "off" every module computes its plain formula.
    """
    folder, told = as_path(path), say or printed
    require_there(folder)
    if type(average) is not int or average < 0:
        raise RequestError(f"average: {shown(average)} is not a number of checkpoints; 0 loads the model as it is")
    if type(bits) is not int or bits not in (0, 4, 8):
        raise RequestError(f"bits: weights can have 8 or 4 bits, not {shown(bits)}; 0 keeps them as they are")
    _require_known(memory)
    target = choose(device)
    if target.type == "cpu" and (busy := threads.advice()):
        told(busy)
    if not isinstance(fast, str) or fast not in ("on", "off"):
        raise RequestError(f"fast: {shown(fast)} is neither on nor off")

    def lay(module: nn.Module) -> None:
        module.to(target)
        if fast == "on":
            for_inference(module)

    def require(size: int) -> None:
        if memory == "check":
            require_memory(size, str(target), str(folder))

    def first(module: nn.Module) -> None:
        """Before a model is filled: its memory is not touched yet."""
        require(sum(tensor.nbytes for tensor in weights(module).values()))
        if not bits:  # what has levels is laid out when it has them
            lay(module)

    with enough_for(str(folder), str(target)):
        module, tokenizer, notes = _opened(folder, average, parts, require, first, told, tick)
    if bits:
        quantize.quantize(module, bits, tick=tick)
        lay(module)
    return Model(module, tokenizer, notes)


def _opened(
    folder: Path,
    average: int,
    parts: Sequence[type[Any]],
    require: Callable[[int], None],
    lay: Lay,
    say: Say,
    tick: Tick,
) -> bundle.Bundle:
    """What lies at a path, whoever wrote it; `require` hears early how many bytes the weights of our own have."""
    if (run := records.run_of(folder)) is not None:
        if average:
            raise CheckpointError(f"{folder} is one checkpoint; name its run {run} to average the newest")
        return _from_checkpoint(run, folder, parts, lay)
    if has_model(folder) and not average:
        return bundle.open_bundle(folder, parts=parts, require=require, lay=lay, tick=tick)
    if is_run(folder):
        return _from_checkpoints(folder, average, parts, lay, say)
    if average:
        raise CheckpointError(f"{folder} is not a run: it has no checkpoints to average; load it without average")
    if folder.is_file() or (folder / "config.json").exists():
        foreign = open_foreign(folder, say=say, tick=tick, lay=lay)
        missing = MissingTokenizer(foreign.module.config.vocab, folder)
        return bundle.Bundle(foreign.module, foreign.tokenizer or missing, foreign.notes)
    if (folder / MANIFEST).is_file() and (folder / bundle.WEIGHTS).is_file():
        raise CheckpointError(f"{folder} is a checkpoint without its run; name it where it was: RUN/checkpoints/step-N")
    raise CheckpointError(
        f"{folder} holds neither a model nor a run; name a folder with model.json, config.toml or config.json"
    )


def _from_checkpoints(folder: Path, average: int, parts: Sequence[type[Any]], lay: Lay, say: Say) -> bundle.Bundle:
    store = Store(folder / "checkpoints")
    newest = store.newest(say=say)
    if newest is None:
        raise CheckpointError(f"{folder} has no checkpoint yet; go on with `trivium train {folder}`")
    if not average:
        return _from_checkpoint(folder, newest.path, parts, lay)
    tensors, steps = bundle.mean_weights(store, average, say=say)
    return _in_run(folder, tensors, {"step": newest.step, "average": steps}, parts, lay)


def _from_checkpoint(run: Path, path: Path, parts: Sequence[type[Any]], lay: Lay) -> bundle.Bundle:
    """The model of one checkpoint, with the configuration and the tokenizer of its run."""
    manifest = format.verify(path)
    return _in_run(run, bundle.stored_in(path, manifest), {"step": manifest.step}, parts, lay)


def _in_run(
    run: Path,
    tensors: Mapping[str, Tensor | Stored],
    notes: Mapping[str, Any],
    parts: Sequence[type[Any]],
    lay: Lay,
) -> bundle.Bundle:
    module = bundle.model_from(settings.read_of(run).get("model", {}), tensors, str(run), parts, lay)
    return bundle.Bundle(module, open_tokenizer(run), {"run": run.name, **notes})


class Run:
    """A finished run: where it is, what it measured, and its model."""

    def __init__(self, path: Path, parts: Sequence[type[Any]] = ()) -> None:
        self.path = path
        self._parts = parts

    def __repr__(self) -> str:
        steps, best = records.of_kind(self.metrics, "train"), self.best
        told = [f"{steps[-1]['step']:,} steps"] if steps else []
        found = records.score(best)
        told += [f"best validation {found[0]:.4f} {found[1]} at step {best['step']:,}"] if best and found else []
        return f"<Run {self.path}{': ' if told else ''}{', '.join(told)}>"

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """Every line of metrics.jsonl."""
        return metrics.rows(self.path / "metrics.jsonl")

    @property
    def best(self) -> dict[str, Any] | None:
        """The validation with the lowest loss."""
        return records.best(self.metrics)

    @property
    def model(self) -> Model:
        """The trained model."""
        return load(self.path, parts=self._parts)


@with_file_errors
def recipe(source: str | Path, overrides: Mapping[str, Any] | None = None) -> Recipe:
    """The recipe in a TOML file, checked, with dotted overrides laid over it."""
    return read_recipe(as_path(source), settings.overrides({} if overrides is None else overrides))


def _in_python(problem: str) -> str:
    """The sentence about a run that is there already, with what Python can do about it."""
    return f'{problem}; here exists="resume" goes on and exists="replace" begins anew' if TAKEN in problem else problem


@with_file_errors
def train(
    source: Recipe | str | Path,
    overrides: Mapping[str, Any] | None = None,
    *,
    runs: str | Path = RUNS,
    data_dir: str | Path | None = None,
    parts: Sequence[type[Any]] = (),
    exists: Exists = "refuse",
    quiet: bool = False,
) -> Run:
    """Train from a recipe, its file, or (to go on) a run's folder; progress goes to standard error.

    The recipe's relative paths of data are below `data_dir`, or else below the current folder. Where a run of that name
    `exists`, the call is refused; with "resume" that run goes on with the settings that it began with, and with
    "replace" the new one takes its place once it has been prepared. So a cell of a notebook can be run again.
    """
    if not isinstance(exists, str) or exists not in ("refuse", "resume", "replace"):
        raise RequestError(f"exists: {shown(exists)} is none of refuse, resume and replace")
    if isinstance(source, Mapping):
        raise RequestError(
            "source: give a recipe (its file, or tv.Recipe()) or a run's folder; settings are overrides="
        )
    if not isinstance(quiet, bool):
        raise RequestError(f"quiet: expects true or false, not {shown(quiet)}")
    parts = (*parts, *settings.outside(source if isinstance(source, Recipe) else None, overrides))
    say: Say = (lambda text: None) if quiet else printed
    events = train_run(
        source if isinstance(source, Recipe) else as_path(source),
        settings.overrides({} if overrides is None else overrides),
        runs=as_path(runs),
        data_dir=None if data_dir is None else as_path(data_dir),
        parts=parts,
        exists=exists,
        say=say,
        tick=lambda what, at, of: None,
        alert=say,
    )
    folder = Path()
    try:
        for event in events:
            if isinstance(event, Opened):
                folder = event.folder
                if event.recipe.device == "cpu" and (busy := threads.advice()):
                    say(busy)
            elif text := line(event):
                say(text)
    except ConfigError as error:
        if TAKEN not in error.sentence:
            raise
        raise ConfigError(*(_in_python(problem) for problem in error.problems)) from None
    return Run(folder, parts)
