"""Harmony, the format of gpt-oss: a turn is a sequence of messages on channels; a call is a message to a recipient."""

from __future__ import annotations

import re
from dataclasses import dataclass

from turnwise.errors import RenderError
from turnwise.rollout.parsers.syntax import (
    NEEDS,
    Block,
    CallFault,
    Calls,
    Tags,
    Tools,
    ToolSyntax,
    make_call,
    read_json,
    write_json,
)

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
