"""The training loop is one page: short, without closures, its stages in the order of the textbook."""

from __future__ import annotations

import ast
import inspect
from itertools import pairwise

from trivium.training import loop

# what each stage is called by, in the order in which a reader meets them
STAGES = [
    "torch.manual_seed",
    "job.compute",
    "total",
    "backward",
    "job.optimizer.clip",
    "job.guard.check",
    "job.optimizer.step",
    "job.average.follow",
    "job.optimizer.zero_grad",
]


def code_lines(source: str) -> int:
    """Lines that are neither blank, comment nor docstring: `ast` keeps no comments."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.FunctionDef | ast.ClassDef) and ast.get_docstring(node) is not None:
            node.body = node.body[1:]
    return len([line for line in ast.unparse(tree).splitlines() if line.strip()])


def test_the_loop_fits_on_a_page() -> None:
    assert code_lines(inspect.getsource(loop)) <= 80


def test_a_step_shows_its_stages_in_order_and_hides_none_in_a_closure() -> None:
    step = ast.parse(inspect.getsource(loop.train_step)).body[0]
    assert not [node for node in ast.walk(step) if isinstance(node, ast.Lambda)]
    assert [node for node in ast.walk(step) if isinstance(node, ast.FunctionDef)] == [step]
    calls = [node for node in ast.walk(step) if isinstance(node, ast.Call)]
    places = [min(call.lineno for call in calls if ast.unparse(call.func).endswith(name)) for name in STAGES]
    assert all(first < second for first, second in pairwise(places))
