"""The table of known tool-call syntaxes, and the one way to look one up."""

from __future__ import annotations

import ast
import json
import re
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from turnwise.core.protocols import ToolCall
from turnwise.errors import RenderError, SettingError, nearest
from turnwise.rollout.parsers.syntax import (
    NEEDS,
    Block,
    CallFault,
    Calls,
    Tags,
    Tools,
    ToolSyntax,
    call_of,
    is_text,
    make_call,
    read_block,
    read_json,
    skip_space,
    with_section,
    write_json,
)

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
    return read_block(start, end, lambda: [replace(c, name=name) for c in parse_python("f" + text[bracket:end])])


def write_call(call: ToolCall, *escape: str) -> str:
    """One call as Python; the texts of ``escape`` do not occur in its literals."""
    values = []
    for key, value in call.arguments.items():
        text = repr(value)
        for marker in escape:
            text = text.replace(marker, f"\\x{ord(marker[0]):02x}{marker[1:]}") if marker else text
        values.append(f"{key}={text}")
    return f"{call.name}({', '.join(values)})"


_PYTHON_LIST = re.compile(r"(?:<\|python_start\|>\s*)?\[\s*[^\W\d][\w.]*\(")


@dataclass(frozen=True)
class PythonList(ToolSyntax):
    """``[f(a=1), g()]`` anywhere in a turn."""

    def next_block(self, text: str, start: int, tools: Tools) -> Block | None:
        match = _PYTHON_LIST.search(text, start)
        if match is None:
            return None
        bracket = text.index("[", match.start())
        end = expression_end(text, bracket)
        if end < 0:
            return Block(match.start(), len(text), (), ("error: a bracket of the tool call is not closed",))
        after = skip_space(text, end)
        closed = after + len("<|python_end|>") if text.startswith("<|python_end|>", after) else end
        return read_block(match.start(), closed, lambda: parse_python(text[bracket:end]))

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
        block = read_block(begin, end, lambda: parse_python(text[at : len(text) if close < 0 else close]))
        return block if block.calls or block.faults else replace(block, faults=("error: the tool call is empty",))

    def write_calls(self, calls: Calls, tools: Tools) -> str:
        texts = [write_call(call, self.closing) for call in calls]
        if self.is_list:
            return f"{self.opening}[{', '.join(texts)}]{self.closing}"
        return "\n".join([self.opening, *texts, self.closing])


_ID = re.compile(r"[A-Za-z0-9]{9}")


@dataclass(frozen=True)
class DelimitedJson(ToolSyntax):
    """JSON between two texts. White space in ``opening`` stands for any white space; ``closing`` may be empty."""

    opening: str = "<tool_call>"
    closing: str = "</tool_call>"
    is_list: bool = False  # one list of calls; otherwise one object for each call
    name_key: str = "name"
    arguments_keys: tuple[str, ...] = ("arguments",)
    ascii_only: bool = False
    with_ids: bool = False  # of nine letters and digits: the templates refuse others

    @cached_property
    def _opening(self) -> re.Pattern[str]:
        return re.compile(r"\s*".join(map(re.escape, self.opening.split())))

    def next_block(self, text: str, start: int, tools: Tools) -> Block | None:
        opening = self._opening.search(text, start)
        if opening is None:
            return None
        try:
            value, end = self._value(text, opening.end())
        except CallFault as fault:
            close = text.find(self.closing, opening.end()) if self.closing else -1
            return Block(opening.start(), len(text) if close < 0 else close + len(self.closing), (), (str(fault),))
        calls, faults = self._calls(value)
        return Block(opening.start(), end, calls, faults)

    def _value(self, text: str, at: int) -> tuple[object, int]:
        """The JSON behind an opening, and where its closing ends. A missing closing is accepted at the end of the text."""
        close = text.find(self.closing, at) if self.closing else -1
        body_end = len(text) if close < 0 else close
        try:
            value, end = read_json(text, at)
        except CallFault:
            if close >= 0:
                read_json(text[:body_end], at)  # the message describes this call, not the text behind it
            raise
        end = skip_space(text, end)
        if not self.closing or end == len(text):
            return value, end
        if text.startswith(self.closing.strip(), end):
            return value, end + len(self.closing.strip())
        read_json(text[:body_end], at)
        raise CallFault("error: the tool call is not JSON: Extra data")

    def _calls(self, value: object) -> tuple[tuple[ToolCall, ...], tuple[str, ...]]:
        calls: list[ToolCall] = []
        faults: list[str] = []
        for item in value if self.is_list and isinstance(value, list) else [value]:
            try:
                call = call_of(item, self.name_key, self.arguments_keys)
                calls.append(call if not self.with_ids or _ID.fullmatch(call.id) else replace(call, id=""))
            except CallFault as fault:
                faults.append(str(fault))
        return tuple(calls), tuple(faults)

    def write_calls(self, calls: Calls, tools: Tools) -> str:
        objects = [self._object(call, n) for n, call in enumerate(calls)]
        bodies = [objects] if self.is_list else objects
        texts = [write_json(body, self.closing, ascii_only=self.ascii_only) for body in bodies]
        return "".join(f"{self.opening}{text}{self.closing}" for text in texts)

    def _object(self, call: ToolCall, index: int) -> dict[str, object]:
        value: dict[str, object] = {self.name_key: call.name, self.arguments_keys[0]: call.arguments}
        return {**value, "id": call.id or self.call_id(call.name, index)} if self.with_ids else value

    def call_id(self, name: str, index: int) -> str:
        return f"{index:09d}" if self.with_ids else str(index)


