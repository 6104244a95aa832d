"""Writes turns that were not sampled as the model itself would write them.

Environments, scripted policies and files write calls in one syntax, Hermes's, and thinking in ``<think>`` tags. A turn with
either is rendered by the model's chat template where that shows them, otherwise written in the model's syntax. Knows no ids.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from turnwise.core.records import Message
from turnwise.errors import RenderError
from turnwise.rollout.chat_template import Tools
from turnwise.rollout.conversion import as_field
from turnwise.rollout.parsers.syntax import THINKING_TAGS, ParsedTurn, ToolSyntax, same_calls
from turnwise.rollout.parsers.table import HERMES

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
        # whether no text stands between or behind the calls, where a message with fields has no place for it
        block = HERMES.next_block(text, 0, ()) if parsed.calls else None
        by_template = (
            self._by_template(parsed, tools)
            if (block is None or HERMES.parse(text[: block.start]).text.strip() == parsed.text.strip())
            else None
        )
        return by_template if by_template is not None else self._by_syntax(text, parsed, tools)

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
            if turn is not None and self._says_the_same(turn, parsed, tools):
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

    def _says_the_same(self, turn: str, parsed: ParsedTurn, tools: Tools) -> bool:
        read = self.syntax.parse(turn, tools, in_thought=bool(self.open_tag))
        return (
            same_calls(read.calls, parsed.calls)
            and read.text.strip() == parsed.text.strip()
            and read.thinking.strip() == parsed.thinking.strip()
        )

    def _by_syntax(self, text: str, parsed: ParsedTurn, tools: Tools) -> str:
        """The turn with its calls replaced, and with the thinking closed that the prompt has opened."""
        body = text if self.syntax is HERMES or not parsed.calls else self._replaced(text, parsed, tools)
        if not self.open_tag:
            return body
        if body.lstrip().startswith(self.open_tag):
            return body.lstrip().removeprefix(self.open_tag)
        return f"{THINKING_TAGS[self.open_tag]}\n\n{body}"

    def _replaced(self, text: str, parsed: ParsedTurn, tools: Tools) -> str:
        """All calls stand where the first one stood: some syntaxes write them as one list."""
        pieces, at = [], 0
        while (block := HERMES.next_block(text, at, ())) is not None:
            pieces.append(text[at : block.start])
            at = block.end
        written = self.syntax.write(self.syntax.with_own_ids(parsed.calls), tools)
        written = written.removesuffix(self.syntax.turn_end) if self.syntax.turn_end else written
        return pieces[0] + written + "".join([*pieces[1:], text[at:]])
