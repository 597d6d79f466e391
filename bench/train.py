"""Training side by side: the same model by trivium and by a peer, with the same weights, in one process."""

from __future__ import annotations

import argparse
import itertools
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import transformers
from torch import nn

# as a file, it sees only its own folder, and profile.py there before Python's own
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.sort(key=lambda path: Path(path).resolve() == Path(__file__).resolve().parent)

from bench.formulas import Row, needed_flops, training_bytes, training_flops
from bench.measure import Ceilings, ceilings, held, peak, size
from bench.peers import Inputs, steps, translated, twin, unsettle
from bench.table import Line, Work, fastest, machine, rounds, summary, table, typed
from bench.torch_transformer import TorchTransformer
from bench.workloads import CLIP, FOLDER, TINY, WORKLOADS, Workload, pairs_of, row, run_context
from trivium.data.bucketing import Buckets
from trivium.data.loader import Order, Ordering
from trivium.parts.losses import total
from trivium.training.build_job import build_job
from trivium.training.context import RunContext
from trivium.training.device import choose
from trivium.training.job import Job
from trivium.training.loop import updates
from trivium.training.process import process_settings
from trivium.training.recipe import Recipe

HOW = {"on": "compiled", "off": "eager", "graphs": "compiled, in CUDA graphs"}
WARM = 5  # steps before the clock runs: compilation, allocator, moments


class Side(NamedTuple):
    """One side in training: `run` makes so many updates and says how many real tokens they saw."""

    run: Callable[[int], float]
    others: float  # the bytes that were on the device when it came there
    warm: int = WARM


def our_side(made: Job, base: RunContext, others: float) -> Side:
    """Trivium's own training loop."""
    endless = updates(made)
    pairs = pairs_of(base.train)
    # labels are what the loop counts; the sources of pairs are tokens too, as many for each label as in all pairs
    ratio = 0.0 if pairs is None else float(pairs.sizes.sum()) / pairs.labels
    each = base.recipe.batch.rows * row(base).tokens

    def run(number: int) -> float:
        return sum(update.tokens * ratio or each for update in itertools.islice(endless, number))

    return Side(run, others)


def their_side(peer: nn.Module, base: RunContext, recipe: Recipe, number: int) -> Side:
    """The peer's loop over `number` batches that are on the device already, which costs it nothing."""
    device = torch.device(recipe.device)
    others = held(device) - (size(peer) if device.type == "cpu" else 0)
    peer.to(device)
    made = list(itertools.islice(their_batches(base), number))
    sizes = [tokens for tokens, _ in made]
    placed = [{name: tensor.to(device) for name, tensor in inputs.items()} for _, inputs in made]
    count_of, fed = itertools.cycle(sizes), itertools.cycle(placed)
    update = steps(peer, recipe, fed)

    def run(many: int) -> float:
        update(many)
        return float(sum(itertools.islice(count_of, many)))

    return Side(run, others, max(WARM, number if pairs_of(base.train) is not None else 0))  # every shape is seen


def their_batches(base: RunContext) -> Iterator[tuple[float, Inputs]]:
    """The real tokens and the inputs of batches like ours; pairs are sorted by length and padded."""
    batch, seed, pairs = base.recipe.batch, base.recipe.seed, pairs_of(base.train)
    examples = base.train if pairs is None else pairs
    order: Ordering = Order(len(examples), batch.rows, seed)
    if pairs is not None:
        order = Buckets(pairs.sizes, batch.tokens or batch.rows * base.recipe.data.pack, seed, align=8)
    each, rng = row(base).tokens, np.random.default_rng(0)
    for number in itertools.count():
        numbers = order.batch(number * order.size)
        tokens = len(numbers) * each if pairs is None else pairs.sizes[numbers].sum()
        yield float(tokens), translated(base.task.inputs(examples.take(numbers), rng))