_PYTHON_TAG = "<|python_tag|>"
_OBJECT = re.compile(r'(?:<\|python_tag\|>\s*)?\{\s*"(?:name|type|id)"\s*:|<\|python_tag\|>')
_BUILT_IN = re.compile(r"\s*([\w.-]+)\.call(?=\()")


@dataclass(frozen=True)
class BareJsonObjects(ToolSyntax):
    """Objects with ``name`` and ``parameters`` anywhere in a turn, separated by nothing, white space, ``;`` or ``,``."""

    def next_block(self, text: str, start: int, tools: Tools) -> Block | None:
        for match in _OBJECT.finditer(text, start):
            block = self._block(text, match)
            if block is not None:
                return block
        return None

    def _block(self, text: str, match: re.Match[str]) -> Block | None:
        tagged = match[0].startswith(_PYTHON_TAG)
        at = match.start() + len(_PYTHON_TAG) * tagged
        if tagged and (built_in := _BUILT_IN.match(text, at)):
            return read_call(text, match.start(), built_in.start(1), built_in[1], built_in.end())
        try:
            value, end = read_json(text, at)
            is_call = isinstance(value, dict) and isinstance(value.get("name"), str)
            if not tagged and not (is_call and {"parameters", "arguments"} & value.keys()):
                return None  # an object that is an answer
            call = call_of(value, arguments_keys=("parameters", "arguments"))
        except CallFault as fault:
            announced = tagged or re.search(r'"(?:parameters|arguments)"\s*:', text[at:])
            return Block(match.start(), len(text), (), (str(fault),)) if announced else None
        separator = re.compile(r"\s*[;,]").match(text, end)
        return Block(match.start(), separator.end() if separator else end, (call,))

    def write_calls(self, calls: Calls, tools: Tools) -> str:
        return "; ".join(write_json({"name": call.name, "parameters": call.arguments}) for call in calls)


_LIST = re.compile(r'(?:```(?:json)?\s*)?\[\s*\{\s*"(?:name|id|type)"\s*:')


