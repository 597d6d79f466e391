"""The speed that is left on a busy machine: Python and the command line, alone and beside a process that computes.

Waiting OpenMP threads spin by default, and where the cores are taken they spin away the time of the thread that they
wait for. How long they do is decided by GOMP_SPINCOUNT before torch is loaded, so every figure is of a process of its
own: a Python program that imports trivium, the same when torch was imported first (the default of OpenMP), `trivium`.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
SPINS = "GOMP_SPINCOUNT"
PROMPT = "It was the best of times, it was the worst of times,"

HEAD = "import time, sys\n{first}import trivium as tv\nmodel, count = sys.argv[1], int(sys.argv[2])\n"
DECODE = """
m = tv.load(model, device="cpu")
m.generate({prompt!r}, tokens=4, temperature=0)
began = time.perf_counter()
m.generate({prompt!r}, tokens=count, temperature=0)
print(count / (time.perf_counter() - began))
"""
SCORE = """
m = tv.load(model, device="cpu")
text = ({prompt!r} + " ") * count
m.score(text[:100])
began = time.perf_counter()
m.score(text)
print(len(text) / (time.perf_counter() - began))
"""
TRAIN = "tv.train(model, {{'budget.steps': count}}, runs=sys.argv[3], quiet=True)\n"
RECIPE = """
precision = "fp32"
device = "cpu"
name = "busy"
[data]
paths = ["{text}"]
[tokenizer]
kind = "bytes"
[model]
preset = "gpt-mini"
width = 256
context = 128
[batch]
rows = 16
[evaluate]
every = 0
[checkpoint]
every = 0
[sample]
every = 0
"""


class Task(NamedTuple):
    """Something to measure: its name, its unit, and one measurement with a number of spins ("" is trivium's own)."""

    name: str
    unit: str
    measure: Callable[[str], float]


def environment(spins: str) -> dict[str, str]:
    """The environment of a measurement; without a number of spins it is the user's own."""
    own = {key: value for key, value in os.environ.items() if key != SPINS}
    return {**own, "PYTHONPATH": str(ROOT), **({SPINS: spins} if spins else {})}


def called(command: list[str], spins: str) -> str:
    found = subprocess.run(command, env=environment(spins), capture_output=True, text=True)
    if found.returncode:
        raise SystemExit(f"{' '.join(command[:4])}: {found.stderr[-500:]}")
    return found.stdout


@contextlib.contextmanager
def busy(processes: int) -> Iterator[None]:
    """So many other processes that compute all the time."""
    others = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(processes)]
    try:
        yield
    finally:
        for other in others:
            other.kill()
            other.wait()


def tasks(model: Path, count: int, steps: int, scratch: Path) -> list[Task]:
    """Decoding, scoring and training from Python; decoding and training on the command line."""
    text = scratch / "text.txt"
    text.write_text((PROMPT + "\n") * 2000)
    recipe = scratch / "busy.toml"
    recipe.write_text(RECIPE.format(text=text))
    trivium = [sys.executable, "-m", "trivium"]

    def program(body: str, given: Path, number: int, first: str = "") -> Callable[[str], float]:
        code = HEAD.format(first=first) + body.format(prompt=PROMPT)
        return lambda spins: float(called([sys.executable, "-c", code, str(given), str(number)], spins))

    def trained(spins: str, command: list[str]) -> float:
        with tempfile.TemporaryDirectory(dir=scratch) as runs:
            called([*command, runs], spins)
            rows = [json.loads(line) for line in (Path(runs) / "busy" / "metrics.jsonl").read_text().splitlines()]
        first, last = (next(row for row in rows if row["step"] == step) for step in (3, steps))
        return float((last["step"] - first["step"]) / (last["seconds"] - first["seconds"]))

    def from_python(spins: str) -> float:
        return trained(spins, [sys.executable, "-c", HEAD.format(first="") + TRAIN.format(), str(recipe), str(steps)])

    def from_terminal(spins: str) -> float:
        return trained(spins, [*trivium, "train", str(recipe), f"budget.steps={steps}", "--runs"])

    def generated(spins: str) -> float:
        """By the difference of two lengths: what starting and loading take is in both."""
        seconds = []
        for tokens in (4, 4 + count):
            began = time.monotonic()
            command = ["generate", str(model), PROMPT, "--tokens", str(tokens), "--temperature", "0", "--device", "cpu"]
            called([*trivium, *command], spins)
            seconds.append(time.monotonic() - began)
        return count / max(seconds[1] - seconds[0], 1e-3)

    return [
        Task("m.generate", "tok/s", program(DECODE, model, count)),
        Task("m.generate, torch imported first", "tok/s", program(DECODE, model, count, "import torch\n")),
        Task("m.score", "characters/s", program(SCORE, model, 10 * steps)),
        Task("tv.train", "steps/s", from_python),
        Task("trivium generate", "tok/s", generated),
        Task("trivium train", "steps/s", from_terminal),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="a model to decode with, such as SmolLM2-135M-Instruct.Q4_1.gguf")
    parser.add_argument("--others", type=int, default=1, help="processes that compute beside it")
    parser.add_argument("--spins", nargs="*", default=[""], help="values of GOMP_SPINCOUNT; without any trivium's own")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--rounds", type=int, default=3, help="of which the median counts")
    parser.add_argument("--only", default="", help="a part of a task's name")
    args = parser.parse_args()
    print(f"{os.cpu_count()} cores, {args.others} other processes that compute; medians of {args.rounds}")
    print("| | spins | alone | busy | busy / alone |\n|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as scratch:
        for task in tasks(args.model, args.tokens, args.steps, Path(scratch)):
            if args.only not in task.name:
                continue
            for spins in args.spins:
                alone = statistics.median(task.measure(spins) for _ in range(args.rounds))
                with busy(args.others):
                    beside = statistics.median(task.measure(spins) for _ in range(args.rounds))
                share = f"{beside / alone:.2f}"
                print(
                    f"| {task.name} | {spins or 'own'} | {alone:.1f} {task.unit} | {beside:.1f} | {share} |", flush=True
                )


if __name__ == "__main__":
    main()
