"""Typed Python functions as tools: schemas for the chat template, tool messages for the model.

A wrong name, argument or type in a model's call, and any exception of a tool, becomes a message that begins with
``error: `` and is counted; it is never raised. A machine that ran out of something is (``HostFault``). Does not know about
episodes, rewards or how a call was parsed.
"""

from __future__ import annotations

import inspect
import json
import re
import types
import typing
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal, Union, get_args, get_origin

from turnwise.core.protocols import Action, ToolCall
from turnwise.core.records import Message
from turnwise.errors import HostFault, SettingError, nearest, scarcity

_JSON_TYPES: dict[Any, str] = {str: "string", int: "integer", float: "number", bool: "boolean", type(None): "null"}


class Toolbox:
    """``Toolbox([add])`` with ``def add(a: int, b: int) -> int: "Add two numbers."``"""

    def __init__(self, functions: Iterable[Callable[..., Any]]) -> None:
        self._tools: dict[str, _Tool] = {}
        for function in functions:
            tool = _Tool.from_function(function)
            if tool.name in self._tools:
                raise SettingError(f"two tools are called {tool.name!r}; rename one")
            self._tools[tool.name] = tool

    @property
    def schemas(self) -> list[dict[str, Any]]:
        """OpenAI tool schemas, in the order of the functions."""
        return [tool.schema() for tool in self._tools.values()]

    def run(self, action: Action) -> tuple[list[Message], int]:
        """Execute every call of an action; one tool message per call or parse fault, and the number of errors."""
        for tool in self._tools.values():
            if inspect.iscoroutinefunction(tool.function):
                raise SettingError(f"tool {tool.name!r} is async; write `await toolbox.arun(action)`")
        try:
            self.arun(action).send(None)  # without an async tool it never waits
        except StopIteration as end:
            messages, errors = end.value
            return messages, errors
        raise RuntimeError("a tool returned something to await; write `await toolbox.arun(action)`")

    async def arun(self, action: Action) -> tuple[list[Message], int]:
        """Like :meth:`run`, awaiting async tools. Calls run one after another, since a later one may depend on an earlier one."""
        messages: list[Message] = []
        errors = len(action.faults)
        for call in action.calls:
            text, failed = await self._answer(call)
            errors += failed
            message: Message = {"role": "tool", "name": str(call.name), "content": text}
            messages.append(message | {"tool_call_id": call.id} if call.id else message)
        for fault in action.faults:
            text = fault if fault.startswith("error: ") else f"error: {fault}"
            messages.append({"role": "tool", "name": "unknown", "content": text})
        return messages, errors

    async def _answer(self, call: ToolCall) -> tuple[str, bool]:
        """The text for the model, and whether it is an error."""
        tool = self._tools.get(call.name)
        if tool is None:
            return f"error: no tool {call.name!r}; {nearest(str(call.name), self._tools)}", True
        arguments, fault = tool.parse(call.arguments)
        if fault:
            return fault, True
        try:
            value = tool.function(**arguments)
            value = await value if inspect.iscoroutinefunction(tool.function) else value
        except Exception as error:
            if words := scarcity(error, of_call=True):  # not the model's mistake, so no answer to it
                raise HostFault(words) from error
            return f"error: {type(error).__name__}: {error}".removesuffix(": "), True
        if isinstance(value, str):
            return value, False
        try:
            return json.dumps(value, ensure_ascii=False), False
        except (TypeError, ValueError):
            return str(value), False


# ---------------------------------------------------------------- one function


