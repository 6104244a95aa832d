"""The call syntax of FunctionGemma and Gemma 4: ``call:NAME{key:value}`` with a special token as the quote of texts."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

from turnwise.rollout.parsers.syntax import Block, CallFault, Calls, Tools, ToolSyntax, make_call, skip_space

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
        header = re.compile(r"\s*call:([^\s{]+)\s*(?=\{)").match(body)
        try:
            if header is None:
                raise CallFault(f"error: the tool call has no readable name; write {self.example}")
            arguments, at = self._read(body, header.end(), 0)
            if body[at:].strip():
                raise CallFault("error: the arguments of the tool call are not one object")
            return Block(begin, end, (make_call(header[1], arguments),))
        except CallFault as fault:
            return Block(begin, end, (), (str(fault),))

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
            return self._object(text, at + 1, depth)
        if text.startswith("[", at):
            return self._list(text, at + 1, depth)
        word = _WORD.match(text, at)
        if word is None:
            raise CallFault("error: a value of the tool call is missing")
        try:
            return json.loads(word[0]), word.end()
        except ValueError:
            return word[0], word.end()

    def _object(self, text: str, at: int, depth: int) -> tuple[dict[str, Any], int]:
        value: dict[str, Any] = {}
        while not text.startswith("}", at := skip_space(text, at)):
            key = _KEY.match(text, at)
            if key is None:
                raise CallFault("error: an argument of the tool call has no readable name")
            value[key[1]], at = self._read(text, key.end(), depth + 1)
            at = self._separated(text, at, "}")
        return value, at + 1

    def _list(self, text: str, at: int, depth: int) -> tuple[list[Any], int]:
        value: list[Any] = []
        while not text.startswith("]", at := skip_space(text, at)):
            item, at = self._read(text, at, depth + 1)
            value.append(item)
            at = self._separated(text, at, "]")
        return value, at + 1

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
