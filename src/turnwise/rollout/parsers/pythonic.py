"""Syntaxes that write calls as Python expressions: Llama 4's list, Gemma's fenced ``tool_code``, LFM2, OLMo 3.

Expressions are parsed and their literals read; nothing is evaluated.
"""

from __future__ import annotations

import ast
import re
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from turnwise.core.protocols import ToolCall
from turnwise.rollout.parsers.syntax import Block, CallFault, Calls, Tools, ToolSyntax, skip_space

MAX_CHARACTERS = 100_000  # Python's parser needs memory and stack in proportion to its input
JSON_NAMES = {"true": True, "false": False, "null": None}
PAIRS = {"(": ")", "[": "]", "{": "}"}
_TOKEN = re.compile(r'"""|\'\'\'|["\'()\[\]{}]')
_STRING_ENDS = {
    quote: re.compile(rf"(?:\\.|(?!{quote})[^\\])*{quote}", re.DOTALL) for quote in ('"', "'", '"""', "'''")
}


def expression_end(text: str, at: int) -> int:
    """Where the bracket that opens at ``at`` closes, quotes considered; -1 if it does not."""
    expected: list[str] = []
    while match := _TOKEN.search(text, at):
        token, at = match[0], match.end()
        if token in PAIRS:
            expected.append(PAIRS[token])
        elif token in PAIRS.values():
            if not expected or token != expected.pop():
                return -1
            if not expected:
                return at
        else:
            closing = _STRING_ENDS[token].match(text, at)
            if closing is None:
                return -1
            at = closing.end()
    return -1


def parse_python(source: str) -> list[ToolCall]:
    """The calls of a program whose statements are calls, lists of calls, or ``print`` of a call."""
    if len(source) > MAX_CHARACTERS:
        raise CallFault(f"error: the tool call is longer than {MAX_CHARACTERS} characters")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of escapes that Python does not know
            tree = ast.parse(source.strip())
        return [call for statement in tree.body for call in _calls(statement)]
    except (SyntaxError, ValueError, RecursionError, MemoryError) as fault:
        reason = getattr(fault, "msg", None) or type(fault).__name__
        raise CallFault(f"error: the tool call is no Python call: {reason:.80}") from None


def _calls(node: ast.AST) -> Iterator[ToolCall]:
    if isinstance(node, ast.Expr):
        node = node.value
    if isinstance(node, ast.List | ast.Tuple):
        for item in node.elts:
            yield from _calls(item)
        return
    if not isinstance(node, ast.Call):
        raise CallFault("error: a tool call is NAME(ARGUMENT=VALUE), and nothing else")
    name = _dotted(node.func)
    if name == "print" and len(node.args) == 1 and isinstance(node.args[0], ast.Call) and not node.keywords:
        yield from _calls(node.args[0])
        return
    if node.args or any(keyword.arg is None for keyword in node.keywords):
        raise CallFault(f"error: the arguments of {name} need names: {name}(ARGUMENT=VALUE)")
    yield ToolCall(name, {str(keyword.arg): _value(keyword.value) for keyword in node.keywords})


def _dotted(node: ast.AST) -> str:
    if isinstance(node, ast.Attribute):
        return f"{_dotted(node.value)}.{node.attr}"
    if isinstance(node, ast.Name):
        return node.id
    raise CallFault("error: a tool call begins with the name of a tool")


def _value(node: ast.AST) -> Any:
    """A literal: JSON's types, in Python's words or in JSON's."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str | int | float | None):
        return node.value
    if isinstance(node, ast.Name) and node.id in JSON_NAMES:
        return JSON_NAMES[node.id]
    if isinstance(node, ast.List | ast.Tuple):
        return [_value(item) for item in node.elts]
    if isinstance(node, ast.Dict):
        keys = [_value(key) if key is not None else None for key in node.keys]
        if all(isinstance(key, str) for key in keys):
            return dict(zip(keys, map(_value, node.values)))
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.UAdd):
        number = _value(node.operand)
        if isinstance(number, int | float) and not isinstance(number, bool):
            return -number if isinstance(node.op, ast.USub) else number
    raise CallFault("error: an argument of a tool call is a text, a number, True, False, None, a list or a dict")


def read_call(text: str, start: int, expression: int, name: str, bracket: int) -> Block:
    """The block of a call ``name(...)`` whose bracket opens at ``bracket``."""
    end = expression_end(text, bracket)
    if end < 0:
        return Block(start, len(text), (), ("error: a bracket of the tool call is not closed",))
    try:
        (call,) = parse_python("f" + text[bracket:end])
    except CallFault as fault:
        return Block(start, end, (), (str(fault),))
    return Block(start, end, (ToolCall(name, call.arguments),))


def write_call(call: ToolCall, *escape: str) -> str:
    """One call as Python; the texts of ``escape`` do not occur in its literals."""
    values = []
    for key, value in call.arguments.items():
        text = repr(value)
        for marker in escape:
            text = text.replace(marker, f"\\x{ord(marker[0]):02x}{marker[1:]}") if marker else text
        values.append(f"{key}={text}")
    return f"{call.name}({', '.join(values)})"


_BARE = re.compile(r"(?:<\|python_start\|>\s*)?\[\s*[^\W\d][\w.]*\(")


@dataclass(frozen=True)
class PythonList(ToolSyntax):
    """``[f(a=1), g()]`` anywhere in a turn."""

    def next_block(self, text: str, start: int, tools: Tools) -> Block | None:
        match = _BARE.search(text, start)
        if match is None:
            return None
        bracket = text.index("[", match.start())
        end = expression_end(text, bracket)
        if end < 0:
            return Block(match.start(), len(text), (), ("error: a bracket of the tool call is not closed",))
        after = skip_space(text, end)
        closed = after + len("<|python_end|>") if text.startswith("<|python_end|>", after) else end
        try:
            return Block(match.start(), closed, tuple(parse_python(text[bracket:end])))
        except CallFault as fault:
            return Block(match.start(), closed, (), (str(fault),))

    def write_calls(self, calls: Calls, tools: Tools) -> str:
        return f"[{', '.join(map(write_call, calls))}]"


@dataclass(frozen=True)
class DelimitedPython(ToolSyntax):
    """Python calls between two texts, as one list or one call a line."""

    opening: str = "<|tool_call_start|>"
    closing: str = "<|tool_call_end|>"
    is_list: bool = True

    def next_block(self, text: str, start: int, tools: Tools) -> Block | None:
        begin = text.find(self.opening, start)
        if begin < 0:
            return None
        at = begin + len(self.opening)
        close = text.find(self.closing, at)
        end = len(text) if close < 0 else close + len(self.closing)
        try:
            calls = tuple(parse_python(text[at : len(text) if close < 0 else close]))
        except CallFault as fault:
            return Block(begin, end, (), (str(fault),))
        return Block(begin, end, calls, () if calls else ("error: the tool call is empty",))

    def write_calls(self, calls: Calls, tools: Tools) -> str:
        texts = [write_call(call, self.closing) for call in calls]
        if self.is_list:
            return f"{self.opening}[{', '.join(texts)}]{self.closing}"
        return "\n".join([self.opening, *texts, self.closing])
