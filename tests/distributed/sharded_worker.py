"""One of two processes that train a model together: `python -m tests.distributed.sharded_worker RANK FOLDER`.

Also imported by the test, which takes the same steps with a whole model in one process.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import torch
from torch import Tensor

from tests.distributed.processes import leave, meet
from trivium.checkpoints import format
from trivium.checkpoints.bundle import open_bundle, save
from trivium.checkpoints.store import Store
from trivium.data.batch import Batch
from trivium.models.config import ModelConfig, Stack
from trivium.models.transformer import Lay, Transformer, build, weights
from trivium.objectives.causal import CausalTask
from trivium.optim.options import Adafactor, Adam, AdamW, Ema, Muon, Optim, Sgd
from trivium.parts.losses import Loss
from trivium.parts.sharded import whole
from trivium.text.kinds import Bytes
from trivium.training.forward import computation
from trivium.training.guards import FiniteGuard
from trivium.training.job import Job
from trivium.training.loop import train_step
from trivium.training.recipe import Recipe
from trivium.training.scaling import Unscaled
from trivium.training.step import StepScalars
from trivium.training.timeline import Timeline

STEPS = 6
BAD_GRADIENTS, BAD_LOSS = 2, 4  # the steps in which those of one rank alone are not finite
MORE = 2  # steps after a checkpoint
KINDS: dict[str, Optim] = {
    "adamw": AdamW(rate=0.01),
    "adam": Adam(rate=0.01, decay=0.1),
    "sgd": Sgd(rate=10.0, momentum=0.9, form="nesterov", decay=0.01),
    "muon": Muon(),
    "adafactor": Adafactor(),
}
WAYS = ("sharded", "parallel")
KEPT = "adamw"  # the optimizer whose run is saved and loaded
VOCAB = 32

Found = dict[str, Tensor]


def model() -> Transformer:
    made = build(ModelConfig(width=16, context=8, vocab=VOCAB, decoder=Stack(layers=2)), seed=0)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.mul_(4)  # else the gradients of queries and keys are tiny
    return made.double()


def batches(step: int) -> list[Batch]:
    """The two halves of a step's batch, one for each rank."""
    ids = torch.randint(0, VOCAB, (4, 9), generator=torch.Generator().manual_seed(step))
    halves = (ids[:1], ids[1:])  # of different sizes: what divides the loss is the count of the whole step
    return [
        Batch(inputs={"tokens": half[:, :-1]}, targets={"labels": half[:, 1:]}, counts={"tokens": half[:, 1:].numel()})
        for half in halves
    ]


def job(model: Transformer, kind: str) -> Job:
    """A job with all that a step and a checkpoint ask of it: neither reads data."""
    task, nothing = CausalTask(length=8), cast(Any, None)
    compute, optimizer = computation(model, task, nullcontext, False), KINDS[kind].build(model)
    return Job(
        recipe=cast(Recipe, SimpleNamespace(seed=0, clip=0.05, batch=SimpleNamespace(micro=1, size=1))),
        model=model,
        task=task,
        optimizer=optimizer,
        average=Ema().build(model),
        scaler=Unscaled(),
        rows=nothing,
        order=nothing,
        guard=FiniteGuard("skip", torch.device("cpu"), sharded=optimizer.sharded),
        compute=compute,
        evaluate=compute,
        timeline=Timeline.fixed(STEPS),
        micro=1,
    )


def walk(job: Job, ranks: Sequence[int], first: int = 0, last: int = STEPS) -> Found:
    """The norms and flags of the steps, and the weights, moments and averages at their end."""
    found: Found = {}
    for step in range(first, last):
        job.step = step
        every = batches(step)
        counts = {"tokens": sum(batch.counts["tokens"] for batch in every)}
        if step in (BAD_GRADIENTS, BAD_LOSS) and 1 in ranks:
            _spoil(job, gradients=step == BAD_GRADIENTS)
        result = train_step(job, [every[rank] for rank in ranks], StepScalars(counts, 1 / (step + 1), 0.5))
        found[f"norm {step}"], found[f"finite {step}"] = result.norm, result.finite
        found[f"weight {step}"] = whole(job.model.embedding.weight.detach()).clone()
    return found | held(job)


def held(job: Job) -> Found:
    """Everything that a checkpoint holds, whole."""
    return {
        f"{section} {name}": whole(tensor.detach()).clone()
        for section, group in job.tensors().items()
        for name, tensor in group.items()
    }


def _spoil(job: Job, *, gradients: bool) -> None:
    """Let the next loss be no number, and its gradients or not."""
    compute = job.compute

    def bad(batch: Batch) -> Any:
        job.compute = compute
        losses = compute(batch)
        if gradients:
            return {name: loss._replace(sum=loss.sum * torch.nan) for name, loss in losses.items()}
        return {**losses, "constant": Loss(torch.tensor(torch.nan))}

    job.compute = bad


def write(job: Job, folder: Path) -> Path:
    """A checkpoint of a job."""
    return Store(folder).save(STEPS, tensors=job.tensors(), documents={"state": {"cursor": 0, "tokens": 0}})


def resume(job: Job, folder: Path) -> Job:
    """The job as it was saved."""
    found = Store(folder).newest(say=print)
    assert found is not None
    state = format.document(found.path, "state")
    job.load(lambda section: format.tensors(found.path, section), found.step, state)
    return job


def run_all(rank: int, folder: Path, way: str, divide: Callable[[Transformer], None]) -> dict[str, Any]:
    """Take the steps with every optimizer; save, load and go on with one of them."""
    found: dict[str, Any] = {}
    ranks = [rank] if way == "sharded" else [0, 1]

    def divided(kind: str) -> Job:
        made = model()
        divide(made)
        return job(made, kind)

    for kind in KINDS:
        running = divided(kind)
        found[kind] = walk(running, ranks)
        if kind == KEPT:
            write(running, folder / way)
            save(folder / f"{way} model", running.model.config, running.weights_for_use(), Bytes().build([]), {})
            found["after"] = walk(running, ranks, STEPS, STEPS + MORE)
    loaded = resume(divided(KEPT), folder / "one")
    found["loaded"] = held(loaded)
    write(loaded, folder / f"{way} again")
    found["loaded after"] = walk(loaded, ranks, STEPS, STEPS + MORE)
    opened = open_bundle(folder / "one model", lay=cast(Lay, divide)).module
    found["opened"] = weights(opened, shards="gathered")
    try:
        write(loaded, folder / "a file" / "inside")
    except OSError as error:
        found["refused"] = error.errno
    return {f"{way} {name}": value for name, value in found.items()}


def main(rank: int, folder: Path) -> None:
    from trivium.distributed.shard import shard
    from trivium.distributed.tensor_parallel import parallelize

    mesh = meet(rank, folder)
    found: dict[str, Any] = {}
    for way, divide in zip(WAYS, (shard, parallelize), strict=True):
        found |= run_all(rank, folder, way, partial(divide, mesh=mesh))
    leave(rank, folder, found)


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
