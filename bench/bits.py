"""The same bits: the demos' models trained for some steps by two versions of trivium, losses and weights compared.

    git worktree add build/old COMMIT
    python bench/bits.py build/old . --steps 200

On the CPU with one thread, seed 0. A third run has the fast floor switched off: how far its losses are from the fast
ones is printed beside.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors.torch import load_file

FAMILIES = ("gpt", "bert", "t5")
FIXED = ("device=cpu", "threads=1", "precision=fp32", "seed=0", "evaluate.every=0", "sample.every=0")


class Trained(NamedTuple):
    """What a run leaves: loss and norm of every step, and the weights."""

    steps: list[tuple[float, float]]
    weights: dict[str, torch.Tensor]


def train(folder: Path, family: str, steps: int, runs: Path, *settings: str) -> Trained:
    """The demo of a family by the package in a folder."""
    given = [*FIXED, f"budget.steps={steps}", *settings]
    command = [sys.executable, "-m", "trivium", "demo", "--family", family, "--runs", str(runs), *given]
    done = subprocess.run(
        command, cwd=folder, env={**os.environ, "PYTHONPATH": str(folder)}, capture_output=True, text=True
    )
    if done.returncode:
        raise SystemExit(f"{folder}: {done.stderr[-1000:]}")
    home = runs / f"demo-{family}"
    rows = [json.loads(line) for line in (home / "metrics.jsonl").read_text().splitlines()]
    found = [(row["loss"], row["norm"]) for row in rows if "norm" in row]
    return Trained(found, load_file(home / "model.safetensors"))


def weights(one: Trained, other: Trained) -> str:
    """How many tensors are equal, of those of both."""
    if one.weights.keys() != other.weights.keys():
        return f"names differ: {', '.join(sorted(one.weights.keys() ^ other.weights.keys()))}"
    equal = sum(torch.equal(one.weights[name], other.weights[name]) for name in one.weights)
    return f"{equal} of {len(one.weights)}"


def apart(one: Trained, other: Trained) -> float:
    """The largest difference of two losses of a step, as a share."""
    return max(abs(a[0] - b[0]) / abs(a[0]) for a, b in zip(one.steps, other.steps, strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path)
    parser.add_argument("--steps", type=int, default=200)
    args = parser.parse_args()
    old, new = args.old.resolve(), args.new.resolve()
    print("| demo | steps | equal losses and norms | equal weights | losses with fast=off, apart |")
    print("|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as scratch:
        for family in FAMILIES:
            first = train(old, family, args.steps, Path(scratch) / "old")
            second = train(new, family, args.steps, Path(scratch) / "new")
            plain = train(new, family, args.steps, Path(scratch) / "plain", "fast=off")
            equal = sum(a == b for a, b in zip(first.steps, second.steps, strict=True))
            print(
                f"| {family} | {args.steps} | {equal} of {len(first.steps)} | {weights(first, second)} "
                f"| {apart(second, plain):.1e} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
