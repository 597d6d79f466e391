"""Where a training step's time goes: matrix products, attention, loss, optimizer, elementwise work, copies, gaps."""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.profiler import ProfilerActivity, profile

# as a file, it sees only its own folder, and profile.py there before Python's own
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.sort(key=lambda path: Path(path).resolve() == Path(__file__).resolve().parent)

from bench.table import machine, typed, wait
from bench.train import HOW, WARM, Side, shared, sides, training, workload_of
from bench.workloads import FOLDER, WORKLOADS, run_context
from trivium.training.device import choose
from trivium.training.process import process_settings

# The first that a name fits; kernels of the compiler are named after the operations that it has fused in them.
KINDS = {
    # the compiler fuses a softmax only into a loss: that of attention is inside the attention's own kernel
    "loss": r"softmax_|logsumexp|cross_entropy|_loss|^loss_|_summed|^triton_(red|per|poi).*(softmax|amax.*exp)",
    "attention": r"flash|fmha|attention|sdpa|softmax|flex|^(forward|keys|queries|bias)_kernel",
    "optimizer": r"adam|multi_tensor|foreach|lpnorm|linalg_vector_norm|newton|orthogonal",
    "products": r"gemm|cutlass|xmma|nvjet|cublas|scaled_mm|splitk|matmul|wgmma|_mm\b|_mm_|aten::(b?mm|addmm|baddbmm)",
    "copies": r"memcpy|memset|\bcopy|_copy|aten::(clone|cat|contiguous|pin_memory|fill_|zero_)|catarray|direct_copy",
}
REST = "elementwise"
GAPS = "gaps"
ORDER = (*KINDS, REST, GAPS)


class Span(NamedTuple):
    """One kernel, or one operation of the CPU without those inside it; microseconds."""

    name: str
    kind: str
    start: float
    length: float


class Group(NamedTuple):
    """All work of one kind."""

    kind: str
    microseconds: float
    launches: int
    heaviest: str


def kind_of(name: str) -> str:
    """What a kernel or an operation is for, by its name."""
    lowered = name.lower()
    return next((kind for kind, pattern in KINDS.items() if re.search(pattern, lowered)), REST)


def groups(spans: Sequence[Span], whole: float) -> list[Group]:
    """The work by kind, and as gaps what is left of the `whole` time: the device waited for the host."""
    found: dict[str, dict[str, float]] = {}
    launches: dict[str, int] = {}
    for span in spans:
        names = found.setdefault(span.kind, {})
        names[span.name] = names.get(span.name, 0.0) + span.length
        launches[span.kind] = launches.get(span.kind, 0) + 1
    made = {
        kind: Group(kind, sum(names.values()), launches[kind], max(names, key=lambda name: names[name]))
        for kind, names in found.items()
    }
    made[GAPS] = Group(GAPS, max(0.0, whole - busy(spans)), 0, "")
    return [made.get(kind, Group(kind, 0.0, 0, "")) for kind in ORDER]


def busy(spans: Sequence[Span]) -> float:
    """How long at least one span runs."""
    total, until = 0.0, float("-inf")
    for span in sorted(spans, key=lambda one: one.start):
        end = span.start + span.length
        total += max(0.0, end - max(span.start, until))
        until = max(until, end)
    return total


def recorded(side: Side, steps: int, device: torch.device) -> tuple[list[Span], float]:
    """The spans of some steps, and the microseconds that they took under the profiler's eyes."""
    cuda = device.type == "cuda"
    activities = [ProfilerActivity.CUDA] if cuda else [ProfilerActivity.CPU]
    wait(device)
    with profile(activities=activities, acc_events=True) as found:
        begin = time.perf_counter()
        side.run(steps)
        wait(device)
        whole = (time.perf_counter() - begin) * 1e6
    spans = list(_kernels(found.events()) if cuda else _operations(found.events()))
    if cuda and spans:  # from the first kernel to the last: reading the clock and starting the profiler are no gaps
        whole = max(span.start + span.length for span in spans) - min(span.start for span in spans)
    return spans, whole


def _kernels(events: Any) -> Iterator[Span]:
    for event in events:
        if event.device_type.name == "CUDA" and not getattr(event, "is_user_annotation", False):
            yield Span(event.name, kind_of(event.name), event.time_range.start, event.time_range.elapsed_us())


def _operations(events: Any) -> Iterator[Span]:
    """Each operation with the time that it spends itself, laid end to end: those inside it have their own."""
    at = 0.0
    for event in events:
        if event.self_cpu_time_total > 0:
            yield Span(event.name, _purpose(event), at, event.self_cpu_time_total)
            at += event.self_cpu_time_total


def _purpose(event: Any) -> str:
    """The kind of an operation, or loss if it is inside one: a softmax says nothing of what it is for."""
    outer = event.cpu_parent
    while outer is not None:
        if kind_of(outer.name) == "loss":
            return "loss"
        outer = outer.cpu_parent
    return kind_of(event.name)


def printed(found: Sequence[Group], spans: Sequence[Span], steps: int, whole: float, top: int) -> Iterator[str]:
    """The table of the kinds, and the heaviest names."""
    yield f"{'kind':<12} {'ms/step':>9} {'share':>7} {'launches':>9}   heaviest"
    for group in found:
        yield (
            f"{group.kind:<12} {group.microseconds / steps / 1e3:>9.3f} {group.microseconds / whole:>7.1%} "
            f"{group.launches / steps:>9.0f}   {group.heaviest[:80]}"
        )
    names: dict[tuple[str, str], list[float]] = {}
    for span in spans:
        names.setdefault((span.kind, span.name), []).append(span.length)
    for (kind, name), lengths in sorted(names.items(), key=lambda one: -sum(one[1]))[:top]:
        yield f"  {sum(lengths) / steps / 1e3:>9.3f} ms {len(lengths) / steps:>5.0f} x  {kind:<11} {name[:100]}"


def arguments(given: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    shared(parser, list(WORKLOADS))
    training(parser)
    parser.add_argument("--steps", type=int, default=5, help="steps that are recorded")
    parser.add_argument("--top", type=int, default=0, help="how many kernels are named one by one")
    parser.set_defaults(against="none")
    return parser.parse_args(given)


def main(given: Sequence[str] | None = None) -> None:
    args = arguments(given)
    if args.threads:
        torch.set_num_threads(args.threads)
    device = choose(args.device)
    workload, recipe = workload_of(args, device)
    with tempfile.TemporaryDirectory() as scratch, process_settings(recipe, FOLDER.parent):
        base = run_context(workload, recipe, Path(scratch), data=args.data)
        for name, enter in sides(base, args.against, batches=16).items():
            side = enter()
            side.run(WARM)
            wait(device)
            begin = time.perf_counter()
            tokens = side.run(args.steps)
            wait(device)
            plain = time.perf_counter() - begin
            spans, whole = recorded(side, args.steps, device)
            how = f"{recipe.precision}, {HOW[recipe.compile]}"
            print(f"{name}, {args.workload}, {recipe.batch.size} {recipe.batch.unit} a step, {how}")
            speed = f"{plain / args.steps * 1e3:.2f} ms a step, {tokens / plain:,.0f} tokens/s"
            print(f"{speed}; {whole / args.steps / 1e3:.2f} ms with the profiler on")
            print(*printed(groups(spans, whole), spans, args.steps, whole, args.top), sep="\n")
    print(machine(device, {"torch": torch.__version__}))


if __name__ == "__main__":
    typed(main)