@dataclass(frozen=True)
class BareJsonList(ToolSyntax):
    """A list of objects with ``name`` and ``arguments``, bare or in a fenced block."""

    def next_block(self, text: str, start: int, tools: Tools) -> Block | None:
        match = _LIST.search(text, start)
        if match is None:
            return None
        try:
            value, end = read_json(text, text.index("[", match.start()))
        except CallFault as fault:
            return Block(match.start(), len(text), (), (str(fault),))
        if not all(isinstance(item, dict) and "name" in item and "arguments" in item for item in value):
            return Block(match.start(), end, (), (NEEDS,))
        block = read_block(match.start(), end, lambda: map(call_of, value))
        fence = re.compile(r"\s*```").match(text, end) if match[0].startswith("```") else None
        return replace(block, end=fence.end()) if fence and not block.faults else block

    def write_calls(self, calls: Calls, tools: Tools) -> str:
        return write_json([{"name": call.name, "arguments": call.arguments} for call in calls])


@dataclass(frozen=True)
class HeadedJson(ToolSyntax):
    """``call_open HEADER {...} call_close``, all calls of a turn inside ``section``. ``header`` is a pattern with the group
    ``name`` and perhaps ``id``; ``header_format`` writes it."""

    section: tuple[str, str] = ("", "")
    call_open: str = ""
    call_close: str = ""
    header: str = ""
    header_format: str = "{name}"
    arguments_close: str = ""
    id_format: str = "{index}"

    def next_block(self, text: str, start: int, tools: Tools) -> Block | None:
        begin = text.find(self.call_open, start)
        if begin < 0:
            return None
        try:
            call, end = self._call(text, begin + len(self.call_open))
        except CallFault as fault:
            close = text.find(self.call_close, begin) if self.call_close else -1
            end = len(text) if close < 0 else close + len(self.call_close)
            return Block(*with_section(self.section, text, start, begin, end), (), (str(fault),))
        return Block(*with_section(self.section, text, start, begin, end), (call,))

    def _call(self, text: str, at: int) -> tuple[ToolCall, int]:
        header = re.compile(self.header).match(text, at)
        if header is None:
            raise CallFault(f"error: the tool call has no readable name; write {self.example}")
        arguments, end = read_json(text, header.end())
        if not isinstance(arguments, dict):
            raise CallFault(NEEDS)
        for closing in (self.arguments_close.strip(), self.call_close):
            after = skip_space(text, end)
            if closing and text.startswith(closing, after):
                end = after + len(closing)
            elif closing and after < len(text):
                raise CallFault("error: the arguments of the tool call are not one JSON object")
        return make_call(header["name"], arguments, header.groupdict().get("id") or ""), end

    def write_calls(self, calls: Calls, tools: Tools) -> str:
        texts = []
        for n, call in enumerate(calls):
            header = self.header_format.format(name=call.name, index=n)
            arguments = write_json(call.arguments, self.call_close)
            texts.append(f"{self.call_open}{header}{arguments}{self.arguments_close}{self.call_close}")
        return self.section[0] + "".join(texts) + self.section[1]

    def call_id(self, name: str, index: int) -> str:
        return self.id_format.format(name=name, index=index)


@dataclass(frozen=True)
class ElementSyntax(ToolSyntax):
    """``call`` and ``argument`` are patterns with the groups ``name``, and ``key``, ``value`` and perhaps ``typed``. A
    ``section`` surrounds each call, or all of them if ``one_section``."""

    section: tuple[str, str] = ("", "")
    one_section: bool = False
    call: str = ""
    call_close: str = ""
    argument: str = ""
    call_format: str = ""
    argument_format: str = ""
    own_lines: bool = False  # a value stands on lines of its own

    def next_block(self, text: str, start: int, tools: Tools) -> Block | None:
        opening = re.compile(self.call).search(text, start)
        if opening is None:
            return None
        close = text.find(self.call_close, opening.end())
        body = text[opening.end() : len(text) if close < 0 else close]
        end = len(text) if close < 0 else close + len(self.call_close)
        begin, end = with_section(self.section, text, start, opening.start(), end)
        return read_block(begin, end, lambda: [self._call(opening["name"], body, tools)])

    def _call(self, name: str, body: str, tools: Tools) -> ToolCall:
        pattern = re.compile(self.argument, re.DOTALL)
        arguments = {m["key"]: self._value(m.groupdict(), name, tools) for m in pattern.finditer(body)}
        if pattern.sub("", body).strip():
            raise CallFault(f"error: the arguments of {name:.60} cannot be read; write {self.example}")
        return make_call(name, arguments)

    def _value(self, match: Mapping[str, str], function: str, tools: Tools) -> Any:
        text = match["value"]
        if self.own_lines:
            text = text.removeprefix("\n").removesuffix("\n")
        typed = match.get("typed")
        text_only = is_text(tools, function, match["key"]) if typed is None else typed == "true"
        if text_only:
            return text
        try:
            return json.loads(text)
        except (ValueError, RecursionError):
            return text

    def write_calls(self, calls: Calls, tools: Tools) -> str:
        opening, closing = f"{self.section[0]}\n".lstrip("\n"), f"\n{self.section[1]}".rstrip("\n")
        texts = []
        for call in calls:
            arguments = ""
            for key, value in call.arguments.items():
                is_string = isinstance(value, str)
                text = value if is_string else json.dumps(value, ensure_ascii=False)
                arguments += self.argument_format.format(key=key, value=text, typed="true" if is_string else "false")
            body = self.call_format.format(name=call.name, arguments=arguments)
            texts.append(body if self.one_section else f"{opening}{body}{closing}")
        joined = "\n".join(texts)
        return f"{opening}{joined}{closing}" if self.one_section else joined


