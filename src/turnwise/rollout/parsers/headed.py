"""Syntaxes with the name of the tool before its JSON arguments: DeepSeek, Kimi, Mistral from v11 on, Llama's function tags."""

from __future__ import annotations

import re
from dataclasses import dataclass

from turnwise.core.protocols import ToolCall
from turnwise.rollout.parsers.syntax import (
    NEEDS,
    Block,
    CallFault,
    Calls,
    Tools,
    ToolSyntax,
    make_call,
    read_json,
    skip_space,
    write_json,
)


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
            return Block(self._section_start(text, start, begin), self._section_end(text, end), (), (str(fault),))
        return Block(self._section_start(text, start, begin), self._section_end(text, end), (call,))

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

    def _section_start(self, text: str, start: int, begin: int) -> int:
        opening = self.section[0]
        at = text.rfind(opening, start, begin) if opening else -1
        return at if at >= 0 and not text[at + len(opening) : begin].strip() else begin

    def _section_end(self, text: str, end: int) -> int:
        after = skip_space(text, end)
        return after + len(self.section[1]) if self.section[1] and text.startswith(self.section[1], after) else end

    def write_calls(self, calls: Calls, tools: Tools) -> str:
        texts = []
        for n, call in enumerate(calls):
            header = self.header_format.format(name=call.name, index=n)
            arguments = write_json(call.arguments, self.call_close)
            texts.append(f"{self.call_open}{header}{arguments}{self.arguments_close}{self.call_close}")
        return self.section[0] + "".join(texts) + self.section[1]

    def call_id(self, name: str, index: int) -> str:
        return self.id_format.format(name=name, index=index)
