"""What a tool-call syntax is: where calls stand in a turn, how they are read, and how they are written.

A syntax finds the next part of a text that holds calls; this module scans the turn with it, skips the model's thinking, and
checks that what is written is read back. Knows no particular syntax, no tokens and no templates.
"""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from turnwise.core.protocols import ToolCall
from turnwise.errors import RenderError

Tools = Sequence[Mapping[str, Any]]
Calls = Sequence[ToolCall]
Tags = tuple[tuple[re.Pattern[str], re.Pattern[str]], ...]

THINKING_TAGS = {
    "<think>": "</think>",
    "<thinking>": "</thinking>",
    "<seed:think>": "</seed:think>",
    "[THINK]": "[/THINK]",
    "<|START_THINKING|>": "<|END_THINKING|>",
    "<|channel>thought": "<channel|>",
}
THINKING: Tags = tuple((re.compile(re.escape(a)), re.compile(re.escape(b))) for a, b in THINKING_TAGS.items())
NEEDS = 'error: a tool call needs {"name": text, "arguments": object}'


class CallFault(Exception):
    """Why one tool call cannot be read, in words for the model."""


@dataclass(frozen=True)
class Block:
    """``text[start:end]`` of a turn: one or more calls, or a call that cannot be read."""

    start: int
    end: int
    calls: tuple[ToolCall, ...] = ()
    faults: tuple[str, ...] = ()


def read_block(start: int, end: int, read: Callable[[], Iterable[ToolCall]]) -> Block:
    """The block of the calls that ``read`` returns; where it raises, of the fault."""
    try:
        return Block(start, end, tuple(read()))
    except CallFault as fault:
        return Block(start, end, (), (str(fault),))


def with_section(section: tuple[str, str], text: str, start: int, begin: int, end: int) -> tuple[int, int]:
    """``begin`` and ``end`` of a call, with the section's own markup where it stands right beside them."""
    opening, closing = section
    at = text.rfind(opening, start, begin) if opening else -1
    if at >= 0 and not text[at + len(opening) : begin].strip():
        begin = at
    after = skip_space(text, end)
    return begin, after + len(closing) if closing and text.startswith(closing, after) else end


@dataclass(frozen=True)
class ParsedTurn:
    """A turn without its markup: calls, calls that cannot be read, the text around them, and the thinking."""

    calls: tuple[ToolCall, ...] = ()
    faults: tuple[str, ...] = ()
    text: str = ""
    thinking: str = ""