_KEY = re.compile(r"\s*([^\s:{}\[\],]+)\s*:")
_WORD = re.compile(r"[^\s,{}\[\]:]+")
MAX_DEPTH = 100


@dataclass(frozen=True)
class GemmaCalls(ToolSyntax):
    """``opening call:f{a:1,b:QtextQ} closing``, with the quote Q."""

    opening: str = "<|tool_call>"
    closing: str = "<tool_call|>"
    quote: str = '<|"|>'

    def next_block(self, text: str, start: int, tools: Tools) -> Block | None:
        begin = text.find(self.opening, start)
        if begin < 0:
            return None
        close = text.find(self.closing, begin)
        end = len(text) if close < 0 else close + len(self.closing)
        body = text[begin + len(self.opening) : len(text) if close < 0 else close]
        return read_block(begin, end, lambda: [self._call(body)])

    def _call(self, body: str) -> ToolCall:
        header = re.compile(r"\s*call:([^\s{]+)\s*(?=\{)").match(body)
        if header is None:
            raise CallFault(f"error: the tool call has no readable name; write {self.example}")
        arguments, at = self._read(body, header.end(), 0)
        if body[at:].strip():
            raise CallFault("error: the arguments of the tool call are not one object")
        return make_call(header[1], arguments)

    def _read(self, text: str, at: int, depth: int) -> tuple[Any, int]:
        at = skip_space(text, at)
        if depth > MAX_DEPTH:
            raise CallFault("error: the arguments of the tool call are nested too deeply")
        if text.startswith(self.quote, at):
            end = text.find(self.quote, at + len(self.quote))
            if end < 0:
                raise CallFault("error: a text of the tool call is not closed")
            return text[at + len(self.quote) : end], end + len(self.quote)
        if text.startswith("{", at):
            value: dict[str, Any] = {}
            at += 1
            while not text.startswith("}", at := skip_space(text, at)):
                key = _KEY.match(text, at)
                if key is None:
                    raise CallFault("error: an argument of the tool call has no readable name")
                value[key[1]], at = self._read(text, key.end(), depth + 1)
                at = self._separated(text, at, "}")
            return value, at + 1
        if text.startswith("[", at):
            items: list[Any] = []
            at += 1
            while not text.startswith("]", at := skip_space(text, at)):
                item, at = self._read(text, at, depth + 1)
                items.append(item)
                at = self._separated(text, at, "]")
            return items, at + 1
        word = _WORD.match(text, at)
        if word is None:
            raise CallFault("error: a value of the tool call is missing")
        try:
            return json.loads(word[0]), word.end()
        except ValueError:
            return word[0], word.end()

    def _separated(self, text: str, at: int, closing: str) -> int:
        at = skip_space(text, at)
        if text.startswith(",", at):
            return at + 1
        if not text.startswith(closing, at):
            raise CallFault(f"error: the tool call lacks a , or {closing}")
        return at

    def write_calls(self, calls: Calls, tools: Tools) -> str:
        return "".join(f"{self.opening}call:{call.name}{self._written(call.arguments)}{self.closing}" for call in calls)

    def _written(self, value: Any) -> str:
        if isinstance(value, str):
            return f"{self.quote}{value}{self.quote}"
        if isinstance(value, dict):
            return "{" + ",".join(f"{key}:{self._written(item)}" for key, item in value.items()) + "}"
        if isinstance(value, list):
            return "[" + ",".join(map(self._written, value)) + "]"
        return json.dumps(value)


