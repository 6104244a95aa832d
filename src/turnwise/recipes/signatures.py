"""Names and hyper-parameters of the built-in methods, read from the source of the families without importing them.

Importing a family imports torch, which takes seconds; a misspelt method or flag is refused at once. A test compares every
signature with the imported one. Knows no method: the names are those of the functions in ``families``.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, Literal, TypeVar

from turnwise.config.named_object import typed_value
from turnwise.errors import SettingError, nearest

FOLDER = Path(__file__).parent / "families"
NAMES: dict[str, Any] = {"Literal": Literal, "INF": float("inf")}  # what a signature may name besides Python's own
RENAMED = {  # other names, and what to write for them
    "agentflow": "AgentFlow trains its planner by flow_grpo; ",
    "rome": "ROME's method is ipa; ",
    "v0": "what had this name is probe_baseline, a probe of hidden states; V0's allocation is --budget v0; ",
}
Parameters = dict[str, inspect.Parameter]
Build = TypeVar("Build", bound=Callable[..., object])


@cache
def method_names() -> tuple[str, ...]:
    """Every built-in method, sorted by name."""
    return tuple(sorted(_functions()))


def check_method(name: str) -> None:
    """Refuse an unknown method, or an unknown credit of ``METHOD+CREDIT``, with the nearest one. A name of the user's own
    (``module:recipe``) is not opened here."""
    method, *credit = name.split("+")
    for part in (method, *filter(None, credit)):
        if ":" not in part and part not in _functions():
            file = f"a file is given as --data {part} or --config {part}; " if "." in part else ""
            hint = file or RENAMED.get(part) or nearest(part, method_names()).partition("known:")[0]
            raise SettingError(f"no method {part!r}; {hint}`turnwise list` shows all; your own: module:recipe")


def parameters(name: str) -> Parameters:
    """The hyper-parameters of a method, with types and defaults; a recipe of the user's own is imported for them."""
    if ":" in name:
        from turnwise import recipes

        return recipes.parameters(name)
    check_method(name)
    # arguments as `inspect.signature(..., eval_str=True)` gives them
    function = _functions()[name]
    arguments, by_position = function.args, inspect.Parameter.POSITIONAL_OR_KEYWORD
    assert not (arguments.vararg or arguments.kwarg or arguments.posonlyargs), function.name
    without = [None] * (len(arguments.args) - len(arguments.defaults))
    rows = [
        *((arg, default, by_position) for arg, default in zip(arguments.args, [*without, *arguments.defaults])),
        *((a, d, inspect.Parameter.KEYWORD_ONLY) for a, d in zip(arguments.kwonlyargs, arguments.kw_defaults)),
    ]
    return {
        arg.arg: inspect.Parameter(arg.arg, kind, default=_value(default), annotation=_value(arg.annotation))
        for arg, default, kind in rows
    }


def suggests(**settings: object) -> Callable[[Build], Build]:
    """Decorator: settings of a run that belong to the method and that no slot holds. They apply where the user gives none."""

    def mark(build: Build) -> Build:
        build.suggests = settings  # type: ignore[attr-defined]
        return build

    return mark


def suggested_settings(name: str) -> dict[str, Any]:
    """The settings that a method ``suggests``; none of a name that is no method."""
    if ":" in name:
        from turnwise import recipes

        return dict(getattr(recipes.method(name), "suggests", {}))
    marks = _functions()[name].decorator_list if name in _functions() else []
    calls = [mark for mark in marks if isinstance(mark, ast.Call) and ast.unparse(mark.func) == "suggests"]
    return {word.arg: _value(word.value) for call in calls for word in call.keywords if word.arg}


def typed_options(name: str, options: dict[str, Any], declared: Parameters | None = None) -> dict[str, Any]:
    """The options of a method by their declared types; an unknown one is refused with the nearest name."""
    declared = parameters(name) if declared is None else declared
    for key in options:
        if key not in declared:
            raise SettingError(f"{name} has no hyper-parameter {key!r}; {nearest(key, declared)}")
    return {key: typed_value(key, value, declared[key]) for key, value in options.items()}


@cache
def _functions() -> dict[str, ast.FunctionDef]:
    trees = [ast.parse(path.read_text(encoding="utf-8")) for path in sorted(FOLDER.glob("*.py"))]
    functions = (node for tree in trees for node in tree.body if isinstance(node, ast.FunctionDef))
    return {f.name: f for f in functions if f.returns is not None and ast.unparse(f.returns) == "Recipe"}


def _value(node: ast.expr | None) -> Any:
    """A default or an annotation of our own source. An annotation that names a type of another module is left open: the
    registry converts by it later."""
    if node is None:
        return inspect.Parameter.empty
    try:
        return eval(compile(ast.Expression(node), "<signature>", "eval"), dict(NAMES))
    except NameError:
        return inspect.Parameter.empty
