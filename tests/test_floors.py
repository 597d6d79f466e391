"""The plain floor is a textbook: nothing in it knows a device, a compiler or a kernel."""

from __future__ import annotations

import ast
import io
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[1] / "trivium"
PLAIN = sorted(path for room in ("parts", "models") for path in (PACKAGE / room).rglob("*.py"))
FORBIDDEN = {
    "is_cuda",
    "is_cpu",
    "is_grad_enabled",
    "is_compiling",
    "is_autocast_enabled",
    "get_autocast_dtype",
    "find_spec",
}
LONGEST = {"parts/attention.py": 200, "parts/feedforward.py": 130, "parts/linear.py": 40}


def known_devices(source: str) -> Iterator[str]:
    """What a file asks of devices, gradients and compilers, and the fast rooms that it imports."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute):
            whole = ast.unparse(node)
            if node.attr in FORBIDDEN or whole.endswith("device.type") or whole.startswith("torch.cuda"):
                yield whole
        if isinstance(node, ast.Name) and node.id in FORBIDDEN:
            yield node.id
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(("trivium.kernels", "trivium.fast")):
            yield node.module or ""
        if isinstance(node, ast.ImportFrom | ast.Import):
            yield from (alias.name for alias in node.names if alias.name in ("torch.cuda", "triton"))


@pytest.mark.parametrize("path", PLAIN, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_a_plain_module_knows_no_device(path: Path) -> None:
    assert not list(known_devices(path.read_text()))


@pytest.mark.parametrize(
    "source",
    [
        "x.device.type == 'cuda'",
        "x.is_cuda",
        "torch.cuda.is_available()",
        "torch.is_grad_enabled()",
        "torch.compiler.is_compiling()",
        "from trivium.kernels import fp8",
        "from importlib.util import find_spec\nfind_spec('triton')",
    ],
)
def test_the_rule_for_plain_modules_has_teeth(source: str) -> None:
    assert list(known_devices(source))


def code_lines(source: str) -> int:
    """Lines without blank ones, comments and docstrings."""
    lines: set[int] = set()
    skipped = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
    docstrings = {
        node.body[0].lineno
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)
        and ast.get_docstring(node, clean=False) is not None
    }
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in skipped and not (token.type == tokenize.STRING and token.start[0] in docstrings):
            lines |= set(range(token.start[0], token.end[0] + 1))
    return len(lines)


@pytest.mark.parametrize(("name", "most"), LONGEST.items())
def test_the_textbook_is_short(name: str, most: int) -> None:
    assert code_lines((PACKAGE / name).read_text()) <= most


def test_one_place_asks_for_triton() -> None:
    asking = [path.relative_to(PACKAGE) for path in PACKAGE.rglob("*.py") if 'find_spec("triton")' in path.read_text()]
    assert asking == [Path("kernels/hardware.py")]
