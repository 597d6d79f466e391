"""Mutants of a module's source: each has one small fault that a test should notice."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from types import CodeType
from typing import Any

# fmt: off
OPERATORS: dict[type[ast.AST], type[ast.AST]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
    ast.And: ast.Or, ast.Or: ast.And,
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.FloorDiv: ast.Div,
    ast.Mod: ast.FloorDiv, ast.Pow: ast.Mult, ast.LShift: ast.RShift, ast.RShift: ast.LShift, ast.BitXor: ast.BitOr,
}
CALLS = {
    "min": "max", "max": "min", "amin": "amax", "amax": "amin", "minimum": "maximum", "maximum": "minimum",
    "any": "all", "all": "any", "sorted": "list", "bisect_left": "bisect_right", "bisect_right": "bisect_left",
}
# fmt: on
DELETED = (ast.Assign, ast.AugAssign, ast.AnnAssign, ast.Expr, ast.Raise, ast.Return, ast.Continue, ast.Break)
# An annotation and a decorator are declarations; an assert states what only a bug could break, and no test reaches it.
SKIPPED_FIELDS = {"annotation", "returns", "decorator_list", "format_spec"}
SKIPPED_NODES = (ast.Assert, ast.Import, ast.ImportFrom)

LEAST_TEXT = 16  # characters that tell most expressions of a function apart


@dataclass(frozen=True, slots=True)
class Mutant:
    """One change of a module. `function` and `change` (the new source text) name it, so that lines may move."""

    function: str
    change: str
    lines: range  # of its statement, or of the head of a compound one; none where it runs on import
    code: CodeType


@dataclass(frozen=True, slots=True)
class _Site:
    """A node of the tree: the one at `field` (and `index`, in a list) of the last of those above it."""

    function: str
    above: tuple[ast.AST, ...]
    field: str
    index: int | None
    node: ast.AST

    @property
    def parent(self) -> ast.AST:
        return self.above[-1]

    def put(self, node: ast.AST) -> None:
        if self.index is None:
            setattr(self.parent, self.field, node)
        else:
            getattr(self.parent, self.field)[self.index] = node


def mutants(source: str, filename: str) -> Iterator[Mutant]:
    """Every mutant of the source, in the order of its lines."""
    tree = ast.parse(source, filename)
    counts: Counter[tuple[str, str]] = Counter()
    for site in list(_sites((tree,), "")):
        for new in _variants(site):
            site.put(new)
            change = _described(site, new)
            code = compile(ast.fix_missing_locations(tree), filename, "exec", dont_inherit=True)
            site.put(site.node)
            counts[site.function, change] += 1
            count = counts[site.function, change]
            yield Mutant(site.function, change if count == 1 else f"{change} ({count})", _lines(site), code)


def _sites(above: tuple[ast.AST, ...], function: str) -> Iterator[_Site]:
    """All nodes below the last of `above` that run, with the dotted name of the function or class around them."""
    node = above[-1]
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        function = f"{function}.{node.name}" if function else node.name
    for field, value in ast.iter_fields(node):
        if field in SKIPPED_FIELDS:
            continue
        for index, child in enumerate(value) if isinstance(value, list) else [(None, value)]:
            if isinstance(child, ast.AST) and not isinstance(child, SKIPPED_NODES):
                yield _Site(function, above, field, index, child)
                yield from _sites((*above, child), function)


def _variants(site: _Site) -> Iterator[ast.AST]:
    """What may stand in the place of a node."""
    match site.node:
        case ast.Constant(value=bool(value)):
            yield ast.Constant(not value)
        case ast.Constant(value=int(value) | float(value)):
            yield ast.Constant(value + 1)
        case ast.UnaryOp(op=ast.Not() | ast.USub(), operand=operand):
            yield operand
        case ast.Name(id=name) if name in CALLS and site.field == "func":
            yield ast.Name(CALLS[name], ast.Load())
        case ast.Attribute(value=value, attr=name) if name in CALLS and site.field == "func":
            yield ast.Attribute(value, CALLS[name], ast.Load())
        case ast.Return(value=ast.expr() as value) if not isinstance(value, ast.Constant):
            yield ast.Return(ast.Constant(None))
        case operator if type(operator) in OPERATORS:
            yield OPERATORS[type(operator)]()
    if site.field in ("defaults", "kw_defaults") and not isinstance(site.node, ast.Constant):
        yield ast.Constant(None)
    if _can_go(site):
        yield ast.Pass()


def _can_go(site: _Site) -> bool:
    """Whether a statement may be deleted: one that does something, and a condition without an else."""
    node: Any = site.node
    if isinstance(node, ast.If):
        return not node.orelse
    if not isinstance(node, DELETED) or isinstance(site.parent, ast.ClassDef):
        return False
    if isinstance(node, ast.Return):  # of a value: None in its place does the same; at the end it says nothing
        is_last = isinstance(site.parent, ast.FunctionDef) and site.parent.body[-1] is node
        return isinstance(node.value, ast.Constant | None) and not is_last
    if isinstance(node, ast.AnnAssign):
        return node.value is not None
    return not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant))


def _described(site: _Site, new: ast.AST) -> str:
    """The change in words, or the changed text with as much around it as says where it is, up to its statement."""
    if isinstance(new, ast.Pass):
        return f"delete {_text(site.node)}"
    if isinstance(new, ast.Return):
        return f"None for {_text(site.node)}"
    text = ""
    for node in reversed(site.above):
        text = _text(node)
        if isinstance(node, ast.stmt) or len(text) >= LEAST_TEXT:
            break
    return text


def _lines(site: _Site) -> range:
    """The lines of the statement around a node that run when its function is called."""
    *outer, statement = [node for node in (*site.above, site.node) if isinstance(node, ast.stmt)]
    if not any(isinstance(node, ast.FunctionDef) for node in outer):
        return range(0)
    body = getattr(statement, "body", None)
    return range(statement.lineno, body[0].lineno if body else (statement.end_lineno or 0) + 1)


def _text(node: ast.AST) -> str:
    """The source of a node on one line; of a compound statement its head."""
    return ast.unparse(node).split("\n")[0]