@dataclass(frozen=True, slots=True)
class _Tool:
    name: str
    function: Callable[..., Any]
    description: str
    hints: dict[str, Any]
    required: tuple[str, ...]
    parameter_docs: dict[str, str]  # from the docstring's ``Args:``

    @staticmethod
    def from_function(function: Callable[..., Any]) -> _Tool:
        name = getattr(function, "__name__", type(function).__name__)
        annotations = typing.get_type_hints(function)
        parameters = inspect.signature(function).parameters
        for key, parameter in parameters.items():
            if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD, parameter.POSITIONAL_ONLY):
                raise SettingError(f"tool {name!r}: {parameter} cannot be shown to a model; name every argument")
            if key not in annotations:
                raise SettingError(f"tool {name!r}: argument {key!r} has no type; write one")
            _schema(annotations[key], f"tool {name!r}: argument {key!r}")  # refuses what has no schema
        hints = {key: annotations[key] for key in parameters}
        required = tuple(key for key, parameter in parameters.items() if parameter.default is parameter.empty)
        # the text before ``Args:``, and the line of each parameter after it
        text, _, documented = (inspect.getdoc(function) or "").partition("Args:")
        lines = {key: re.search(rf"^\s*{re.escape(key)}\b[^:\n]*:\s*(.+)$", documented, re.MULTILINE) for key in hints}
        description, parameter_docs = " ".join(text.split()), {key: m[1].strip() for key, m in lines.items() if m}
        if not description:
            raise SettingError(f"tool {name!r} has no docstring; the model reads it, write one")
        return _Tool(name, function, description, hints, required, parameter_docs)

    def schema(self) -> dict[str, Any]:
        properties = {name: _schema(hint, name) for name, hint in self.hints.items()}
        for name, text in self.parameter_docs.items():
            properties[name]["description"] = text
        parameters = {"type": "object", "properties": properties, "required": list(self.required)}
        function = {"name": self.name, "description": self.description, "parameters": parameters}
        return {"type": "function", "function": function}

    def parse(self, arguments: Any) -> tuple[dict[str, Any], str]:
        """The converted arguments, or an error text for the model."""
        if not isinstance(arguments, dict):
            return {}, f"error: {self.name}: the arguments must be an object, not {_describe(arguments)}"
        if missing := [name for name in self.required if name not in arguments]:
            return {}, f"error: {self.name}: missing argument {', '.join(map(repr, missing))}"
        out = {}
        for name, value in arguments.items():
            if name not in self.hints:
                return {}, f"error: {self.name}: no argument {name!r}; {nearest(str(name), self.hints)}"
            try:
                out[name] = _convert(self.hints[name], value)
            except TypeError:
                expected = _type_name(self.hints[name])
                return {}, f"error: {self.name}: argument {name!r} must be {expected}, not {_describe(value)}"
        return out, ""


# ----------------------------------------------------------------------- types


def _is_union(hint: Any) -> bool:
    return get_origin(hint) in (Union, types.UnionType)


def _schema(hint: Any, where: str) -> dict[str, Any]:
    """The JSON schema of a type hint."""
    if hint in _JSON_TYPES:
        return {"type": _JSON_TYPES[hint]}
    if hint is Any:
        return {}
    origin, args = get_origin(hint) or hint, get_args(hint)
    if origin is Literal:
        return {"type": _JSON_TYPES[type(args[0])], "enum": list(args)}
    if _is_union(hint):
        options = [arg for arg in args if arg is not type(None)]
        return _schema(options[0], where) if len(options) == 1 else {"anyOf": [_schema(arg, where) for arg in options]}
    if origin is list:
        return {"type": "array", "items": _schema(args[0], where) if args else {}}
    if origin is dict:
        return {"type": "object"}
    raise SettingError(f"{where} has type {hint}; use str, int, float, bool, list, dict, Literal or a union of them")


def _convert(hint: Any, value: Any) -> Any:
    """Convert a JSON value to this type, or raise TypeError. JSON has one number type, so 3.0 is accepted as an int."""
    origin, args = get_origin(hint) or hint, get_args(hint)
    if hint is Any or (hint in _JSON_TYPES and type(value) is hint):
        return value
    if hint is float and type(value) is int:
        return float(value)
    if hint is int and type(value) is float and value.is_integer():
        return int(value)
    if origin is Literal and any(type(value) is type(arg) and value == arg for arg in args):
        return value
    if _is_union(hint):
        for arg in args:
            try:
                return _convert(arg, value)
            except TypeError:
                continue
    if origin is list and isinstance(value, list):
        return [_convert(args[0], item) for item in value] if args else value
    if origin is dict and isinstance(value, dict):
        return {key: _convert(args[1], item) for key, item in value.items()} if args else value
    raise TypeError


def _describe(value: Any) -> str:
    name = (_JSON_TYPES | {list: "list", dict: "object"}).get(type(value), type(value).__name__)
    shown = json.dumps(value, default=str)
    return f"{name} {shown}" if len(shown) <= 40 else name


def _type_name(hint: Any) -> str:
    origin, args = get_origin(hint) or hint, get_args(hint)
    if origin is Literal:
        return "one of " + ", ".join(map(json.dumps, args))
    if _is_union(hint):
        return " or ".join(_type_name(arg) for arg in args)
    if origin is list:
        return f"a list of {_type_name(args[0])}" if args else "a list"
    return _JSON_TYPES.get(hint, "an object")