CALL = "<|call|>"
_MESSAGE_END = re.compile(r"<\|end\|>|<\|call\|>|<\|return\|>")
_ANALYSIS = re.compile(
    r"(?:<\|start\|>assistant)?(?: to=\S+?)?<\|channel\|>analysis[^<]*(?:<\|constrain\|>[^<]*)?<\|message\|>"
)
ANALYSIS: Tags = ((_ANALYSIS, _MESSAGE_END),)
_HEADER = re.compile(
    r"(?:<\|start\|>assistant)?(?:\s*to=(?P<before>[^\s<]+))?\s*<\|channel\|>(?:commentary|final)(?:\s+to=(?P<after>[^\s<]+))?"
    r"(?P<rest>[^<]*(?:<\|constrain\|>[^<]*)?)<\|message\|>"
)
_MARKUP = re.compile(
    r"(?:<\|start\|>assistant)?(?:<\|channel\|>[^<]*(?:<\|constrain\|>[^<]*)?<\|message\|>)|<\|end\|>|<\|return\|>|<\|start\|>assistant"
)


@dataclass(frozen=True)
class Harmony(ToolSyntax):
    """A commentary message to ``functions.NAME`` is a call. The analysis channel is thinking."""

    thinking: Tags = ANALYSIS
    turn_end: str = CALL

    def next_block(self, text: str, start: int, tools: Tools) -> Block | None:
        for header in _HEADER.finditer(text, start):
            recipient = header["before"] or header["after"]
            if recipient:
                return self._block(text, header, recipient.removeprefix("functions."))
        return None

    def _block(self, text: str, header: re.Match[str], name: str) -> Block:
        try:
            arguments, end = read_json(text, header.end())
            if not isinstance(arguments, dict):
                raise CallFault(NEEDS)
            call = make_call(name, arguments)
        except CallFault as fault:
            close = _MESSAGE_END.search(text, header.end())
            return Block(header.start(), close.end() if close else len(text), (), (str(fault),))
        close = re.compile(r"\s*<\|(?:call|end)\|>").match(text, end)
        return Block(header.start(), close.end() if close else end, (call,))

    def clean(self, text: str) -> str:
        return _MARKUP.sub("", text)

    def write_calls(self, calls: Calls, tools: Tools) -> str:
        if len(calls) > 1:
            raise RenderError("the tool-call syntax harmony has one call a turn; write the calls in separate turns")
        return "".join(
            f"<|channel|>commentary to=functions.{call.name} <|constrain|>json<|message|>{write_json(call.arguments)}{CALL}"
            for call in calls
        )


AUTO = "auto"

HERMES = DelimitedJson(
    "hermes", "Qwen 2.5, Qwen 3, Hermes, SmolLM, EXAONE 4, Granite 4, our tiny model", ("<tool_call>",), ascii_only=True
)  # fmt: skip


def _list(name: str, families: str, opening: str, closing: str = "", **more: object) -> DelimitedJson:
    return DelimitedJson(name, families, (opening.strip(),), opening=opening, closing=closing, is_list=True, **more)  # type: ignore[arg-type]


