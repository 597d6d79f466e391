"""Runs the tests of one module against each of its mutants: `python -m tests.mutation.worker REQUEST`, in JSON.

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
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, SourceFileLoader
from pathlib import Path
from types import CodeType, FrameType, ModuleType
from typing import Any

import pytest
from hypothesis import Phase, settings

from tests.mutation.mutants import mutants

Trace = Callable[[FrameType, str, Any], Any]
# fmt: off
OPTIONS = (
    "-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-p", "no:faulthandler", "--assert=plain", "--tb=no",
)
# fmt: on


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """Which module is mutated, and the tests that should notice."""

    root: str  # the folder that module and tests are in
    module: str  # its dotted name
    tests: Sequence[str]  # files, or ids of single tests
    libraries: Sequence[str] = ()  # imported once, before all children
    spare: float = 5.0  # seconds of a processor that a child has beyond three times those of the unchanged module


class Plan:
    """A pytest plugin. In a first run it writes down each test's seconds, and the lines of the module that it runs; in
    later ones it chooses the tests that run some of `lines`, the fastest first.
    """

    def __init__(self, module: str, path: Path) -> None:
        self.module = module  # the file
        self.path = path
        self.known: dict[str, tuple[float, list[int]]] = json.loads(path.read_text()) if path.exists() else {}
        self.lines = range(0)  # none: all tests
        self._seconds: dict[str, float] = {}
        self._lines: dict[str, set[int]] = {}

    def runs(self, test: str) -> bool:
        if not self.lines or test not in self.known:  # a mutant may change the name of a test
            return True
        return any(line in self.lines for line in self.known[test][1])

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items[:] = [item for item in items if self.runs(item.nodeid)]
        items.sort(key=lambda item: self.known.get(item.nodeid, (0.0, []))[0])

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        if not self.known:
            found = self._lines[nodeid] = set()

            def trace(frame: FrameType, event: str, arg: object) -> Trace | None:
                if frame.f_code.co_filename != self.module:
                    return None
                found.add(frame.f_lineno)
                return trace

            sys.settrace(trace)

    def pytest_runtest_logfinish(self) -> None:
        if not self.known:
            sys.settrace(None)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._seconds[report.nodeid] = self._seconds.get(report.nodeid, 0.0) + report.duration

    def pytest_sessionfinish(self) -> None:
        if not self.known:
            plan = {test: (self._seconds[test], sorted(lines)) for test, lines in self._lines.items()}
            self.path.write_text(json.dumps(plan))


class Compiled(SourceFileLoader):
    """Loads a module from code that is compiled already."""

    def __init__(self, name: str, path: Path, code: CodeType) -> None:
        super().__init__(name, str(path))
        self.code = code

    def get_code(self, fullname: str) -> CodeType:
        return self.code


class Mutated(MetaPathFinder):
    """Finds code in the place of the file of one module."""

    def __init__(self, name: str, path: Path, code: CodeType) -> None:
        self.name = name
        self.loader = Compiled(name, path, code)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self.name:
            return None
        return importlib.util.spec_from_file_location(fullname, self.loader.path, loader=self.loader)


class Tests:
    """The tests of a module, run in a child for each mutant of it."""

    def __init__(self, tests: Sequence[str], module: str, folder: Path) -> None:
        self.tests = tests
        self.module = module  # the file
        self.folder = folder
        self.seconds = 600.0  # of a processor that a child may use

    def outcome(self, mutated: Mutated, lines: range) -> str:
        """What they say to a mutant: `killed`, `survived`, or `slow` if it took too long, which kills it too."""
        plan = Plan(self.module, self.folder / "plan.json")
        plan.lines = lines
        if plan.known and not any(map(plan.runs, plan.known)):
            return "survived"
        child = os.fork()
        if child == 0:
            self._run(mutated, plan)
        _, status = os.waitpid(child, 0)
        shutil.rmtree(self.folder / "pytest", ignore_errors=True)
        if os.WIFSIGNALED(status):
            return "slow" if os.WTERMSIG(status) in (signal.SIGXCPU, signal.SIGALRM, signal.SIGKILL) else "killed"
        code = os.WEXITSTATUS(status)
        if code in (pytest.ExitCode.INTERNAL_ERROR, pytest.ExitCode.NO_TESTS_COLLECTED):
            raise SystemExit("pytest failed, not a test: were the tests changed in the meantime?")
        return "survived" if code == pytest.ExitCode.OK else "killed"

    def _run(self, mutated: Mutated, plan: Plan) -> None:
        code = 1
        try:
            quiet = os.open(os.devnull, os.O_WRONLY)
            os.dup2(quiet, 1)
            os.dup2(quiet, 2)
            # processor time, since the machine may be busy; a child that waits for ever uses none
            resource.setrlimit(resource.RLIMIT_CPU, (int(self.seconds), int(self.seconds) + 1))
            signal.alarm(10 * int(self.seconds))
            sys.meta_path.insert(0, mutated)
            options = [*OPTIONS, f"--basetemp={self.folder}/pytest", *self.tests]
            code = int(pytest.main(options, plugins=[plan]))
        finally:
            os._exit(code)


def main(request: Request) -> None:
    """Print one line of JSON for every mutant."""
    for library in request.libraries:
        importlib.import_module(library)
    os.chdir(request.root)
    sys.path.insert(0, request.root)
    sys.dont_write_bytecode = True
    # the same examples each time, none of them kept, and none made smaller: that they fail is enough
    settings.register_profile("mutation", database=None, derandomize=True, phases=(Phase.explicit, Phase.generate))
    settings.load_profile("mutation")
    name = request.module
    path = Path(*name.split(".")).with_suffix(".py")
    source = path.read_text()
    with tempfile.TemporaryDirectory() as folder:
        tests = Tests(request.tests, str(path), Path(folder))
        code = compile(source, path, "exec", dont_inherit=True)
        if tests.outcome(Mutated(name, path, code), range(0)) != "survived":
            raise SystemExit(f"the tests fail on {name} as it is: {' '.join(request.tests)}")
        tests.seconds = request.spare + 3 * resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
        for mutant in mutants(source, str(path)):
            outcome = tests.outcome(Mutated(name, path, mutant.code), mutant.lines)
            print(json.dumps({"function": mutant.function, "change": mutant.change, "outcome": outcome}), flush=True)


if __name__ == "__main__":
    main(Request(**json.loads(sys.argv[1])))
