"""Runs the tests of one module against each of its mutants: `python -m tests.mutation.worker ROOT MODULE TESTS...`.

A process that has imported the large libraries, and nothing of ours, forks for every mutant. The child imports the
mutant in the place of the module and runs pytest up to the first failure. Nothing is written into the source tree.
"""

from __future__ import annotations

import importlib.util
import json
import os
import resource
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType

import pytest
from hypothesis import Phase, settings

from tests.mutation.mutants import mutants

# fmt: off
OPTIONS = (
    "-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-p", "no:faulthandler", "--assert=plain", "--tb=no",
)
# fmt: on
LIBRARIES = ("numpy", "torch", "_hypothesis_pytestplugin", "transformers.generation.logits_process")
SPARE = 10.0  # seconds of a processor that a child has beyond five times those of the unchanged module


class FastestFirst:
    """A pytest plugin: runs tests in the order of the times that an earlier run wrote down, or writes them down."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.seconds: dict[str, float] = json.loads(path.read_text()) if path.exists() else {}
        self.measured: dict[str, float] = {}

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items.sort(key=lambda item: self.seconds.get(item.nodeid, 0.0))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.measured[report.nodeid] = self.measured.get(report.nodeid, 0.0) + report.duration

    def pytest_sessionfinish(self) -> None:
        if not self.seconds:
            self.path.write_text(json.dumps(self.measured))


class Mutated(MetaPathFinder, SourceFileLoader):
    """Imports one module from code instead of its file."""

    def __init__(self, name: str, path: Path, code: CodeType) -> None:
        super().__init__(name, str(path))
        self.code = code

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        return (
            importlib.util.spec_from_file_location(fullname, self.path, loader=self) if fullname == self.name else None
        )

    def get_code(self, fullname: str) -> CodeType:
        return self.code


class Tests:
    """The tests of a module, run in a child for each mutant of it."""

    def __init__(self, tests: Sequence[str], folder: Path) -> None:
        self.tests = tests
        self.folder = folder
        self.seconds = 600.0  # of a processor that a child may use

    def outcome(self, module: Mutated) -> str:
        """What they say to a mutant: `killed`, `survived`, or `slow` if it took too long, which kills it too."""
        child = os.fork()
        if child == 0:
            self._run(module)
        _, status = os.waitpid(child, 0)
        shutil.rmtree(self.folder / "pytest", ignore_errors=True)
        if os.WIFSIGNALED(status):
            return "slow" if os.WTERMSIG(status) in (signal.SIGXCPU, signal.SIGALRM, signal.SIGKILL) else "killed"
        return "survived" if os.WEXITSTATUS(status) == pytest.ExitCode.OK else "killed"

    def _run(self, module: Mutated) -> None:
        code = 1
        try:
            quiet = os.open(os.devnull, os.O_WRONLY)
            os.dup2(quiet, 1)
            os.dup2(quiet, 2)
            # processor time, since the machine may be busy; a child that waits for ever uses none
            resource.setrlimit(resource.RLIMIT_CPU, (int(self.seconds), int(self.seconds) + 1))
            signal.alarm(10 * int(self.seconds))
            sys.meta_path.insert(0, module)
            options = [*OPTIONS, f"--basetemp={self.folder}/pytest", *self.tests]
            code = int(pytest.main(options, plugins=[FastestFirst(self.folder / "seconds.json")]))
        finally:
            os._exit(code)


def main(root: str, name: str, *tests: str) -> None:
    """Print one line of JSON for every mutant of the module `name` in the folder `root`."""
    os.chdir(root)
    sys.path.insert(0, root)
    sys.dont_write_bytecode = True
    # the same examples each time, none of them kept, and none made smaller: that they fail is enough
    settings.register_profile("mutation", database=None, derandomize=True, phases=(Phase.explicit, Phase.generate))
    settings.load_profile("mutation")
    path = Path(*name.split(".")).with_suffix(".py")
    source = path.read_text()
    with tempfile.TemporaryDirectory() as folder:
        run = Tests(tests, Path(folder))
        if run.outcome(Mutated(name, path, compile(source, path, "exec", dont_inherit=True))) != "survived":
            raise SystemExit(f"the tests fail on {name} as it is: {' '.join(tests)}")
        run.seconds = SPARE + 5 * resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
        for mutant in mutants(source, str(path)):
            began = time.monotonic()
            outcome = run.outcome(Mutated(name, path, mutant.code))
            seconds = round(time.monotonic() - began, 2)
            result = {"function": mutant.function, "change": mutant.change, "outcome": outcome, "seconds": seconds}
            print(json.dumps(result), flush=True)


if __name__ == "__main__":
    for library in LIBRARIES:
        importlib.import_module(library)
    main(*sys.argv[1:])
