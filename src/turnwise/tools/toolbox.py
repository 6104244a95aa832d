"""Typed Python functions as tools: schemas for the chat template, answers for the model.

Whatever a model gets wrong (a name, an argument, a type) and whatever a tool raises is answered in words beginning with
``error: `` and counted; it is never an exception. Knows nothing of episodes, rewards or how a call was parsed.
"""

from __future__ import annotations

import asyncio
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
from turnwise.errors import SettingError, nearest

Answer = tuple[str, bool]  # what the model reads, and whether it is an error
_PLAIN: dict[Any, str] = {str: "string", int: "integer", float: "number", bool: "boolean", type(None): "null"}


class Toolbox:
    """``Toolbox([add])`` with ``def add(a: int, b: int) -> int: "Add two numbers."``"""

    def __init__(self, functions: Iterable[Callable[..., Any]]) -> None:
        self._tools: dict[str, _Tool] = {}
        for function in functions:
            tool = _Tool.of(function)
            if tool.name in self._tools:
                raise SettingError(f"two tools are called {tool.name!r}; rename one")
            self._tools[tool.name] = tool

    @property
    def schemas(self) -> list[dict[str, Any]]:
        """OpenAI tool schemas, in the order given."""
        return [tool.schema() for tool in self._tools.values()]

    def run(self, action: Action) -> tuple[list[Message], int]:
        """Execute every call of an action: one tool message per call or fault, and how many are errors."""
        for tool in self._tools.values():
            if tool.is_async:
                raise SettingError(f"tool {tool.name!r} is async; write `await toolbox.arun(action)`")
        answers = [(call, self._answer(call)) for call in action.calls]
        return _messages(answers, action.faults)

    async def arun(self, action: Action) -> tuple[list[Message], int]:
        """The same, awaiting async tools; one call after another, since a later one may rely on an earlier one."""
        answers = []
        for call in action.calls:
            tool = self._tools.get(call.name)
            if tool is not None and tool.is_async:
                answers.append((call, await self._answer_async(tool, call)))
            else:
                answers.append((call, self._answer(call)))
        return _messages(answers, action.faults)

    def _answer(self, call: ToolCall) -> Answer:
        tool = self._tools.get(call.name)
        if tool is None:
            return f"error: no tool {call.name!r}; {nearest(str(call.name), self._tools)}", True
        arguments, fault = tool.read(call.arguments)
        if fault:
            return fault, True
        try:
            return _text(tool.function(**arguments)), False
        except Exception as error:
            return _raised(error), True

    async def _answer_async(self, tool: _Tool, call: ToolCall) -> Answer:
        arguments, fault = tool.read(call.arguments)
        if fault:
            return fault, True
        try:
            return _text(await tool.function(**arguments)), False
        except asyncio.CancelledError:
            raise
        except Exception as error:
            return _raised(error), True


def _messages(answers: list[tuple[ToolCall, Answer]], faults: Iterable[str]) -> tuple[list[Message], int]:
    out: list[Message] = []
    for call, (content, _) in answers:
        message: Message = {"role": "tool", "name": str(call.name), "content": content}
        out.append(message | {"tool_call_id": call.id} if call.id else message)
    unread = [fault if fault.startswith("error: ") else f"error: {fault}" for fault in faults]
    out += [{"role": "tool", "name": "unknown", "content": content} for content in unread]
    return out, sum(wrong for _, (_, wrong) in answers) + len(unread)


def _raised(error: Exception) -> str:
    return f"error: {type(error).__name__}: {error}".removesuffix(": ")


def _text(value: Any) -> str:
    """What a tool returned, as the model reads it."""
    if isinstance(value, str):
        return value
    try:
        return json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError):
        return str(value)


# ---------------------------------------------------------------- one function


