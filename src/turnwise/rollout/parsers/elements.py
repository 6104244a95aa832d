"""Syntaxes with an element for each argument: Qwen3-Coder, GLM, MiniMax, Seed, DeepSeek V3.2.

Values are written as text, so that ``5`` may be a number or a text: the tool's schema decides, and without one JSON is read as
JSON.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from turnwise.core.protocols import ToolCall
from turnwise.rollout.parsers.syntax import Block, CallFault, Calls, Tools, ToolSyntax, is_text, make_call, skip_space


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
        begin, end = self._with_section(text, start, opening.start(), end)
        try:
            return Block(begin, end, (self._call(opening["name"], body, tools),))
        except CallFault as fault:
            return Block(begin, end, (), (str(fault),))

    def _with_section(self, text: str, start: int, begin: int, end: int) -> tuple[int, int]:
        opening, closing = self.section
        at = text.rfind(opening, start, begin) if opening else -1
        if at >= 0 and not text[at + len(opening) : begin].strip():
            begin = at
        after = skip_space(text, end)
        return begin, after + len(closing) if closing and text.startswith(closing, after) else end

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
        texts = []
        for call in calls:
            arguments = "".join(self._written(key, value) for key, value in call.arguments.items())
            body = self.call_format.format(name=call.name, arguments=arguments)
            texts.append(body if self.one_section else f"{self._open}{body}{self._close}")
        joined = "\n".join(texts)
        return f"{self._open}{joined}{self._close}" if self.one_section else joined

    @property
    def _open(self) -> str:
        return f"{self.section[0]}\n" if self.section[0] else ""

    @property
    def _close(self) -> str:
        return f"\n{self.section[1]}" if self.section[1] else ""

    def _written(self, key: str, value: Any) -> str:
        is_string = isinstance(value, str)
        text = value if is_string else json.dumps(value, ensure_ascii=False)
        return self.argument_format.format(key=key, value=text, typed="true" if is_string else "false")