@dataclass(frozen=True)
class ToolSyntax(ABC):
    """One way to write tool calls. ``markers`` are texts that occur only in calls of this syntax (or of relatives)."""

    name: str
    families: str  # models that write it, for the documentation
    markers: tuple[str, ...]
    reply: str = "<tool_response>\n{content}\n</tool_response>"  # a tool's reply inside a user message
    thinking: Tags = THINKING
    turn_end: str = ""  # text of the token that ends a turn with calls, where it is not that of other turns
    bare: bool = False  # calls may stand in a turn without any marker

    @abstractmethod
    def next_block(self, text: str, start: int, tools: Tools) -> Block | None:
        """The next calls at or after ``start``."""

    @abstractmethod
    def write_calls(self, calls: Calls, tools: Tools) -> str:
        """The calls in this syntax; need not check that they can be read back."""

    def clean(self, text: str) -> str:
        """The text around calls and thinking without the syntax's own markup."""
        return text

    def call_id(self, name: str, index: int) -> str:
        """The id of a call that names none itself."""
        return str(index)

    @cached_property
    def _anything(self) -> re.Pattern[str] | None:
        """Matches a text that may hold a call or thinking; None for a syntax whose calls have no marker."""
        if self.bare:
            return None
        return re.compile("|".join([*map(re.escape, self.markers), self._any_thought.pattern]))

    @cached_property
    def _any_thought(self) -> re.Pattern[str]:
        return re.compile("|".join(pattern.pattern for pair in self.thinking for pattern in pair))

    def parse(self, text: str, tools: Tools = (), in_thought: bool = False) -> ParsedTurn:
        """Read a turn. ``in_thought``: the prompt has already opened the model's thinking."""
        if not in_thought and self._anything is not None and not self._anything.search(text):
            return ParsedTurn(text=text)
        calls: list[ToolCall] = []
        faults: list[str] = []
        thoughts: list[str] = []
        visible: list[str] = []
        thinks = in_thought or bool(self._any_thought.search(text))
        at = self._skip_open_thought(text, in_thought, thoughts) if thinks else 0
        while at < len(text):
            block = self.next_block(text, at, tools)
            thought = _next_thought(text, at, self.thinking) if thinks else None
            if thought is not None and (block is None or thought[0] <= block.start):
                visible.append(text[at : thought[0]])
                thoughts.append(text[thought[1] : thought[2]])
                at = thought[3]
            elif block is not None:
                visible.append(text[at : block.start])
                calls += block.calls
                faults += block.faults
                at = block.end
            else:
                break
        rest = self.clean("".join([*visible, text[at:]]))
        if not faults and any(marker in rest for marker in self.markers):
            faults.append(f"error: the tool call cannot be read; write {self.example}")
        for n, call in enumerate(calls):
            if not call.id:  # set in place: a copy would make every text of the arguments valid Unicode once more
                object.__setattr__(call, "id", self.call_id(call.name, n))
        return ParsedTurn(tuple(calls), tuple(faults), rest, "\n".join(thoughts))

    def _skip_open_thought(self, text: str, in_thought: bool, thoughts: list[str]) -> int:
        """Where thinking that the prompt has opened ends. A closing tag without an opening one ends thinking as well."""
        ends = [end for _, close in self.thinking if (end := close.search(text))]
        first = min(ends, key=lambda end: end.start(), default=None)
        if first is None:
            thoughts += [text] if in_thought else []
            return len(text) if in_thought else 0
        opened = _next_thought(text, 0, self.thinking)
        if not in_thought and (self._in_a_call(text, first.start()) or (opened and opened[0] < first.start())):
            return 0
        thoughts.append(text[: first.start()])
        return first.end()

    def _in_a_call(self, text: str, at: int) -> bool:
        """Whether a position is inside a call: a text among the arguments of any of them may hold a closing tag."""
        block = self.next_block(text, 0, ())
        while block is not None and block.end <= at:
            block = self.next_block(text, block.end, ())
        return block is not None and block.start < at

    def with_own_ids(self, calls: Calls) -> tuple[ToolCall, ...]:
        """The calls with ids as this syntax gives them."""
        return tuple(replace(call, id=self.call_id(call.name, n)) for n, call in enumerate(calls))

    def write(self, calls: Calls, tools: Tools = ()) -> str:
        """The calls in this syntax. Raises ``RenderError`` for a call that the syntax cannot express."""
        text = self.write_calls(calls, tools)
        if not same_calls(self.parse(text, tools).calls, calls):
            shown = ", ".join(f"{call.name}({json.dumps(call.arguments)})" for call in calls)
            raise RenderError(f"the tool-call syntax {self.name} cannot express {shown:.300}")
        return text

    @cached_property
    def example(self) -> str:
        return self.write_calls((ToolCall("NAME", {"ARGUMENT": "VALUE"}),), ())


def _next_thought(text: str, start: int, tags: Tags) -> tuple[int, int, int, int] | None:
    """Begin of the next thinking, of its content, end of its content and end; without a closing tag it lasts to the end."""
    opened = [(match, close) for pattern, close in tags if (match := pattern.search(text, start))]
    if not opened:
        return None
    first, close = min(opened, key=lambda pair: pair[0].start())
    end = close.search(text, first.end())
    return first.start(), first.end(), end.start() if end else len(text), end.end() if end else len(text)


