"""The object `m` and the functions of `import trivium as tv`."""

from __future__ import annotations

import sys
from collections.abc import Generator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trivium import config as settings
from trivium.checkpoints import bundle, format
from trivium.checkpoints.store import Store
from trivium.errors import CheckpointError, RequestError
from trivium.evaluation.likelihood import Score, score_text
from trivium.generation.sampling import Sampling
from trivium.generation.text import Completion, complete, stream_text
from trivium.models.config import ModelConfig
from trivium.models.presets import PRESETS
from trivium.models.transformer import Transformer, arrange, weights
from trivium.models.transformer import build as build_module
from trivium.text.tokenizer import Tokenizer, open_tokenizer
from trivium.training import metrics
from trivium.training.device import choose
from trivium.training.events import line
from trivium.training.recipe import Recipe
from trivium.training.run import RUNS, is_run, open_run, read_recipe

__all__ = [
    "Completion",
    "Model",
    "Recipe",
    "Run",
    "Score",
    "build",
    "load",
    "preset",
    "presets",
    "recipe",
    "show",
    "train",
]


def presets() -> list[str]:
    """The names of all presets."""
    return list(PRESETS)


def preset(name: str) -> ModelConfig:
    """The configuration of a named system."""
    if name not in PRESETS:
        raise settings.unknown("preset", name, PRESETS)
    return PRESETS[name]()


def build(config: ModelConfig | str, *, device: str = "cpu", seed: int = 0) -> Transformer:
    """A new module with weights drawn from `seed`; on the device "meta" it only has shapes."""
    return build_module(preset(config) if isinstance(config, str) else config, seed=seed, device=device)


class Model:
    """A model with its tokenizer, ready for use."""

    def __init__(self, module: Transformer, tokenizer: Tokenizer, notes: Mapping[str, Any]) -> None:
        self.module = module
        self.tokenizer = tokenizer
        self.notes = notes

    @property
    def config(self) -> ModelConfig:
        return self.module.config

    def logits(self, ids: Tensor | Sequence[Sequence[int]] | Sequence[int]) -> Tensor:
        """The scores [B, T, V] that follow each of the ids [B, T]; a single row may leave out the batch."""
        try:
            tokens = torch.as_tensor(ids, device=self.module.device)
        except (ValueError, TypeError):
            raise RequestError("logits takes rows of ids that are equally long; pad them or ask one by one") from None
        single = tokens.ndim == 1
        if not tokens.numel() or tokens.is_floating_point() or tokens.ndim > 2:
            raise RequestError("logits takes ids as whole numbers, [T] or [B, T], at least one")
        if not 0 <= int(tokens.min()) <= int(tokens.max()) < self.config.vocab:
            raise RequestError(f"an id is outside the model's vocabulary of {self.config.vocab}")
        self.module.eval()
        with torch.inference_mode():
            hidden = self.module(tokens[None] if single else tokens).hidden
            result = self.module.head.logits(hidden)
        return result[0] if single else result

    def generate(
        self,
        prompt: str | Sequence[str],
        *,
        tokens: int = 100,
        temperature: float = 1.0,
        top_k: int = 0,
        top_p: float = 1.0,
        min_p: float = 0.0,
        repetition_penalty: float = 1.0,
        seed: int = 0,
        n: int = 1,
        stop: Sequence[str] = (),
        logprobs: int = 0,
        slide: bool = False,
    ) -> Any:
        """The continuation of a prompt: a string that also has `.ids`, `.reason` and `.logprobs`.

        With n > 1 a list of n; for a list of prompts a list with one entry per prompt. Temperature 0 is greedy.
        """
        sampling = _sampling(temperature, top_k, top_p, min_p, repetition_penalty)
        prompts = [prompt] if isinstance(prompt, str) else list(prompt)
        found = complete(
            self.module,
            self.tokenizer,
            prompts,
            tokens=tokens,
            sampling=sampling,
            seed=seed,
            n=n,
            stop=_strings(stop),
            logprobs=logprobs,
            slide=slide,
        )
        each: list[Any] = [samples if n > 1 else samples[0] for samples in found]
        return each[0] if isinstance(prompt, str) else each

    def stream(
        self,
        prompt: str,
        *,
        tokens: int = 100,
        temperature: float = 1.0,
        top_k: int = 0,
        top_p: float = 1.0,
        min_p: float = 0.0,
        repetition_penalty: float = 1.0,
        seed: int = 0,
        stop: Sequence[str] = (),
        slide: bool = False,
    ) -> Generator[str, None, Completion]:
        """The same continuation piece by piece, never half a character."""
        return stream_text(
            self.module,
            self.tokenizer,
            prompt,
            tokens=tokens,
            sampling=_sampling(temperature, top_k, top_p, min_p, repetition_penalty),
            seed=seed,
            stop=_strings(stop),
            slide=slide,
        )

    def score(self, text: str, *, stride: int = 0) -> Score:
        """How probable the text is: `.nll`, `.perplexity`, `.bits_per_byte`, every token scored once."""
        return score_text(self.module, self.tokenizer, text, stride=stride)

    def save(self, folder: str | Path) -> Path:
        """Write `model.safetensors`, `model.json` and `tokenizer.json`; `tv.load` opens the folder again."""
        path = Path(folder)
        if path.is_file():
            raise RequestError(f"{path} is a file; name a folder to save the model in")
        bundle.save(path, self.config, weights(self.module), self.tokenizer, self.notes)
        return path


