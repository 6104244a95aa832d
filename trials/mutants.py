"""Small faults in Python source: flipped comparisons and signs, other constants, min for max, dropped factors, off by one.

Makes mutants of a source text, one change each; runs nothing. Annotations, decorators, docstrings and messages are left as
they are: a change there changes no behaviour.
"""

from __future__ import annotations

import ast
import copy
from collections.abc import Iterator
from dataclasses import dataclass

COMPARISONS: dict[type[ast.cmpop], tuple[type[ast.cmpop], ...]] = {
    ast.Lt: (ast.LtE, ast.GtE),
    ast.LtE: (ast.Lt, ast.Gt),
    ast.Gt: (ast.GtE, ast.LtE),
    ast.GtE: (ast.Gt, ast.Lt),
    ast.Eq: (ast.NotEq,),
    ast.NotEq: (ast.Eq,),
    ast.Is: (ast.IsNot,),
    ast.IsNot: (ast.Is,),
    ast.In: (ast.NotIn,),
    ast.NotIn: (ast.In,),
}
ARITHMETIC: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
}
NAMES = {
    "min": "max", "amin": "amax", "argmin": "argmax", "minimum": "maximum", "cummin": "cummax", "any": "all", "floor": "ceil",
    "sum": "mean", "exp": "log", "fmin": "fmax",
}  # fmt: skip
NAMES |= {other: one for one, other in NAMES.items() if one not in ("sum", "exp")}


@dataclass(frozen=True)
class Mutant:
    """One change of one expression: where it is, what it was, what it becomes."""

    file: str
    function: str  # the innermost named scope: Class.method, a function, a class, or the module
    line: int
    operator: str
    before: str
    after: str
    span: tuple[int, int]  # bytes of the file

    @property
    def key(self) -> str:
        """Its name for a list of equivalent mutants: independent of line numbers."""
        return f"{self.file}::{self.function}: {self.before} → {self.after}"

    def apply(self, source: bytes) -> bytes:
        """The source with the change in it."""
        return source[: self.span[0]] + f"({self.after})".encode() + source[self.span[1] :]


def mutants(source: str, file: str) -> list[Mutant]:
    """Every mutant of a file, in the order of its text."""
    starts = [0]
    for line in source.encode().splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    made = []
    for node, scope in _expressions(ast.parse(source), ()):
        assert node.end_lineno is not None and node.end_col_offset is not None
        span = starts[node.lineno - 1] + node.col_offset, starts[node.end_lineno - 1] + node.end_col_offset
        for operator, changed in _changes(node):
            before, after = ast.unparse(node), ast.unparse(changed)
            made.append(Mutant(file, ".".join(scope) or "module", node.lineno, operator, before, after, span))
    return made


def _expressions(node: ast.AST, scope: tuple[str, ...]) -> Iterator[tuple[ast.expr, tuple[str, ...]]]:
    """Expressions that compute something, with the names of the scopes they are in."""
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        scope = (*scope, node.name)
    if isinstance(node, ast.expr):
        yield node, scope
    for field, value in ast.iter_fields(node):
        if field in ("annotation", "returns", "decorator_list", "bases", "type_comment"):
            continue
        children = value if isinstance(value, list) else [value]
        for child in children:
            if isinstance(child, ast.AST) and not _silent(child):
                yield from _expressions(child, scope)


def _silent(node: ast.AST) -> bool:
    """Messages, docstrings and lists of public names."""
    if isinstance(node, ast.JoinedStr | ast.Raise):
        return True
    if isinstance(node, ast.Assign):
        return any(isinstance(target, ast.Name) and target.id == "__all__" for target in node.targets)
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def _changes(node: ast.expr) -> Iterator[tuple[str, ast.expr]]:
    match node:
        case ast.Compare(ops=ops):
            for at, op in enumerate(ops):
                for other in COMPARISONS.get(type(op), ()):
                    changed = copy.deepcopy(node)
                    changed.ops[at] = other()
                    yield "comparison", changed
        case ast.BinOp():
            yield from _arithmetic(node)
        case ast.UnaryOp(op=ast.USub() | ast.Not() | ast.Invert(), operand=operand):
            yield "sign", operand
        case ast.BoolOp(op=op, values=values):
            yield "and/or", ast.BoolOp(ast.Or() if isinstance(op, ast.And) else ast.And(), values)
        case ast.IfExp(test=test, body=body, orelse=orelse):
            yield "branches", ast.IfExp(test, orelse, body)
        case ast.Constant(value=value):
            yield from _constants(value)
        case ast.Call():
            yield from _calls(node)


def _arithmetic(node: ast.BinOp) -> Iterator[tuple[str, ast.expr]]:
    if type(node.op) in ARITHMETIC:
        yield "arithmetic", ast.BinOp(node.left, ARITHMETIC[type(node.op)](), node.right)
    if isinstance(node.op, ast.Mult | ast.Div | ast.Pow):
        yield "dropped factor", node.left
    if isinstance(node.op, ast.Mult):
        yield "dropped factor", node.right


def _constants(value: object) -> Iterator[tuple[str, ast.expr]]:
    if isinstance(value, bool):
        yield "constant", ast.Constant(not value)
    elif isinstance(value, int):
        yield "off by one", ast.Constant(value + 1)
    elif isinstance(value, float):
        yield "constant", ast.Constant(value * 2 if value else 1.0)


def _calls(node: ast.Call) -> Iterator[tuple[str, ast.expr]]:
    match node.func:
        case ast.Name(id=name) if name in NAMES:
            yield "min/max", ast.Call(ast.Name(NAMES[name]), node.args, node.keywords)
        case ast.Attribute(value=owner, attr=name) if name in NAMES:
            yield "min/max", ast.Call(ast.Attribute(owner, NAMES[name]), node.args, node.keywords)
        case ast.Name(id="where") if len(node.args) == 3:
            yield "branches", ast.Call(node.func, [node.args[0], node.args[2], node.args[1]], node.keywords)
        case ast.Attribute(attr="clamp"):
            for at in range(len(node.keywords)):
                yield "dropped bound", ast.Call(node.func, node.args, node.keywords[:at] + node.keywords[at + 1 :])