_ELEMENTS = (
    ElementSyntax(
        "qwen3_coder", "Qwen3-Coder, Qwen 3.5, Nemotron 3, Step 3.5", ("<function=", "<tool_call>"),
        section=("<tool_call>", "</tool_call>"), call=r"<function=(?P<name>[^>\n]+)>", call_close="</function>",
        argument=r"<parameter=(?P<key>[^>\n]+)>(?P<value>.*?)</parameter>",
        call_format="<function={name}>\n{arguments}</function>",
        argument_format="<parameter={key}>\n{value}\n</parameter>\n", own_lines=True,
    ),
    ElementSyntax(
        "seed", "Seed-OSS", ("<seed:tool_call>",),
        section=("<seed:tool_call>", "</seed:tool_call>"), call=r"<function=(?P<name>[^>\n]+)>",
        call_close="</function>", argument=r"<parameter=(?P<key>[^>\n]+)>(?P<value>.*?)</parameter>",
        call_format="<function={name}>\n{arguments}</function>",
        argument_format="<parameter={key}>{value}</parameter>\n",
    ),
    ElementSyntax(
        "glm", "GLM 4.5 and later", ("<arg_key>", "<tool_call>"),
        call=r"<tool_call>\s*(?P<name>[^\s<{][^<\n]*?)\s*?(?=\n|<)", call_close="</tool_call>",
        argument=r"<arg_key>(?P<key>.*?)</arg_key>\s*<arg_value>(?P<value>.*?)</arg_value>",
        call_format="<tool_call>{name}\n{arguments}</tool_call>",
        argument_format="<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n",
    ),
    ElementSyntax(
        "minimax", "MiniMax M2", ("<minimax:tool_call>",),
        section=("<minimax:tool_call>", "</minimax:tool_call>"), one_section=True,
        call=r'<invoke name="(?P<name>[^"\n]+)">', call_close="</invoke>",
        argument=r'<parameter name="(?P<key>[^"\n]+)">(?P<value>.*?)</parameter>',
        call_format='<invoke name="{name}">\n{arguments}</invoke>',
        argument_format='<parameter name="{key}">{value}</parameter>\n',
    ),
    ElementSyntax(
        "deepseek_v32", "DeepSeek V3.2", ("<｜DSML｜function_calls>", "<｜DSML｜invoke"),
        section=("<｜DSML｜function_calls>", "</｜DSML｜function_calls>"), one_section=True,
        call=r'<｜DSML｜invoke name="(?P<name>[^"\n]+)">', call_close="</｜DSML｜invoke>",
        argument=r'<｜DSML｜parameter name="(?P<key>[^"\n]+)" string="(?P<typed>true|false)">(?P<value>.*?)</｜DSML｜parameter>',
        call_format='<｜DSML｜invoke name="{name}">\n{arguments}</｜DSML｜invoke>',
        argument_format='<｜DSML｜parameter name="{key}" string="{typed}">{value}</｜DSML｜parameter>\n',
    ),
)  # fmt: skip

_HEADED = (
    HeadedJson(
        "deepseek_v3", "DeepSeek V3, R1 and its distilled models", ("<｜tool▁call▁begin｜>", "<｜tool▁calls▁begin｜>"),
        section=("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"), call_open="<｜tool▁call▁begin｜>",
        call_close="<｜tool▁call▁end｜>", header=r"function<｜tool▁sep｜>(?P<name>[^\n<]+)\s*```json\s*",
        header_format="function<｜tool▁sep｜>{name}\n```json\n", arguments_close="\n```",
    ),
    HeadedJson(
        "deepseek_v31", "DeepSeek V3.1", ("<｜tool▁call▁begin｜>", "<｜tool▁calls▁begin｜>"),
        section=("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"), call_open="<｜tool▁call▁begin｜>",
        call_close="<｜tool▁call▁end｜>", header=r"(?P<name>[^\n<]+)<｜tool▁sep｜>\s*(?=\{)",
        header_format="{name}<｜tool▁sep｜>",
    ),
    HeadedJson(
        "kimi", "Kimi K2", ("<|tool_call_begin|>", "<|tool_calls_section_begin|>"),
        section=("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"), call_open="<|tool_call_begin|>",
        call_close="<|tool_call_end|>",
        header=r"\s*(?P<id>(?:functions\.)?(?P<name>[^\n<]+):\d+)\s*<\|tool_call_argument_begin\|>",
        header_format="functions.{name}:{index}<|tool_call_argument_begin|>", id_format="functions.{name}:{index}",
    ),
    HeadedJson(
        "mistral_v11", "Mistral Small 3.2, Magistral, Devstral", ("[TOOL_CALLS]", "[ARGS]"), call_open="[TOOL_CALLS]",
        header=r"\s*(?P<name>[^\s\[\]{}]+)\s*(?:\[CALL_ID\](?P<id>\w+))?\s*\[ARGS\]", header_format="{name}[ARGS]",
        id_format="{index:09d}",
    ),
    HeadedJson(
        "llama_function", "Llama 3.1 with user-defined tools", ("<function=",), call_open="<function=",
        call_close="</function>", header=r"(?P<name>[^>\n]+)>", header_format="{name}>",
    ),
)  # fmt: skip