def load(path: str | Path, *, device: str = "auto", parts: Sequence[type[Any]] = ()) -> Model:
    """The model in a run's folder (or one written by `m.save`); an unfinished run gives its newest checkpoint."""
    folder = Path(path)
    if not folder.exists():
        raise CheckpointError(f"{folder} does not exist; `trivium runs` lists what is here")
    if (folder / bundle.CARD).is_file():
        found = bundle.open_bundle(folder, parts=parts)
        module, tokenizer, notes = found
    elif is_run(folder):
        module, tokenizer, notes = _unfinished(folder, parts)
    else:
        raise CheckpointError(f"{folder} holds neither a model nor a run; name a folder with model.json or config.toml")
    where = choose(device)
    module.to(where)
    if where.type == "cpu":
        arrange(module)
    return Model(module, tokenizer, notes)


def _unfinished(folder: Path, parts: Sequence[type[Any]]) -> tuple[Transformer, Tokenizer, Mapping[str, Any]]:
    store = Store(folder / "checkpoints")
    newest = store.newest(say=lambda text: print(text, file=sys.stderr))
    if newest is None:
        raise CheckpointError(f"{folder} has no checkpoint yet; go on with `trivium train {folder}`")
    table = settings.read(folder / "config.toml").get("model", {})
    module = bundle.model_from(table, format.tensors(newest.path, "model"), str(folder), parts)
    return module, open_tokenizer(folder / "tokenizer.json"), {"run": folder.name, "step": newest.step}


class Run:
    """A finished run: where it is, what it measured, and its model."""

    def __init__(self, path: Path, parts: Sequence[type[Any]] = ()) -> None:
        self.path = path
        self._parts = parts

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """Every line of metrics.jsonl."""
        return metrics.rows(self.path / "metrics.jsonl")

    @property
    def best(self) -> dict[str, Any] | None:
        """The validation with the lowest loss."""
        scored = [row for row in self.metrics if row.get("kind") == "valid" and isinstance(row["loss"], float)]
        return min(scored, key=lambda row: float(row["loss"]), default=None)

    @property
    def model(self) -> Model:
        """The trained model."""
        return load(self.path, parts=self._parts)


def recipe(source: str | Path, overrides: Mapping[str, Any] | None = None) -> Recipe:
    """The recipe in a TOML file, checked, with dotted overrides laid over it."""
    return read_recipe(Path(source), settings.overrides(overrides or {}))


def train(
    source: Recipe | str | Path,
    overrides: Mapping[str, Any] | None = None,
    *,
    runs: str | Path = RUNS,
    parts: Sequence[type[Any]] = (),
    quiet: bool = False,
) -> Run:
    """Train from a recipe, its file, or (to go on) a run's folder; progress goes to standard error."""

    def say(text: str) -> None:
        if not quiet:
            print(text, file=sys.stderr)

    session = open_run(
        source if isinstance(source, Recipe) else Path(source),
        settings.overrides(overrides or {}),
        runs=Path(runs),
        parts=parts,
        say=say,
        tick=lambda what, at, of: None,
    )
    for event in session.events():
        text = line(event)
        if text:
            say(text)
    return Run(session.folder, parts)


def show(folder: str | Path, *, parts: Sequence[type[Any]] = ()) -> dict[str, Any]:
    """What a run or a saved model says of itself, as plain values."""
    path = Path(folder)
    if not (is_run(path) or (path / bundle.CARD).is_file()):
        raise CheckpointError(f"{path} holds neither a model nor a run; `trivium runs` lists what is here")
    run = Run(path)
    steps = [row["step"] for row in run.metrics if row.get("kind") == "train"]
    card = bundle.card(path / bundle.CARD) if (path / bundle.CARD).is_file() else {}
    table = card.get("config") or settings.read(path / "config.toml").get("model", {})
    config = settings.load(ModelConfig, table, parts=parts)
    tests = [row for row in run.metrics if row.get("kind") == "test"]
    return {
        "path": str(path),
        "state": "finished" if card else "unfinished",
        "family": config.family,
        "parameters": config.parameters(),
        "step": steps[-1] if steps else 0,
        "best": run.best,
        "test": tests[-1] if tests else None,
        "notes": card.get("notes", {}),
    }


def _sampling(temperature: float, top_k: int, top_p: float, min_p: float, penalty: float) -> Sampling:
    return Sampling(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, repetition_penalty=penalty)


def _strings(stop: Sequence[str] | str) -> Sequence[str]:
    return [stop] if isinstance(stop, str) else stop
