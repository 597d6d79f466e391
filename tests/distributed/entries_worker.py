"""One of two processes that use a divided model: `python -m tests.distributed.entries_worker RANK FOLDER`.

Also imported by the test, which uses whole models in one process.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from tests.battery import lively, logits, some_ids
from tests.cases import CASES, VOCAB, WIDTH
from tests.distributed.processes import PROCESSES, leave, meet
from trivium.checkpoints.manifest import manifest
from trivium.distributed import world
from trivium.errors import TriviumError
from trivium.fast.choose import fast, for_inference, plain
from trivium.generation.engine import Request, stream
from trivium.generation.sampling import Sampling
from trivium.generation.scorer import Scorer
from trivium.models.config import ModelConfig, Stack
from trivium.models.options import Block
from trivium.models.transformer import Transformer, build, load_weights, weights
from trivium.parts.options.attention import MultiHeadOptions
from trivium.parts.options.feedforward import MlpOptions
from trivium.parts.sharded import is_sharded, own_shard, whole
from trivium.training.guards import FiniteGuard

NAMED = {case.name: case for case in CASES}
TWO_SIDES, SENTENCE, BOUNDARY = "encoder-decoder: positions t5", "encoder: sentence head", "encoder: boundary head"
GROUPED = "decoder: grouped"
WIDE = 512

Divide = Callable[[Transformer], None]
Found = dict[str, Tensor]


def whole_model(model: Transformer) -> None:
    """Nothing is divided."""


def used(divide: Divide, copies: int = 1) -> Found:
    """What models answer, each asked in a way that is no forward pass of the model; gradients of `copies` processes."""

    def made(name: str) -> Transformer:
        model = lively(NAMED[name].config)
        divide(model)
        return model

    def gradient(answer: Tensor, model: Transformer) -> Tensor:
        answer.pow(2).sum().backward()  # type: ignore[no-untyped-call]
        found = model.embedding.weight.grad
        assert found is not None
        return whole(found) / copies

    tokens_BT = some_ids(2, 7)
    hidden_ND = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    labels_N, found = torch.tensor([1, -100, 7, 2]), Found()
    model = made(TWO_SIDES)
    found["encode"] = model.encode(tokens_BT)
    found["encode gradient"] = gradient(found["encode"], model)
    for name in ("logits", "nll", "loss"):
        given = (hidden_ND,) if name == "logits" else (hidden_ND, labels_N)
        other = made(TWO_SIDES)
        found[name] = getattr(other.head, name)(*given)
        found[f"{name} gradient"] = gradient(found[name], other)
    found["output"] = made(TWO_SIDES).output(hidden_ND)
    found["direct"] = direct(divide, hidden_ND)
    found["pooled"] = cast(Any, made(SENTENCE).sentence).pooled(hidden_ND[None])
    found["sentence"] = cast(Any, made(SENTENCE).sentence).logits(hidden_ND[None])
    places_N = torch.tensor([0, 1, 0, 2])
    found["boundary"] = cast(Any, made(BOUNDARY).boundary).nll(hidden_ND, hidden_ND.flip(0), places_N, labels_N)
    found["states"] = cast(Any, made(BOUNDARY).boundary).states(hidden_ND, hidden_ND.flip(0), places_N)
    found |= {f"loaded {name}": tensor for name, tensor in loaded(made(TWO_SIDES)).items()}
    found |= {f"trained {name}": tensor for name, tensor in trained(divide, copies).items()}
    return {name: tensor.detach() for name, tensor in found.items()}


class Direct(nn.Module):
    """An output from outside whose methods read its weights themselves."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight

    def logits(self, hidden: Tensor) -> Tensor:
        return hidden @ self.weight.mT


def direct(divide: Divide, hidden_ND: Tensor) -> Tensor:
    """The logits of such an output."""
    model = lively(NAMED[GROUPED].config)
    model.output = Direct(model.embedding.weight)
    divide(model)
    return model.head.logits(hidden_ND)


def compiled(divide: Divide, copies: int = 1) -> Found:
    """The loss and gradients of a compiled function around a model that is divided afterwards."""
    model = lively(NAMED[GROUPED].config)

    def loss(ids_BT: Tensor) -> Tensor:
        return model.head.loss(model(ids_BT[:, :-1]).hidden.flatten(0, 1), ids_BT[:, 1:].flatten())

    function = torch.compile(loss, backend="aot_eager")
    divide(model)
    value = function(some_ids(2, 8))
    value.backward()  # type: ignore[no-untyped-call]
    gradients = {name: whole(one.grad) / copies for name, one in model.named_parameters() if one.grad is not None}
    return {"loss": value.detach(), **gradients}


def loaded(model: Transformer) -> Found:
    """Logits before and after other weights were loaded: what a forward pass has gathered must not be used again."""
    with torch.no_grad():
        first = logits(model, some_ids(2, 5))
        load_weights(model, {name: tensor * 0.5 for name, tensor in weights(model, shards="gathered").items()})
        return {"first": first, "second": logits(model, some_ids(2, 5))}


def trained(divide: Divide, copies: int) -> Found:
    """Tokens, then a gradient with recomputed blocks: what inference has gathered must not be in its way."""
    case = NAMED[GROUPED]
    model = lively(case.config)
    fast(model)
    divide(model)
    wishes = [Request(ids=ids, tokens=6, sampling=Sampling(temperature=0), seed=0) for ids in ((1, 2, 3), (4,))]
    tokens = sorted((token.row, order, token.id) for order, token in enumerate(stream(model, wishes, end=None)))
    with torch.inference_mode():
        logits(model, some_ids(2, 5))
    model.recompute = True
    model.train()
    logits(model, some_ids(2, 5)).pow(2).sum().backward()  # type: ignore[no-untyped-call]
    gradients = {name: whole(one.grad) / copies for name, one in model.named_parameters() if one.grad is not None}
    return {"tokens": torch.tensor([id for _, _, id in tokens]), **gradients}


