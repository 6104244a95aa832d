"""Syntaxes that write a call, or a list of calls, as JSON with its name inside: Hermes, Mistral, Llama 3 and their relatives."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from functools import cached_property

from turnwise.core.protocols import ToolCall
from turnwise.rollout.parsers.pythonic import read_call
from turnwise.rollout.parsers.syntax import (
    NEEDS,
    Block,
    CallFault,
    Calls,
    Tools,
    ToolSyntax,
    call_of,
    read_json,
    skip_space,
    write_json,
)

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
        try:
            calls = tuple(call_of(item) for item in value)
        except CallFault as fault:
            return Block(match.start(), end, (), (str(fault),))
        fence = re.compile(r"\s*```").match(text, end) if match[0].startswith("```") else None
        return Block(match.start(), fence.end() if fence else end, calls)

    def write_calls(self, calls: Calls, tools: Tools) -> str:
        return write_json([{"name": call.name, "arguments": call.arguments} for call in calls])
