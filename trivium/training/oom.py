"""Memory that runs out: the step is tried again with fewer rows at a time, or a sentence says what to change."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

import torch

from trivium.errors import OutOfMemory
from trivium.training.job import Job
from trivium.training.prefetch import Prefetcher, StepBatches
from trivium.training.recipe import Recipe
from trivium.training.step import StepResult, StepScalars, at_least_one


class RunStep(Protocol):
    """Runs one step on batches of the host."""

    def __call__(self, batches: StepBatches, scalars: StepScalars) -> StepResult: ...

    def forget(self) -> None:
        """Give back the memory that is held for coming steps."""


def with_oom_retry(
    job: Job, prefetcher: Prefetcher, run: RunStep, factor: float, average: float
) -> tuple[StepBatches, StepResult, str]:
    """Run a step, with half the rows at a time whenever memory runs out and the recipe leaves that open.

    Gives its batches, its result, and a sentence if `job.micro` was halved.
    """
    note = ""
    while True:
        try:
            batches = prefetcher.take()
            return batches, run(batches, StepScalars(at_least_one(batches.counts), factor, average)), note
        except Exception as error:
            if not is_out_of_memory(error) or job.moving or job.recipe.batch.micro:
                raise
            if job.micro == 1:
                raise OutOfMemory(
                    f"out of memory on {job.recipe.device} with a single row of {job.rows.length} tokens; "
                    f"set recompute=blocks, or start a new run with a smaller {job.recipe.data.limit} or model.width"
                ) from error
        # outside the handler: the traceback keeps alive what filled the memory
        job.optimizer.zero_grad()
        job.optimizer.free_working_weights()  # which are of no use to a batch in parts
        run.forget()
        if job.model.device.type == "cuda":
            torch.cuda.empty_cache()
        job.micro = -(-job.micro // 2)
        less = f"{job.micro} {job.recipe.batch.unit} at a time (batch.micro)"
        note = f"out of memory at step {job.step + 1}: from here on {less}"


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an exception means that the device or the host has no memory left."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    signs = ("can't allocate memory", "CUDA error: out of memory", "CUBLAS_STATUS_ALLOC_FAILED")
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in signs)


@contextmanager
def enough_memory(recipe: Recipe, folder: Path | None = None) -> Iterator[None]:
    """Turn running out of memory into a sentence that names the setting to change."""
    try:
        yield
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        micro = recipe.micro
        what = "tokens" if recipe.batch.tokens else f"rows of {recipe.data.length or recipe.model.context} tokens"
        used = f"out of memory on {recipe.device} with {micro} {what} at a time; "
        again = f" and go on with `trivium train {folder}`" if folder is not None else ""
        if micro > 1:
            raise OutOfMemory(f"{used}set batch.micro={micro // 2}{again}") from error
        raise OutOfMemory(f"{used}start a new run with a smaller {recipe.data.limit} or model.width") from error