def check_losses(made: Job, base: RunContext, peer: nn.Module) -> None:
    """Refuse sides whose first losses differ: then the work is not the same."""
    device = made.model.device
    rows = pairs_of(base.train) or base.train
    batch = base.task.inputs(rows.take(np.arange(2)), np.random.default_rng(0)).to(device)
    with torch.no_grad():
        made.model.train()
        losses = base.task.loss(made.model, made.model(**batch.inputs), batch.targets)
        ours = float(total(losses, batch.counts))
        theirs = float(peer.train()(**translated(batch)).loss)
    if not abs(ours - theirs) <= 1e-4 * abs(theirs):
        raise SystemExit(f"not the same work: the first losses are {ours:.5f} and {theirs:.5f}")


def sides(base: RunContext, against: str, batches: int) -> dict[str, Callable[[], Side]]:
    """Trivium and its peer, each brought to the device when its turn to warm up has come.

    A peer whose shapes vary is there eager too, since compilation may not pay for it.
    """
    recipe, device = base.recipe, torch.device(base.recipe.device)
    others = held(device)
    made = build_job(base, sys.maxsize)
    peers: dict[str, tuple[nn.Module, Recipe]] = {}
    if against != "none":
        unsettle(made.model)
        peer = twin(made.model)
        check_losses(made, base, peer)
        if not isinstance(peer, TorchTransformer):
            peers["hf"] = peer, recipe
        elif recipe.compile != "off":
            peers["torch compiled"] = twin(made.model), recipe
        if isinstance(peer, TorchTransformer):
            peers["torch eager"] = peer, replace(recipe, compile="off")
    away = [peer.to("cpu") for peer, _ in peers.values()]
    others += sum(map(size, away)) if device.type == "cpu" else 0
    found: dict[str, Callable[[], Side]] = {"trivium": lambda: our_side(made, base, others)}
    return found | {name: partial(their_side, peer, base, how, batches) for name, (peer, how) in peers.items()}


def lines(
    waiting: dict[str, Callable[[], Side]],
    base: RunContext,
    *,
    number: int,
    of: int,
    ceiling: Ceilings,
    device: torch.device,
) -> list[Line]:
    """The table of `number` rounds of `of` steps each."""
    each = row(base)
    flops = training_flops(base.recipe.model, each) / each.tokens
    found: dict[str, Side] = {}
    memory: dict[str, float | None] = {}
    for name, enter in waiting.items():
        side = found[name] = enter()
        side.run(side.warm)
        memory[name] = peak(device, side.others, partial(side.run, 2))
    tokens: dict[str, list[float]] = {name: [] for name in found}

    def counted(name: str, side: Side) -> Callable[[], object]:
        return lambda: tokens[name].append(side.run(of))

    seconds = rounds({name: counted(name, side) for name, side in found.items()}, number, device, time.perf_counter)
    peers = list(found)[1:] or list(found)
    best = fastest(summary(seconds, tokens=tokens, steps=of), peers)
    plain = summary(seconds, tokens=tokens, steps=of, against=best)
    return [
        line._replace(
            work=Work(
                rate=line.tokens_per_second * flops,
                share=line.tokens_per_second * flops / ceiling.flops,
                memory=memory[line.side],
            )
        )
        for line in plain
    ]


def floor(base: RunContext, each: Row, ceiling: Ceilings) -> str:
    """The two numbers: the least time for what must be computed, and for what must be moved."""
    model, batch = base.recipe.model, base.recipe.batch
    rows: float = batch.rows
    if base.recipe.data.paired:  # full batches of mean pairs
        rows = (batch.tokens or batch.rows * base.recipe.data.pack) / max(each.source, each.target)
    compute = needed_flops(model, each) * rows / ceiling.flops
    move = training_bytes(model, each, round(rows)) / ceiling.bandwidth
    return (
        f"floor of a step: {compute * 1e3:.1f} ms of products at {ceiling.flops / 1e12:.3g} TFLOP/s, "
        f"{move * 1e3:.1f} ms of memory at {ceiling.bandwidth / 1e12:.3g} TB/s (both measured here)"
    )