def same_calls(ours: Calls, theirs: Calls) -> bool:
    """Whether two lists hold the same calls, ids aside. Compared as JSON: in Python ``1 == True``."""
    return len(ours) == len(theirs) and all(
        a.name == b.name and json.dumps(a.arguments, sort_keys=True) == json.dumps(b.arguments, sort_keys=True)
        for a, b in zip(ours, theirs)
    )


# ------------------------------------------------------------------------- JSON

_DECODER = json.JSONDecoder()
_SPACE = re.compile(r"\s*")


def skip_space(text: str, at: int) -> int:
    """Where the white space that begins at ``at`` ends."""
    match = _SPACE.match(text, at)
    assert match is not None
    return match.end()


def read_json(text: str, at: int) -> tuple[Any, int]:
    """The JSON value that begins at ``at``, and where it ends."""
    try:
        return _DECODER.raw_decode(text, skip_space(text, at))
    except RecursionError:
        raise CallFault(NEEDS) from None
    except ValueError as fault:  # not JSON, or a number of thousands of digits
        reason = getattr(fault, "msg", "a number is too long")
        raise CallFault(f"error: the tool call is not JSON: {reason}") from None


def make_call(name: str, arguments: dict[str, Any], call_id: str = "") -> ToolCall:
    """A call whose arguments are not nested too deeply to be stored."""
    try:
        return ToolCall(name, arguments, id=call_id)
    except RecursionError:
        raise CallFault("error: the arguments of the tool call are nested too deeply") from None


def call_of(value: Any, name_key: str = "name", arguments_keys: Sequence[str] = ("arguments",)) -> ToolCall:
    """A call from its JSON object. An object without arguments calls with none, unless another key may hold them."""
    if not isinstance(value, dict) or not isinstance(value.get(name_key), str):
        raise CallFault(NEEDS.replace('"name"', f'"{name_key}"').replace('"arguments"', f'"{arguments_keys[0]}"'))
    key = next((key for key in arguments_keys if key in value), None)
    other = next((k for k in value if k not in (name_key, "id", "tool_call_id", "type")), None)
    if key is None and other is not None:
        raise CallFault(f'{NEEDS.replace("arguments", arguments_keys[0])}, not "{other:.40}"')
    arguments = value[key] if key is not None else {}
    if not isinstance(arguments, dict):
        raise CallFault(NEEDS.replace('"name"', f'"{name_key}"').replace('"arguments"', f'"{key}"'))
    call_id = value.get("id", value.get("tool_call_id", ""))
    return make_call(value[name_key], arguments, call_id if isinstance(call_id, str) else "")


def write_json(value: Any, *escape: str, ascii_only: bool = False) -> str:
    """JSON as chat templates write it; the texts of ``escape`` do not occur in it, so that a reader cannot stop at them."""
    text = json.dumps(value, ensure_ascii=ascii_only)
    for marker in (*escape, *(tag for pair in THINKING_TAGS.items() for tag in pair)):
        if marker and marker in text:
            text = text.replace(marker, f"\\u{ord(marker[0]):04x}{marker[1:]}")
    return text


# ------------------------------------------------------------- types of arguments


def is_text(tools: Tools, function: str, argument: str) -> bool | None:
    """Whether a tool's schema declares this argument as text; None if it does not say, or allows text and other types."""
    for tool in tools:
        schema = tool.get("function", tool)
        if not isinstance(schema, Mapping) or schema.get("name") != function:
            continue
        parameters = schema.get("parameters")
        properties = parameters.get("properties") if isinstance(parameters, Mapping) else None
        declared = properties.get(argument) if isinstance(properties, Mapping) else None
        kind = declared.get("type") if isinstance(declared, Mapping) else None
        return kind == "string" if isinstance(kind, str) else None
    return None


def tool_names(tools: Tools) -> set[str]:
    """The names of tools in OpenAI's schemas."""
    schemas = [tool.get("function", tool) for tool in tools]
    return {str(schema.get("name")) for schema in schemas if isinstance(schema, Mapping)}
