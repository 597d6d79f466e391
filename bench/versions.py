"""Two versions of trivium side by side: one benchmark of each in processes of their own, on one machine, in turn.

    git worktree add build/old COMMIT
    python bench/versions.py build/old . --rounds 6 -- train --workload gpt2 --graphs

Each process imports its own folder's package and `bench/`, and waits while another's round is timed. The old version
runs twice: what its two processes differ by is the noise, next to which a difference counts. Several benchmarks,
separated by `--`, are prepared at the same time; then each has its rounds alone. What a fast class is worth:

    python bench/versions.py . . --without FastBlock -- train --workload bert --graphs
"""

from __future__ import annotations

import argparse
import datetime
import importlib
import itertools
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple

LOSSES = 6  # of the first steps


class Report(NamedTuple):
    """What one process says of its benchmark."""

    rates: list[float]  # tokens a second of every round
    memory: float | None  # bytes, the most at a time
    losses: list[float]  # of the first steps of training, with equal seeds


class Process:
    """A benchmark of one folder in its own process, whose rounds begin when it is its turn."""

    def __init__(self, folder: Path, without: str, benchmark: Sequence[str], rounds: int, log: IO[str]) -> None:
        command = [sys.executable, str(Path(__file__).resolve()), "--worker", str(folder), without, *benchmark]
        alone = [] if benchmark[0] == "cpu" else ["--against", "none"]  # there the peer only says that work is equal
        environment = {**os.environ, "PYTHONPATH": str(folder)}
        self.name = f"{folder}: {' '.join(benchmark)}"
        self.process = subprocess.Popen(
            [*command, "--rounds", str(rounds), *alone],
            cwd=folder,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        )

    def wait(self) -> None:
        """Wait until it is ready for its next round."""
        self._read("ready")

    def round(self) -> None:
        """Let it make one round while all others wait."""
        self._write("go")
        self._read("done")

    def report(self) -> Report:
        """What it found, after its last round."""
        found = self._read("report")
        self.process.wait()
        return Report(found["rates"], found["memory"], found["losses"])

    def stop(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()

    def _write(self, word: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{word}\n")
        self.process.stdin.flush()

    def _read(self, kind: str) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"{self.name} ended before it was done; its output is in the log")
        message: dict[str, Any] = json.loads(line)
        assert message["kind"] == kind, message
        return message


def compare(old: Path, new: Path, without: str, benchmarks: Sequence[Sequence[str]], rounds: int, log: IO[str]) -> None:
    """Print a line for each benchmark: the speeds of both versions, and how far two processes of the old one are."""
    processes: list[list[Process]] = []
    try:
        for benchmark in benchmarks:
            sides = (old, ""), (old, ""), (new, without)
            processes.append([Process(folder, name, benchmark, rounds, log) for folder, name in sides])
        for process in itertools.chain.from_iterable(processes):
            process.wait()
        for benchmark, turns in zip(benchmarks, processes, strict=True):
            for index in range(rounds):
                for process in turns[:: -1 if index % 2 else 1]:
                    process.round()
                for process in turns if index < rounds - 1 else ():
                    process.wait()
            print(line(" ".join(benchmark), *(process.report() for process in turns)), flush=True)
    finally:
        for process in itertools.chain.from_iterable(processes):
            process.stop()


def line(name: str, old: Report, again: Report, new: Report) -> str:
    """One row of the table; differences are medians over rounds of the ratio within a round."""
    both = [statistics.mean(pair) for pair in zip(old.rates, again.rates, strict=True)]
    apart = _difference(again.rates, old.rates)
    return (
        f"| {name} | {statistics.median(both):,.0f} | {statistics.median(new.rates):,.0f} "
        f"| {_difference(new.rates, both):+.1%} | {apart:+.1%} | {_gib(old.memory)}, {_gib(new.memory)} "
        f"| {_apart(old.losses, new.losses)} |"
    )


def _difference(rates: Sequence[float], others: Sequence[float]) -> float:
    return statistics.median(one / other for one, other in zip(rates, others, strict=True)) - 1


def _gib(memory: float | None) -> str:
    return "-" if memory is None else f"{memory / 2**30:.2f}"


def _apart(old: Sequence[float], new: Sequence[float]) -> str:
    """How far the first losses are from each other, as a share."""
    if not old:
        return "-"
    return f"{max(abs(one - other) / abs(one) for one, other in zip(old, new, strict=True)):.1e}"


def work(folder: Path, without: str, benchmark: str, given: Sequence[str]) -> None:
    """Run a benchmark of a folder whose rounds wait for their turn; standard output is for messages alone.

    The modules of the fast class `without` stay plain.
    """
    sys.path[:] = [str(folder), *(path for path in sys.path if Path(path).resolve() != Path(__file__).resolve().parent)]
    messages = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def say(kind: str, **facts: object) -> None:
        print(json.dumps({"kind": kind, **facts}), file=messages, flush=True)

    def hear() -> None:
        if not sys.stdin.readline():
            sys.exit("the comparison has ended")

    table: Any = importlib.import_module("bench.table")
    counted = int(given[given.index("--rounds") + 1])
    plain, summary = table.rounds, table.summary
    rates: list[float] = []

    def in_turn(sides: Mapping[str, Callable[[], object]], number: int, *clock: Any) -> dict[str, list[float]]:
        if number != counted:  # a warm-up
            found: dict[str, list[float]] = plain(sides, number, *clock)
            return found
        first, run = next(iter(sides.items()))
        seconds: list[float] = []
        for _ in range(number):
            say("ready")
            hear()
            seconds += plain({first: run}, 1, *clock)[first]
            say("done")
        return {first: seconds}

    def noted(seconds: Mapping[str, Sequence[float]], *, tokens: Any, **more: Any) -> Any:
        side, own = next(iter(seconds.items()))
        each = tokens[side] if isinstance(tokens, Mapping) else [tokens] * len(own)
        rates[:] = [many / long for many, long in zip(each, own, strict=True)]
        return summary(seconds, tokens=tokens, **more)

    lines: list[Any] = []
    printed = table.table

    def kept(told: Sequence[Any], *names: Any, **more: Any) -> Iterator[str]:
        lines.extend(told)
        found: Iterator[str] = printed(told, *names, **more)
        return found

    table.rounds, table.summary, table.table = in_turn, noted, kept
    if without:
        fast: dict[Any, Any] = importlib.import_module("trivium.fast.choose").FAST
        plain_of = {kind.__name__: plain for plain, kind in fast.items()}
        if without not in plain_of:
            sys.exit(f"{without} is not in the table of fast classes: {', '.join(plain_of)}")
        del fast[plain_of[without]]
    module: Any = importlib.import_module(f"bench.{benchmark}")
    losses: list[Any] = []
    if hasattr(module, "updates"):
        updates = module.updates

        def watched(*job: Any) -> Iterator[Any]:
            for update in updates(*job):
                if len(losses) < LOSSES:
                    losses.append(update.loss.detach().clone())
                yield update

        module.updates = watched
    module.main([*given])
    memory = lines[0].work.memory if lines[0].work else None
    say("report", rates=rates, memory=memory, losses=[float(loss) for loss in losses])


def split(given: Sequence[str]) -> list[list[str]]:
    """The benchmarks between the separators."""
    found = [list(group) for is_end, group in itertools.groupby(given, lambda word: word == "--") if not is_end]
    if not found:
        raise SystemExit("name a benchmark after --, such as: -- train --workload gpt2 --graphs")
    return found


def main(given: Sequence[str] | None = None) -> None:
    words = list(sys.argv[1:] if given is None else given)
    if words[:1] == ["--worker"]:
        return work(Path(words[1]), words[2], words[3], words[4:])
    own, rest = words, list[str]()
    if "--" in words:
        own, rest = words[: words.index("--")], words[words.index("--") :]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path)
    parser.add_argument("--without", default="", metavar="CLASS", help="a fast class that the new version goes without")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--log", type=Path, default=Path(os.devnull), help="for what the benchmarks print")
    args = parser.parse_args(own)
    benchmarks = split(rest)
    if args.rounds < 2:
        raise SystemExit("--rounds is at least 2")
    today = datetime.datetime.now(tz=datetime.UTC).date().isoformat()
    new = f"{args.new} without {args.without}" if args.without else args.new
    print(f"{args.old} against {new}, {args.rounds} rounds each in turn, {today}")
    print("| benchmark | old, a second | new | difference | the old one twice | memory, GiB | losses apart |")
    print("|---|---|---|---|---|---|---|")
    with args.log.open("a") as log:
        compare(args.old.resolve(), args.new.resolve(), args.without, benchmarks, args.rounds, log)


if __name__ == "__main__":
    main()