def arguments(given: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    shared(parser, list(WORKLOADS))
    training(parser)
    parser.add_argument("--steps", type=int, default=4, help="steps of each side in a round")
    return parser.parse_args(given)


def shared(parser: argparse.ArgumentParser, workloads: Sequence[str]) -> None:
    """The options of every benchmark."""
    parser.add_argument("--workload", choices=workloads, default=workloads[0])
    parser.add_argument("--device", default="auto")
    parser.add_argument("--against", choices=["hf", "none"], default="hf", help="none times trivium alone")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--threads", type=int, default=0, help="0: as torch chooses")
    parser.add_argument("--tiny", action="store_true", help="the workload with a model of a few thousand weights")


def training(parser: argparse.ArgumentParser) -> None:
    """The options of those that train."""
    parser.add_argument("--rows", type=int, default=0, help="rows of a batch, or tokens of one of pairs; 0: the usual")
    parser.add_argument("--pack", type=int, help="pairs: tokens a side of a row of several; 0: a row each, padded")
    parser.add_argument("--precision", choices=["fp32", "bf16", "fp8"], help="default: bf16 on cuda, else fp32")
    parser.add_argument("--data", default="", help="pairs: FILE.tsv or SOURCE,TARGET; default: the package's Tatoeba")
    how = parser.add_mutually_exclusive_group()
    parser.set_defaults(compiled="auto")
    how.add_argument("--compile", dest="compiled", action="store_const", const="on", help="both sides; usual on cuda")
    how.add_argument("--eager", dest="compiled", action="store_const", const="off", help="neither side")
    how.add_argument("--graphs", dest="compiled", action="store_const", const="graphs", help="trivium's compile=graphs")


def workload_of(args: argparse.Namespace, device: torch.device) -> tuple[Workload, Recipe]:
    """The workload that was asked for, and what trivium is told."""
    workload = (TINY if args.tiny else WORKLOADS)[args.workload]
    if args.pack is not None:
        workload = replace(workload, pack=args.pack)
    recipe = workload.recipe(
        device=str(device),
        precision=args.precision or ("bf16" if device.type == "cuda" else "fp32"),
        compiled=args.compiled,
        rows=args.rows,
        threads=args.threads,
    )
    return workload, recipe


def main(given: Sequence[str] | None = None) -> None:
    args = arguments(given)
    if args.threads:
        torch.set_num_threads(args.threads)
    device = choose(args.device)
    workload, recipe = workload_of(args, device)
    ceiling = ceilings(device, time.perf_counter, tiny=args.tiny)
    with tempfile.TemporaryDirectory() as scratch, process_settings(recipe, FOLDER.parent):
        base = run_context(workload, recipe, Path(scratch), data=args.data)
        waiting = sides(base, args.against, batches=16)
        told = lines(waiting, base, number=args.rounds, of=args.steps, ceiling=ceiling, device=device)
        each = row(base)
    recipe = base.recipe
    batch = f"{recipe.batch.size} {recipe.batch.unit}" + f" of {recipe.data.pack} a side" * bool(recipe.data.pack)
    how = f"{recipe.precision}, {HOW[recipe.compile]}, AdamW fused, clip {CLIP:g}"
    many = f"{recipe.model.parameters():,} parameters"
    print(f"training {args.workload}: {many}, {batch} a step, {each} tokens a row, {how}")
    print(f"forward, loss, backward, clipping, update; {args.rounds} rounds of {args.steps} steps, sides in turn")
    print(*table(told, "step"), sep="\n")
    print(floor(base, each, ceiling))
    print(machine(device, {"torch": torch.__version__, "transformers": transformers.__version__}))


if __name__ == "__main__":
    typed(main)
