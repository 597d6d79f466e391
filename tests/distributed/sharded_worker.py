"""One of two processes that train a sharded model: `python -m tests.distributed.sharded_worker RANK FOLDER`.

Also imported by the test, which takes the same steps with a whole model in one process.
"""

from __future__ import annotations

import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import torch
from torch import Tensor

from trivium.data.batch import Batch
from trivium.models.config import ModelConfig, Stack
from trivium.models.transformer import Transformer, build
from trivium.objectives.causal import CausalTask
from trivium.optim.clipping import whole
from trivium.optim.options import AVERAGES, OPTIMIZERS
from trivium.training.forward import computation
from trivium.training.guards import FiniteGuard
from trivium.training.job import Job
from trivium.training.loop import train_step
from trivium.training.scaling import Unscaled
from trivium.training.step import StepScalars

STEPS, BAD = 5, 2  # the step that is not finite, on one rank only
KINDS = ("adamw", "adam")  # torch cannot shard its fused SGD, and Muon and Adafactor need whole matrices


def model() -> Transformer:
    return build(ModelConfig(width=16, context=8, vocab=32, decoder=Stack(layers=2)), seed=0)


def batches(step: int) -> list[Batch]:
    """The two halves of a step's batch, one for each rank."""
    ids = torch.randint(0, 32, (4, 9), generator=torch.Generator().manual_seed(step))
    halves = (ids[:1], ids[1:])  # of different sizes: what divides the loss is the count of the whole step
    return [
        Batch(inputs={"tokens": half[:, :-1]}, targets={"labels": half[:, 1:]}, counts={"tokens": half[:, 1:].numel()})
        for half in halves
    ]


def job(model: Transformer, kind: str) -> Job:
    """All that a step asks of a job."""
    optim: Any = OPTIMIZERS[kind](rate=0.01, decay=0.1)  # type: ignore[call-arg]
    compute = computation(model, CausalTask(length=8), nullcontext, False)
    return cast(
        Job,
        SimpleNamespace(
            recipe=SimpleNamespace(seed=0, clip=0.05),
            step=0,
            model=model,
            optimizer=optim.build(model),
            average=AVERAGES["ema"]().build(model),
            scaler=Unscaled(),
            guard=FiniteGuard("skip", torch.device("cpu")),
            compute=compute,
        ),
    )


def walk(job: Job, ranks: list[int]) -> dict[str, Tensor]:
    """The norms and flags of all steps, and the weights and moments at the end."""
    found: dict[str, Tensor] = {}
    for step in range(STEPS):
        job.step = step
        every = batches(step)
        counts = {"tokens": sum(batch.counts["tokens"] for batch in every)}
        if step == BAD and 1 in ranks:
            _spoil(job)
        result = train_step(job, [every[rank] for rank in ranks], StepScalars(counts, 1 / (step + 1), 0.5))
        found[f"norm {step}"], found[f"finite {step}"] = result.norm, result.finite
        found[f"weight {step}"] = whole(job.model.embedding.weight.detach()).clone()
    for name, parameter in job.model.named_parameters():
        found[f"weights {name}"] = whole(parameter.detach())
    for kept in (job.optimizer, job.average):
        for name, tensor in kept.tensors().items():
            found[f"{type(kept).__name__} {name}"] = whole(tensor.detach())
    return found


def _spoil(job: Job) -> None:
    """Let the next loss be no number."""
    compute = job.compute

    def bad(batch: Batch) -> Any:
        job.compute = compute
        return {name: loss._replace(sum=loss.sum * torch.nan) for name, loss in compute(batch).items()}

    job.compute = bad


def main(rank: int, folder: Path) -> None:
    """Take the steps with every optimizer and write down what came out."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FSDPModule, fully_shard

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder / 'meeting'}", rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    found = {}
    for kind in KINDS:
        sharded = model()
        assert sharded.decoder is not None
        for block in sharded.decoder.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(sharded, mesh=mesh)
        for module in sharded.modules():
            if isinstance(module, FSDPModule):
                module.set_gradient_divide_factor(1.0)  # the loss is divided by the counts of all ranks already
                module.set_force_sum_reduction_for_comms(True)  # gloo has no other
        found[kind] = walk(job(sharded, kind), [rank])
    torch.save(found, folder / f"{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