def wide(divide: Divide) -> Found:
    """Logits of a model so wide that fast layers have ways of their own for it: oneDNN, and threads for one row."""
    block = Block(attention=MultiHeadOptions(heads=4), feedforward=MlpOptions(hidden=WIDE))
    model = build(ModelConfig(width=WIDE, context=64, vocab=VOCAB, decoder=Stack(layers=1, block=block))).eval()
    for_inference(model)
    divide(model)
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with torch.no_grad():
            ids_BT = torch.arange(64)[None] % VOCAB
            return {"many rows": logits(model, ids_BT), "one row": logits(model, ids_BT[:, :1])}
    finally:
        torch.set_num_threads(threads)


def refusals(divide: Divide) -> dict[str, str]:
    """What a divided model refuses, in its sentences."""

    def refused(work: Callable[[], object]) -> str:
        try:
            work()
        except TriviumError as error:
            return str(error)
        return ""

    model = lively(NAMED[GROUPED].config)
    fast(model)
    divide(model)
    found = {"plain": refused(lambda: plain(model)), "again": refused(lambda: divide(model))}
    dropping = lively(_with_dropout())
    divide(dropping)
    found["dropout"] = refused(lambda: dropping.train()(some_ids(1, 4)))
    found["evaluated"] = refused(lambda: dropping.eval()(some_ids(1, 4)))
    return found


def _with_dropout() -> ModelConfig:
    block = Block(attention=MultiHeadOptions(heads=4, dropout=0.5), dropout=0.1)
    return ModelConfig(width=WIDTH, context=16, vocab=VOCAB, decoder=Stack(layers=1, block=block))


def late(divide: Divide) -> Found:
    """Logits of a model that is made fast after it was divided: its weights stay where they are."""
    model = lively(NAMED[GROUPED].config)
    divide(model)
    for_inference(model)
    with torch.no_grad():
        one = logits(model, some_ids(1, 1))
    return {"one": one, **loaded(model)}


def without_backward(divide: Divide) -> Tensor:
    """Logits of halved weights, after a pass with gradients whose backward pass never came."""
    model = lively(NAMED[GROUPED].config)
    divide(model)
    shards = [own_shard(parameter).detach() for parameter in model.parameters()]
    logits(model, some_ids(1, 4))
    for shard in shards:
        shard.mul_(0.5)
    with torch.no_grad():
        return logits(model, some_ids(1, 4))


def by_slots(divide: Divide) -> Found:
    """What an encoder-decoder writes where whole models are decoded in slots, and the refusal of coverage."""
    model = lively(NAMED[TWO_SIDES].config)
    divide(model)
    wishes = [Request(ids=(1,), source=(5, 6, 7), tokens=5, sampling=Sampling(temperature=0), seed=0)]
    tokens = [token.id for token in stream(Scorer(model, slots="on"), wishes, end=None)]
    return {"tokens": torch.tensor(tokens)}


def alone(rank: int) -> list[bool]:
    """Guards of a sharded model agree on a loss; that of a whole model communicates with no process."""
    one, nan = torch.tensor(1.0), torch.tensor(torch.nan)
    shared = FiniteGuard("skip", torch.device("cpu"), sharded=True)
    found = [bool(shared.agree(nan if rank else one).isnan()), bool(shared.agree(one).isnan())]
    if rank == 0:
        found.append(bool(FiniteGuard("skip", torch.device("cpu")).check(one, one)))
    return found


def unwritable(rank: int) -> str:
    """What both processes say when the first has no memory for what is gathered."""

    class Full(torch.Tensor):
        def cpu(self, *_: Any, **__: Any) -> Tensor:
            raise MemoryError("no room")

    tensors = {name: torch.ones(2).as_subclass(Full) if rank == 0 else torch.ones(2) for name in "ab"}
    try:
        world.gather_on_first({"model": tensors})
    except (MemoryError, TriviumError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def main(rank: int, folder: Path, *more: str) -> None:
    from trivium.distributed.shard import shard
    from trivium.distributed.tensor_parallel import parallelize

    mesh = meet(rank, folder)
    found: dict[str, Any] = {}
    for way, function in (("sharded", shard), ("parallel", parallelize)):

        def divide(model: Transformer, function: Any = function) -> None:
            function(model, mesh)

        found[way] = used(divide, PROCESSES if way == "sharded" else 1)
        found[f"{way} wide"], found[f"{way} late"] = wide(divide), late(divide)
        found[f"{way} refusals"] = refusals(divide)
        found[f"{way} slots"] = by_slots(divide)
        if "compiled" in more:
            found[f"{way} compiled"] = compiled(divide, PROCESSES if way == "sharded" else 1)
    model = lively(NAMED[GROUPED].config)
    shard(model, mesh)
    with torch.no_grad():
        model.head.logits(model(some_ids(1, 3)).hidden)
    found["shards"] = [is_sharded(parameter) for parameter in model.parameters()]
    found["kept"] = {name: is_sharded(tensor) for name, tensor in weights(model).items()}
    found["without backward"] = without_backward(lambda model: shard(model, mesh))
    found["alone"], found["unwritable"] = alone(rank), unwritable(rank)
    found["agreed"] = [bool(world.agreed(torch.tensor(value))) for value in (True, rank == 0, rank == 1, False)]
    try:
        world.first_only(lambda: manifest(folder / "nothing"))
    except TriviumError as error:
        found["failed"] = str(error)
    leave(rank, folder, found)


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]), *sys.argv[3:])
