"""From a run's context to its job: model, optimizer, data order and the functions that compute its losses."""

from __future__ import annotations

from dataclasses import replace

import torch

from trivium.data.bucketing import Pairs
from trivium.errors import CheckpointError
from trivium.fast.adam import with_bf16_copies
from trivium.fast.choose import FastOptions, for_training
from trivium.models.transformer import build
from trivium.training import start
from trivium.training.context import RunContext
from trivium.training.device import autocast
from trivium.training.forward import computation
from trivium.training.guards import FiniteGuard
from trivium.training.job import Job
from trivium.training.recipe import Recipe
from trivium.training.scaling import scaler
from trivium.training.timeline import Timeline

_OFTEN = 10  # batches an epoch: with fewer, the one that has the last row of the text is not seldom

# The host launches one kernel for each weight, in some 20 us. In a CUDA graph that is free, and behind the long step of
# a large model it does not show; a small one without a graph would wait for it.
LARGE = 100_000_000


def build_job(context: RunContext, total: int | Timeline, *, begin: bool = True) -> Job:
    """A job at step 0 with newly drawn weights, or with those that the recipe starts from.

    Without `begin` the caller loads a checkpoint next, and the recipe's start need not be there any more.
    """
    recipe = context.recipe
    device = torch.device(recipe.device)
    model = build(recipe.model, seed=recipe.seed, device=device)
    model.recompute = recipe.recompute == "blocks"
    model.residual_dtype = torch.bfloat16 if recipe.residual_dtype == "bf16" else None
    if recipe.fast == "on":
        for_training(model, FastOptions(fp8=recipe.precision == "fp8"))
    rows = context.train
    optimizer = recipe.optim.build(model)
    if uses_bf16_copies(recipe):
        optimizer = with_bf16_copies(optimizer, model)
    order, compiled, pairs = context.build_order(), recipe.compile != "off", isinstance(rows, Pairs)
    often = len(rows) < _OFTEN * order.size
    made = Job(
        recipe=recipe,
        model=model,
        task=context.task,
        optimizer=optimizer,
        average=recipe.average.build(model),
        scaler=scaler(recipe.precision),
        rows=rows,
        order=order,
        guard=FiniteGuard(recipe.nonfinite, device, sharded=optimizer.sharded),
        compute=computation(model, context.task, autocast(recipe), compiled, pairs, often),
        evaluate=computation(model, context.task, autocast(recipe), False),
        timeline=total if isinstance(total, Timeline) else Timeline.fixed(total),
        micro=recipe.micro,
    )
    if recipe.compile == "graphs":
        made.optimizer.compile()
        made.average.compile()
    if begin:
        start.begin(made)
    return made


def build_initial_job(context: RunContext, total: int | Timeline) -> Job:
    """The job at step 0 to copy from, on the CPU: the device has no room for two."""
    recipe = replace(context.recipe, device="cpu", compile="off")
    try:
        return build_job(replace(context, recipe=recipe), total)
    except CheckpointError as error:
        raise CheckpointError(
            f"the run must go back to its beginning, and its start is gone ({error}); "
            f"restore that and go on with `trivium train {context.folder}`"
        ) from None


def uses_bf16_copies(recipe: Recipe) -> bool:
    """Whether matmuls read bf16 copies of the weights: in a compiled GPU step whose batch is one micro-batch.

    What that is worth in an eager step has not been measured.
    """
    if torch.device(recipe.device).type != "cuda" or recipe.precision not in ("bf16", "fp8") or recipe.fast == "off":
        return False
    worth = recipe.compile == "graphs" or (recipe.compile == "on" and recipe.model.parameters() >= LARGE)
    return worth and recipe.micro >= recipe.batch.size
