"""The two numbers of every workload as a table: the time of its products and of its memory, at two given ceilings."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

# as a file, it sees only its own folder, and profile.py there before Python's own
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.sort(key=lambda path: Path(path).resolve() == Path(__file__).resolve().parent)

from bench.formulas import Row, decoding_bytes, needed_flops, training_bytes, training_flops
from bench.measure import Ceilings
from bench.workloads import WORKLOADS

# rows of the workloads whose tokens are random; the lengths of real pairs are in the text that is named
ROWS = {
    "gpt2": Row(0, 1024, 1024),
    "gpt2-xl": Row(0, 1024, 1024),
    "tinyllama": Row(0, 2048, 2048),
    "bert": Row(0, 512, 77),
    "t5": Row(512, 114, 114),
}
DECODED = (("gpt2", 1), ("gpt2", 64), ("tinyllama", 1), ("tinyllama", 64))
LENGTH = 128 + 256 / 2  # tokens in the cache, on average


def training(ceiling: Ceilings) -> Iterator[str]:
    """A line for each workload: what a token counts and needs, and the two times of a step."""
    yield "| training | rows x tokens | GFLOP a token, counted | needed | products, ms | memory, ms | tokens/s, most |"
    yield "|---|---|---|---|---|---|---|"
    for name, row in ROWS.items():
        workload = WORKLOADS[name]
        tokens = workload.rows * row.tokens
        counted, needed = (count(workload.model, row) / row.tokens for count in (training_flops, needed_flops))
        products = needed * tokens / ceiling.flops
        memory = training_bytes(workload.model, row, workload.rows) / ceiling.bandwidth
        yield (
            f"| {name} | {workload.rows} x {row} | {counted / 1e9:.3f} | {needed / 1e9:.3f} | {products * 1e3:.1f} | "
            f"{memory * 1e3:.1f} | {tokens / max(products, memory):,.0f} |"
        )


def decoding(ceiling: Ceilings) -> Iterator[str]:
    """A line for each workload: what a step reads, its time, and the products of the same step."""
    yield "| decoding | batch | weights and cache, GB a step | memory, ms | products, ms | tokens/s, most |"
    yield "|---|---|---|---|---|---|"
    for name, batch in DECODED:
        model = WORKLOADS[name].model
        moved = decoding_bytes(model, batch=batch, length=LENGTH)
        memory = moved / ceiling.bandwidth
        # each weight is multiplied and added once for each row
        products = batch * decoding_bytes(model, batch=0, length=0) / ceiling.flops
        yield (
            f"| {name} | {batch} | {moved / 1e9:.3f} | {memory * 1e3:.3f} | {products * 1e3:.3f} | "
            f"{batch / max(memory, products):,.0f} |"
        )


def main(given: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--flops", type=float, default=792.0, help="10**12 a second; default: one H200, bf16")
    parser.add_argument("--bandwidth", type=float, default=4.26, help="10**12 bytes a second; default: one H200")
    args = parser.parse_args(given)
    ceiling = Ceilings(args.flops * 1e12, args.bandwidth * 1e12)
    print(*training(ceiling), "", *decoding(ceiling), sep="\n")


if __name__ == "__main__":
    main()
