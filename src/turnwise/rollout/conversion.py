"""Adapts a dialogue to what a chat template accepts: a template may lack the role ``tool`` or ``system``, refuse two user
messages in a row, or want tool calls as a field of their message instead of text.

Which of these a template needs is found by rendering small dialogues once. Knows messages and syntaxes; no tokens.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache, partial
from itertools import takewhile
from typing import Any

from turnwise.core.protocols import ToolCall
from turnwise.core.records import Message
from turnwise.errors import RenderError
from turnwise.rollout.chat_template import Tools
from turnwise.rollout.parsers.choice import PROBE, PROBE_TOOLS
from turnwise.rollout.parsers.syntax import THINKING_TAGS, ParsedTurn, ToolSyntax, same_calls
from turnwise.rollout.parsers.table import HERMES

Render = Callable[[Sequence[Message], Tools, bool], str]

AS_TEXT, AS_OBJECTS, AS_JSON = "text", "objects", "json"  # calls: in the content, or in tool_calls with these arguments


@dataclass(frozen=True)
class Conversion:
    """What is changed in every dialogue before the template renders it."""

    syntax: ToolSyntax = HERMES
    calls: str = AS_TEXT
    tool_as_user: bool = False
    fold_system: bool = False
    join_user: bool = False
    describe_tools: bool = False
    refusal: str = ""  # why no tool reply can be rendered at all

    @property
    def changes_nothing(self) -> bool:
        return replace(self, syntax=HERMES, refusal="") == Conversion()

    def notes(self, with_tools: bool) -> list[str]:
        """What the user is told, one sentence for each change of what a message says."""
        notes = {
            "the chat template has no role tool; tool replies are sent as user messages": with_tools
            and self.tool_as_user,
            "the chat template has no role system; system messages are put in front of the first user message": self.fold_system,
            "the chat template wants alternating roles; user messages in a row are joined": self.join_user,
            "the chat template shows no tools; the first message describes them": with_tools and self.describe_tools,
        }
        return [note for note, applies in notes.items() if applies]

    def __call__(self, messages: Sequence[Message], tools: Tools = ()) -> list[Message]:
        out = self._with_replies(messages)
        if self.describe_tools and tools:
            out = _described(out, tools, self.syntax)
        if self.fold_system:
            out = _folded(out)
        return _joined(out) if self.join_user or self.tool_as_user else out

    def _with_replies(self, messages: Sequence[Message]) -> list[Message]:
        """Calls and tool replies as the template wants them. A reply without a call in a field is sent as a user message."""
        if self.calls == AS_TEXT and not self.tool_as_user:
            return list(messages)
        out: list[Message] = []
        open_calls: list[dict[str, Any]] = []
        for message in messages:
            if message["role"] == "assistant":
                message = message if self.calls == AS_TEXT else structured(message, self.syntax, self.calls)
                open_calls = list(message.get("tool_calls", ()))
            elif message["role"] == "tool" and open_calls and not self.tool_as_user:
                call = open_calls.pop(0)
                message = {"name": call["function"]["name"], **message, "tool_call_id": call["id"]}
            elif message["role"] == "tool":
                message = {"role": "user", "content": self.syntax.reply.format(content=message["content"])}
            out.append(message)
        return out


def structured(message: Message, syntax: ToolSyntax, form: str) -> Message:
    """An assistant message with calls and thinking in fields. A turn that cannot be read stays as it is."""
    content = message.get("content")
    if not isinstance(content, str) or "tool_calls" in message:
        return message
    return {**message, **_fields(content, syntax, form)}


@lru_cache(4096)
def _fields(text: str, syntax: ToolSyntax, form: str) -> Message:
    parsed = syntax.parse(text)
    if parsed.faults or parsed.text == text:
        return {"content": text}
    fields: Message = {"content": parsed.text.strip() if parsed.calls else parsed.text}
    if parsed.thinking:
        fields |= {"reasoning_content": parsed.thinking, "thinking": parsed.thinking}
    return {**fields, "tool_calls": as_field(parsed.calls, form)} if parsed.calls else fields


def as_field(calls: Sequence[ToolCall], form: str) -> list[dict[str, Any]]:
    """The value of ``tool_calls``."""
    write = partial(json.dumps, ensure_ascii=False) if form == AS_JSON else dict
    return [
        {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": write(call.arguments)}}
        for call in calls
    ]


def _described(messages: list[Message], tools: Tools, syntax: ToolSyntax) -> list[Message]:
    schemas = "\n".join(json.dumps(tool.get("function", tool), ensure_ascii=False) for tool in tools)
    text = f"You can call these tools:\n{schemas}\nTo call one, write {syntax.example} and wait for its reply."
    if messages and messages[0]["role"] == "system":
        return [{**messages[0], "content": f"{messages[0]['content']}\n{text}"}, *messages[1:]]
    return [{"role": "system", "content": text}, *messages]


def _folded(messages: list[Message]) -> list[Message]:
    """System messages at the front become the beginning of the first user message; later ones become user messages."""
    head = list(takewhile(lambda m: m["role"] == "system", messages))
    rest = [{**m, "role": "user"} if m["role"] == "system" else m for m in messages[len(head) :]]
    if not head:
        return rest
    text = "\n\n".join(m["content"] for m in head)
    if rest and rest[0]["role"] == "user":
        return [{**rest[0], "content": f"{text}\n\n{rest[0]['content']}"}, *rest[1:]]
    return [{"role": "user", "content": text}, *rest]


def _joined(messages: list[Message]) -> list[Message]:
    out: list[Message] = []
    for message in messages:
        if out and message["role"] == out[-1]["role"] == "user":
            out[-1] = {**out[-1], "content": f"{out[-1]['content']}\n{message['content']}"}
        else:
            out.append(message)
    return out


# ------------------------------------------------------------------------ probes

# contents that a template cannot change: digits have no case
_USER, _SYSTEM = {"role": "user", "content": "5172930648"}, {"role": "system", "content": "8046271935"}
_REPLY = {"role": "tool", "name": PROBE.name, "content": "3691508274"}
_NEXT = {"role": "user", "content": "6407193582"}


def find_conversion(
    render: Render, syntax: ToolSyntax, turn: str, end: str, describe_tools: bool = False
) -> tuple[Conversion, bool]:
    """The smallest conversion with which a template renders whole dialogues, and whether it then continues the text of a sampled
    turn. ``turn`` makes the call ``PROBE`` and is ended by ``end``."""
    base = Conversion(syntax, describe_tools=describe_tools)
    if _fault(render, [_SYSTEM, _USER], base):
        folded = replace(base, fold_system=True)
        base = base if _fault(render, [_SYSTEM, _USER], folded) else folded
    if _fault(render, [_USER, _NEXT], base):
        joined = replace(base, join_user=True)
        base = base if _fault(render, [_USER, _NEXT], joined) else joined
    dialogue = [_USER, {"role": "assistant", "content": turn}, _REPLY]
    forms = [replace(base, calls=calls) for calls in (AS_TEXT, AS_OBJECTS, AS_JSON)]
    usable = [c for c in forms if not _fault(render, dialogue, c)]
    if not usable:
        usable = [c for form in forms if not _fault(render, dialogue, c := replace(form, tool_as_user=True))]
    if not usable:
        return replace(base, refusal=_fault(render, dialogue, replace(base, tool_as_user=True))), False
    for c in usable:  # exact where the text of a sampled turn stays as it is when a reply follows
        prompt, whole = (render(c(part, PROBE_TOOLS), PROBE_TOOLS, True) for part in (dialogue[:1], dialogue))
        if whole.startswith(prompt + turn + end):
            return c, True
    return usable[0], False


def _fault(render: Render, messages: Sequence[Message], conversion: Conversion) -> str:
    """Why a template does not render a dialogue so; empty where all contents of user, system and tools are in its text."""
    tools = PROBE_TOOLS if len(messages) > 2 else ()
    try:
        text = render(conversion(messages, tools), tools, True)
    except Exception as fault:  # templates raise any exception
        return str(fault) or type(fault).__name__
    complete = all(m["content"] in text for m in messages if m["role"] != "assistant")
    called = not tools or PROBE.name in text.rpartition(_USER["content"])[2].lower()
    return "" if complete and called else "it leaves the reply out"


_EMPTY_THOUGHT = re.compile("|".join(rf"\s*{re.escape(a)}\s*{re.escape(b)}\s*" for a, b in THINKING_TAGS.items()))
_PROMPT: list[Message] = [{"role": "user", "content": "a"}]


@dataclass(frozen=True)
class TurnWriter:
    """``forms``: how the template takes ``tool_calls``; empty if it ignores them. ``ends``: texts that end a turn."""

    syntax: ToolSyntax
    render: Callable[[Sequence[Message], Tools, bool], str]
    ends: tuple[str, ...]
    forms: tuple[str, ...] = ()
    keep_empty_thought: bool = False  # keep the empty thinking that a template writes before a turn without any

    def __call__(self, text: str, tools: Sequence[dict[str, Any]] = ()) -> str:
        """The turn as the model would write it; unchanged where it already is, and where a call cannot be read."""
        if self.syntax is HERMES and not self.forms and not self.open_tag:
            return text
        parsed = HERMES.parse(text)
        if parsed.faults or not (parsed.calls or parsed.thinking or self.open_tag):
            return text
        block = HERMES.next_block(text, 0, ()) if parsed.calls else None
        # a message with fields has no place for text between or behind the calls
        if block is None or HERMES.parse(text[: block.start]).text.strip() == parsed.text.strip():
            by_template = self._by_template(parsed, tools)
            if by_template is not None:
                return by_template
        return self._by_syntax(text, parsed, tools)

    @cached_property
    def open_tag(self) -> str:
        """The tag of the thinking that the generation prompt opens; empty if it opens none."""
        prompt = self.render(_PROMPT, (), True).rstrip()
        return next((tag for tag in THINKING_TAGS if prompt.endswith(tag)), "")

    def _by_template(self, parsed: ParsedTurn, tools: Tools) -> str | None:
        """The turn as the template renders it with calls and thinking in fields; None if it renders something else."""
        for form in self.forms or ("",):
            message: Message = {"role": "assistant", "content": parsed.text.strip()}
            if parsed.thinking:
                message |= {"reasoning_content": parsed.thinking.strip("\n"), "thinking": parsed.thinking.strip("\n")}
            if parsed.calls:
                message["tool_calls"] = as_field(self.syntax.with_own_ids(parsed.calls), form)
            turn = self._rendered(message, tools)
            if turn is None:
                continue
            read = self.syntax.parse(turn, tools, in_thought=bool(self.open_tag))
            texts = [(t.text.strip(), t.thinking.strip()) for t in (read, parsed)]
            if same_calls(read.calls, parsed.calls) and texts[0] == texts[1]:
                return turn
        return None

    def _rendered(self, message: Message, tools: Tools) -> str | None:
        try:
            prompt, text = self.render(_PROMPT, tools, True), self.render([*_PROMPT, message], tools, False)
        except RenderError:
            return None
        if not text.startswith(prompt):
            return None
        turn = text[len(prompt) :].rstrip("\n")
        turn = next((turn.removesuffix(end) for end in self.ends if end and turn.endswith(end)), turn)
        empty = None if self.keep_empty_thought or "reasoning_content" in message else _EMPTY_THOUGHT.match(turn)
        return turn[empty.end() :] if empty else turn

    def _by_syntax(self, text: str, parsed: ParsedTurn, tools: Tools) -> str:
        """The turn with its calls replaced, and with the thinking closed that the prompt has opened."""
        body = text
        if self.syntax is not HERMES and parsed.calls:
            # all calls stand where the first one stood: some syntaxes write them as one list
            pieces, at = [], 0
            while (block := HERMES.next_block(text, at, ())) is not None:
                pieces.append(text[at : block.start])
                at = block.end
            written = self.syntax.write(self.syntax.with_own_ids(parsed.calls), tools)
            written = written.removesuffix(self.syntax.turn_end)
            body = pieces[0] + written + "".join([*pieces[1:], text[at:]])
        if not self.open_tag:
            return body
        if body.lstrip().startswith(self.open_tag):
            return body.lstrip().removeprefix(self.open_tag)
        return f"{THINKING_TAGS[self.open_tag]}\n\n{body}"
