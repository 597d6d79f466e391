"""One of two processes that divide the models of the battery: `python -m tests.distributed.cases_worker RANK FOLDER …`.

Also imported by the test, which asks the same of a whole model in one process.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from examples.convolution import Convolution
from examples.experts import Experts
from examples.repeated import Repeated
from tests.battery import lively, logits, read, some_ids
from tests.cases import CASES, CONTEXT, VOCAB, WIDTH, Case
from tests.distributed.processes import PROCESSES, leave, meet
from trivium.errors import RequestError
from trivium.fast.choose import for_inference
from trivium.models.config import AnyStack, ModelConfig, Stack
from trivium.models.options import Block
from trivium.models.transformer import Transformer, weights
from trivium.parts.options.attention import MultiHeadOptions
from trivium.parts.options.positions import NoPositionOptions, ShawOptions
from trivium.parts.sharded import whole

MORE: dict[str, AnyStack] = {
    # two groups of two heads in each process
    "shaw of four groups": Stack(
        layers=1, block=Block(attention=MultiHeadOptions(heads=8, groups=4), position=ShawOptions())
    ),
    "experts": Stack(layers=2, block=Block(feedforward=Experts(experts=3, hidden=24))),
    "convolution": Stack(layers=2, block=Block(attention=Convolution(kernel=3), position=NoPositionOptions())),
    "repeated": Repeated(layers=3),
}
NAMED = {case.name: case for case in CASES} | {
    name: Case(name=name, config=ModelConfig(width=WIDTH, context=CONTEXT, vocab=VOCAB, decoder=stack))
    for name, stack in MORE.items()
}
Way = Literal["sharded", "parallel"]
Kind = Literal["plain", "fast"]
Found = dict[str, Tensor]


def measured(model: Transformer, case: Case, rows: slice = slice(None)) -> Found:
    """What a model computes of these rows: logits of all tokens, and token by token with a cache; the gradients of all
    weights; then the weights themselves.
    """
    tokens_BT = some_ids(PROCESSES, 9)
    others = {name: tensor[rows] for name, tensor in read(case, PROCESSES).items()}
    result = logits(model, tokens_BT[rows], **others)
    (result.pow(3).sum() / tokens_BT.numel()).backward()  # type: ignore[no-untyped-call]
    found = {"logits": result.detach()}
    if case.causal:
        with torch.no_grad():
            cache = model.cache(len(result), CONTEXT)
            pieces = [
                logits(model, piece, cache=cache, **others) for piece in torch.split(tokens_BT[rows], [5, 1, 3], 1)
            ]
        found["cached"] = torch.cat(pieces, 1)
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            found[f"gradient {name}"] = whole(parameter.grad)
    return found | {f"weight {name}": one for name, one in weights(model, shards="gathered").items()}


def divided(model: Transformer, way: Way, mesh: Any) -> None:
    from trivium.distributed.shard import shard
    from trivium.distributed.tensor_parallel import parallelize

    (shard if way == "sharded" else parallelize)(model, mesh)


def main(rank: int, folder: Path, names: list[str]) -> None:
    mesh = meet(rank, folder)
    found: dict[tuple[str, Way, Kind], Found | str] = {}
    for name in names:
        case = NAMED[name]
        for way in get_args(Way):
            for kind in get_args(Kind):
                model = lively(case.config)
                if kind == "fast":
                    for_inference(model)
                try:
                    divided(model, way, mesh)
                except RequestError as refusal:
                    found[name, way, kind] = str(refusal)
                    continue
                rows = slice(rank, rank + 1) if way == "sharded" else slice(None)
                found[name, way, kind] = measured(model, case, rows)
    leave(rank, folder, found)


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:])
