"""The house stands as drawn: who may import whom, and what no file may contain (S1, S2)."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[1] / "trivium"
ROWS = (
    ("errors", "labels", "layers", "outside", "renamed", "threads", "config_write"),  # needs nothing of the others
    ("files", "suggest"),  # bounded reads, for those below
    ("records",),
    ("config_read",),
    ("config", "report", "stats"),
    ("text", "parts", "kernels"),
    ("data", "models", "distributed"),
    ("objectives", "optim", "checkpoints", "planner"),
    ("fast",),
    ("adapters", "interop", "generation", "lens"),
    ("evaluation",),
    ("training", "server"),
    ("compare", "overview"),
    ("handle",),
    ("api",),
    ("cli",),
    ("__main__",),
)
ROW_OF = {name: row for row, names in enumerate(ROWS) for name in names}
FILES = sorted(PACKAGE.rglob("*.py"))


def room(path: Path) -> str:
    inner = path.relative_to(PACKAGE)
    return inner.parts[0] if len(inner.parts) > 1 else inner.stem


def imported(tree: ast.AST) -> Iterator[str]:
    """Every module that a file imports, wherever the statement stands."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports hide the row"
            assert node.module
            yield node.module
            if node.module == "trivium":
                yield from (f"trivium.{alias.name}" for alias in node.names)


def rooms(source: str) -> set[str]:
    names = (module.split(".") for module in imported(ast.parse(source)))
    return {parts[1] for parts in names if parts[0] == "trivium" and len(parts) > 1 and parts[1] != "__version__"}


def wrong_edges(own: str, source: str) -> set[str]:
    """The rooms that a file of the room `own` must not import: its own row and those below."""
    return {other for other in rooms(source) if other != own and ROW_OF[other] >= ROW_OF[own]}


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_a_package_imports_only_from_rows_above_its_own(path: Path) -> None:
    own = room(path)
    if own == "__init__":  # re-exports api.py, lazily
        assert rooms(path.read_text()) <= {"api", "threads"}
        return
    assert own in ROW_OF, f"{own} has no row"
    assert not wrong_edges(own, path.read_text())


def test_the_import_rule_catches_a_wrong_edge() -> None:
    assert wrong_edges("parts", "from trivium.models.config import Block") == {"models"}
    assert wrong_edges("text", "def f():\n    import trivium.parts.norms") == {"parts"}
    assert wrong_edges("models", "from trivium import data") == {"data"}
    assert not wrong_edges("models", "from trivium.parts.norms import Norm")


@pytest.mark.parametrize("name", ROWS[0] + ROWS[1] + ROWS[2] + ROWS[3])
def test_row_zero_does_without_torch(name: str) -> None:
    for path in (PACKAGE / f"{name}.py", *(PACKAGE / name).rglob("*.py")):
        if path.is_file():
            assert not {module.split(".")[0] for module in imported(ast.parse(path.read_text()))} & {"torch", "numpy"}


def forbidden(source: str) -> list[str]:
    """Ways to run code or unpickle what a file holds."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Name)
            and node.func.id in ("eval", "exec", "__import__")
        ):
            found.append(node.func.id)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            whole = f"{node.value.id}.{node.attr}"
            if whole in ("torch.load", "builtins.eval", "builtins.exec", "pickle.load", "pickle.loads"):
                found.append(whole)
        if isinstance(node, ast.keyword) and node.arg in ("allow_pickle", "trust_remote_code", "weights_only"):
            found.append(node.arg)
    names = {module.split(".")[0] for module in imported(ast.parse(source))}
    return found + sorted(names & {"pickle", "cPickle", "dill", "cloudpickle", "shelve", "marshal", "jinja2"})


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_no_file_can_run_code_or_unpickle(path: Path) -> None:
    assert not forbidden(path.read_text())


@pytest.mark.parametrize(
    "source", ["eval('1')", "import pickle", "torch.load(p)", "np.load(p, allow_pickle=True)", "from dill import loads"]
)
def test_the_rule_against_running_code_has_teeth(source: str) -> None:
    assert forbidden(source)


def test_import_module_names_only_the_api() -> None:
    """The one lazy import of the package takes a literal, never a value."""
    calls = [
        (path.name, node)
        for path in FILES
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and "import_module" in ast.dump(node.func)
    ]
    assert [(name, [ast.literal_eval(argument) for argument in node.args]) for name, node in calls] == [
        ("__init__.py", ["trivium.api"])
    ]