@dataclass(frozen=True, slots=True)
class _Tool:
    name: str
    function: Callable[..., Any]
    description: str
    hints: dict[str, Any]
    required: tuple[str, ...]
    notes: dict[str, str]  # what the docstring says of each parameter

    @staticmethod
    def of(function: Callable[..., Any]) -> _Tool:
        name = getattr(function, "__name__", type(function).__name__)
        types_of = typing.get_type_hints(function)
        hints: dict[str, Any] = {}
        required = []
        for parameter in inspect.signature(function).parameters.values():
            if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD, parameter.POSITIONAL_ONLY):
                raise SettingError(f"tool {name!r}: {parameter} cannot be shown to a model; name every argument")
            if parameter.name not in types_of:
                raise SettingError(f"tool {name!r}: argument {parameter.name!r} has no type; write one")
            hints[parameter.name] = types_of[parameter.name]
            _schema(hints[parameter.name], f"tool {name!r}: argument {parameter.name!r}")
            if parameter.default is parameter.empty:
                required.append(parameter.name)
        description, notes = _document(inspect.getdoc(function) or "", hints)
        if not description:
            raise SettingError(f"tool {name!r} has no docstring; the model reads it, write one")
        return _Tool(name, function, description, hints, tuple(required), notes)

    @property
    def is_async(self) -> bool:
        return inspect.iscoroutinefunction(self.function)

    def schema(self) -> dict[str, Any]:
        properties = {}
        for name, hint in self.hints.items():
            properties[name] = _schema(hint, name)
            if name in self.notes:
                properties[name]["description"] = self.notes[name]
        parameters = {"type": "object", "properties": properties, "required": list(self.required)}
        return {
            "type": "function",
            "function": {"name": self.name, "description": self.description, "parameters": parameters},
        }

    def read(self, given: Any) -> tuple[dict[str, Any], str]:
        """The arguments, converted; or what is wrong with them."""
        if not isinstance(given, dict):
            return {}, f"error: {self.name}: the arguments must be an object, not {_kind(given)}"
        if missing := [name for name in self.required if name not in given]:
            return {}, f"error: {self.name}: missing argument {', '.join(map(repr, missing))}"
        out = {}
        for name, value in given.items():
            if name not in self.hints:
                return {}, f"error: {self.name}: no argument {name!r}; {nearest(str(name), self.hints)}"
            try:
                out[name] = _read(self.hints[name], value)
            except TypeError:
                wanted = _words(self.hints[name])
                return {}, f"error: {self.name}: argument {name!r} must be {wanted}, not {_kind(value)}"
        return out, ""


def _document(doc: str, names: Iterable[str]) -> tuple[str, dict[str, str]]:
    """The text before ``Args:``, and the line of each parameter after it."""
    text, _, rest = doc.partition("Args:")
    found = {name: re.search(rf"^\s*{re.escape(name)}\b[^:\n]*:\s*(.+)$", rest, re.MULTILINE) for name in names}
    return " ".join(text.split()), {name: match.group(1).strip() for name, match in found.items() if match}


# ----------------------------------------------------------------------- types


def _union(hint: Any) -> bool:
    return get_origin(hint) in (Union, types.UnionType)


def _schema(hint: Any, where: str) -> dict[str, Any]:
    """The JSON schema of a type hint."""
    if hint in _PLAIN:
        return {"type": _PLAIN[hint]}
    if hint is Any:
        return {}
    origin, args = get_origin(hint) or hint, get_args(hint)
    if origin is Literal:
        return {"type": _PLAIN[type(args[0])], "enum": list(args)}
    if _union(hint):
        known = [arg for arg in args if arg is not type(None)]
        return _schema(known[0], where) if len(known) == 1 else {"anyOf": [_schema(arg, where) for arg in known]}
    if origin is list:
        return {"type": "array", "items": _schema(args[0], where) if args else {}}
    if origin is dict:
        return {"type": "object"}
    raise SettingError(f"{where} has type {hint}; use str, int, float, bool, list, dict, Literal or a union of them")


def _read(hint: Any, value: Any) -> Any:
    """The value as this type; TypeError when it is another. JSON has one kind of number, so 3.0 is a fine int."""
    origin, args = get_origin(hint) or hint, get_args(hint)
    if hint is Any or (hint in _PLAIN and type(value) is hint):
        return value
    if hint is float and type(value) is int:
        return float(value)
    if hint is int and type(value) is float and value.is_integer():
        return int(value)
    if origin is Literal and any(type(value) is type(arg) and value == arg for arg in args):
        return value
    if _union(hint):
        for arg in args:
            try:
                return _read(arg, value)
            except TypeError:
                continue
    if origin is list and isinstance(value, list):
        return [_read(args[0], item) for item in value] if args else value
    if origin is dict and isinstance(value, dict):
        return {key: _read(args[1], item) for key, item in value.items()} if args else value
    raise TypeError


def _words(hint: Any) -> str:
    origin, args = get_origin(hint) or hint, get_args(hint)
    if origin is Literal:
        return "one of " + ", ".join(map(json.dumps, args))
    if _union(hint):
        return " or ".join(_words(arg) for arg in args)
    if origin is list:
        return f"a list of {_words(args[0])}" if args else "a list"
    return _PLAIN.get(hint, "an object")


def _kind(value: Any) -> str:
    known = _PLAIN | {list: "list", dict: "object"}
    name = known.get(type(value), type(value).__name__)
    shown = json.dumps(value, default=str)
    return f"{name} {shown}" if len(shown) <= 40 else name
