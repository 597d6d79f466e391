"""Whether a run fits the memory of its machine, asked before anything is allocated."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from trivium.errors import ConfigError
from trivium.models.config import ModelConfig
from trivium.models.presets import PRESETS
from trivium.objectives.options import Denoise
from trivium.optim.options import Ema
from trivium.planner.memory import FLOAT, Memory, free_memory, gigabytes, training_memory
from trivium.training.recipe import Recipe

_PROCESS = 500_000_000  # bytes of a process beside its model: 0.3 GB by bench/memory.py
_SURE = 0.6  # of the free memory of a GPU: six workloads of bench/ took 0.9 to 1.1 of their estimates (docs/results.md)


def memory_of(recipe: Recipe, model: ModelConfig, rows: int, length: int = 0) -> Memory:
    """The least memory of training a model with the settings of a recipe, `rows` rows (or tokens) at a time."""
    averaged = 1.0 if isinstance(recipe.average, Ema) else 0.0
    # on a CPU attention and the residual stream are float32 in any precision, and bf16 copies of the weights
    # are kept for the backward pass
    cpu, narrow = recipe.device.startswith("cpu"), recipe.precision != "fp32"
    return training_memory(
        model,
        tokens=rows if recipe.batch.tokens else rows * min(length or model.context, model.context),
        states=recipe.optim.states + averaged,
        element=FLOAT // 2 if narrow and not cpu else FLOAT,
        copies=0.5 if narrow and cpu else 0.0,
        recompute=recipe.recompute == "blocks",
        length=length,
        target=_target(recipe),
    )


def _target(recipe: Recipe) -> float:
    """The tokens of a target for each of its source: of spans that were cut out, with a sentinel for each."""
    noise = recipe.objective
    if not isinstance(noise, Denoise):
        return 1.0
    share = noise.density * (1 + 1 / noise.mean_span) if noise.noise == "span" else 2 * noise.density
    return min(1.0, share / (1 - noise.density))


def temporary(model: ModelConfig) -> float:
    """How many times the estimated activations a step takes on a CPU at most, the temporaries of one layer included.

    bench/memory.py finds 0.98 to 1.21 for presets of 12 layers and more, and 1.33 for two layers.
    """
    return 1.25 + 1 / max(1, model.layers)


def fitted(recipe: Recipe, *, length: int = 0, say: Callable[[str], None], free: int | None = None) -> Recipe:
    """The recipe with as many rows at a time as fit the memory of a CPU; what cannot fit is refused.

    Rows have `length` tokens. On a GPU a step is tried instead, so only what does not depend on rows is looked at.
    """
    free = free_memory(recipe.device) if free is None else free
    one = require_fit(recipe, length=length, free=free)
    if not free or recipe.memory == "try" or not recipe.device.startswith("cpu"):
        return recipe
    room = free - _PROCESS - one.fixed
    able = max(1, int(room / temporary(recipe.model) / max(1, one.activations)))
    if recipe.micro <= able or (
        recipe.batch.micro and room < one.activations
    ):  # one row may just fit, so all are tried
        return recipe
    needed = gigabytes(memory_of(recipe, recipe.model, recipe.micro, length).total)
    what = f"{recipe.micro} {recipe.batch.unit} at a time need about {needed}, and {gigabytes(free)} are free"
    if recipe.batch.micro:
        raise ConfigError(f"batch.micro: {what}; set batch.micro={able}, or memory=try to try it all the same")
    say(f"{what}: batch.micro is {able}")
    return replace(recipe, batch=replace(recipe.batch, micro=able))


def require_fit(recipe: Recipe, *, length: int = 0, free: int | None = None) -> Memory:
    """Refuse what cannot fit whatever the number of rows at a time; the memory of a single row."""
    free = free_memory(recipe.device) if free is None else free
    one = memory_of(recipe, recipe.model, 1, length)
    least = one.total if recipe.device.startswith("cpu") else one.fixed
    if free and recipe.memory == "check" and least > free:
        raise ConfigError(_too_large(recipe, one, free))
    return one


def surely_fits(recipe: Recipe, length: int, free: int | None = None) -> bool:
    """Whether a step takes so little of a GPU's memory that it need not be tried: that compiles it once more."""
    free = free_memory(recipe.device) if free is None else free
    return memory_of(recipe, recipe.model, recipe.micro, length).total < _SURE * free


def _too_large(recipe: Recipe, needed: Memory, free: int) -> str:
    """The sentence for a model that cannot be trained here, with the largest preset that can."""
    family = recipe.model.family
    sizes: list[tuple[int, str]] = []
    for name, make in PRESETS.items():
        model = make()
        if model.family == family:
            model = model if model.vocab else replace(model, vocab=recipe.model.vocab)
            memory = memory_of(recipe, model, 1)
            if memory.fixed + memory.activations * temporary(model) + _PROCESS < free:
                sizes.append((memory.total, name))
    largest = max(sizes, default=(0, ""))[1]
    advice = f"the largest preset of this family that fits is {largest}" if largest else "no preset of this family fits"
    return (
        f"model: training {recipe.model.parameters():,} parameters needs at least {needed}, and {gigabytes(free)} are "
        f"free; {advice}, and memory=try tries it all the same"
    )