_JSON = (
    _list("mistral", "Mistral 7B v0.3, Nemo, Large 2407", "[TOOL_CALLS]", with_ids=True),
    _list("granite", "Granite 3", "<|tool_call|>"),
    _list("phi4", "Phi-4-mini", "<|tool_call|>", "<|/tool_call|>"),
    _list("functools", "Phi-4-mini with functools", "functools"),
    _list(
        "command", "Command R7B, Command A", "<|START_ACTION|>", "<|END_ACTION|>", name_key="tool_name",
        arguments_keys=("parameters",),
    ),
    _list(
        "command_r", "Command R", "Action:\n```json\n", "\n```", name_key="tool_name", arguments_keys=("parameters",)
    ),
    _list("hunyuan", "Hunyuan A13B, Jamba", "<tool_calls>", "</tool_calls>"),
    _list("nemotron", "Nemotron Nano 2, Llama-Nemotron", "<TOOLCALL>", "</TOOLCALL>"),
    DelimitedJson(
        "internlm", "InternLM 2.5 and 3", ("<|action_start|>",), opening="<|action_start|><|plugin|>",
        closing="<|action_end|>", arguments_keys=("parameters", "arguments"),
    ),
    DelimitedJson(
        "longcat", "LongCat", ("<longcat_tool_call>",), opening="<longcat_tool_call>", closing="</longcat_tool_call>"
    ),
)  # fmt: skip

_PYTHON = (
    DelimitedPython("lfm2", "LFM2", ("<|tool_call_start|>",)),
    DelimitedPython(
        "olmo3", "OLMo 3", ("<function_calls>",), opening="<function_calls>", closing="</function_calls>", is_list=False
    ),
    DelimitedPython(
        "tool_code", "Gemma 2 and 3 as Google's guide prompts them", ("```tool_code",),
        reply="```tool_output\n{content}\n```", opening="```tool_code", closing="```", is_list=False,
    ),
)  # fmt: skip

_OTHERS = (
    GemmaCalls("gemma4", "Gemma 4", ("<|tool_call>",)),
    GemmaCalls(
        "function_gemma", "FunctionGemma", ("<start_function_call>",), opening="<start_function_call>",
        closing="<end_function_call>", quote="<escape>",
    ),
    Harmony("harmony", "gpt-oss", ("to=functions.",)),
)  # fmt: skip

_BARE = (
    BareJsonObjects("llama3", "Llama 3.1, 3.2, 3.3", ("<|python_tag|>",), bare=True),
    BareJsonList("xlam", "xLAM", (), bare=True),
    PythonList("pythonic", "Llama 4, ToolACE", ("<|python_start|>",), bare=True),
)

SYNTAXES: Mapping[str, ToolSyntax] = {
    syntax.name: syntax for syntax in (HERMES, *_ELEMENTS, *_HEADED, *_JSON, *_PYTHON, *_OTHERS, *_BARE)
}


def check_name(name: str) -> None:
    """Refuse a name that is neither ``auto`` nor in the table."""
    if name != AUTO and name not in SYNTAXES:
        raise SettingError(f"no tool-call syntax {name!r}; {nearest(name, (AUTO, *SYNTAXES))}")
