"""Messages to token ids and back, token in, token out.

The ids a policy sampled are never decoded and encoded again. After each turn the chat template renders the whole dialogue;
what it adds *behind* the text so far is encoded and appended. If it does not begin with that text, the template has
rewritten history, or old observations are left out: the dialogue restarts on the fresh rendering and the turn is marked.

This module knows nothing of environments, rewards or engines.
"""

from __future__ import annotations

import copy
import json
import logging
import re
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from turnwise.core.protocols import Action, ToolCall
from turnwise.core.records import Message
from turnwise.errors import RenderError
from turnwise.rollout import observation_mask
from turnwise.rollout.chat_template import renderer
from turnwise.rollout.token_codec import decoder, encoder

log = logging.getLogger(__name__)

CHATML = (
    "{%- for m in messages -%}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{%- if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

RECENT = 16  # openings remembered: the groups of a step begin side by side
_CALL = re.compile(r"<tool_call>(.*?)(?:</tool_call>|$)", re.DOTALL)


@dataclass
class Dialogue:
    """One conversation as the model reads it: ``ids`` and ``text`` always describe the same thing."""

    messages: list[Message]
    tools: Sequence[dict[str, Any]]
    text: str
    ids: list[int] = field(default_factory=list)
    fresh: list[int] = field(default_factory=list)  # ids appended since the last sampled token
    restarted: bool = False
    history: int = 0  # how many of the latest observations the model reads; 0: all
    blind: list[int] = field(default_factory=list)  # fresh with what was told masked; empty where nobody asked

    @property
    def visible(self) -> list[Message]:
        """What the model reads of it: the first message, which is the task, and the latest observations."""
        acts = [n for n, message in enumerate(self.messages) if message["role"] == "assistant"]
        if not self.history or len(acts) < self.history:
            return self.messages
        act = acts[-self.history]
        answered = act + 1 < len(self.messages) and self.messages[act + 1]["role"] == "tool"
        return [self.messages[0], *self.messages[act if answered else act + 1 :]]  # a tool's reply needs its call


class Renderer:
    """One tokenizer and its chat template."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        if not getattr(tokenizer, "chat_template", None):
            raise RenderError(
                "this model's tokenizer has no chat template; give one with --template chatml or --template FILE.jinja"
            )
        self.decode, self._encode, self._render = decoder(tokenizer), encoder(tokenizer), renderer(tokenizer)
        self._openings: deque[tuple[list[Message], Sequence[dict[str, Any]], str, list[int]]] = deque(maxlen=RECENT)
        self.stop_ids = self._find_stop_ids()
        probe = self._text([{"role": "user", "content": "a 1\nb"}], (), True)
        if self.decode(self.encode(probe)) != probe:
            raise RenderError(
                "this tokenizer does not give back the text it was given; dialogues could not be followed exactly"
            )
        if not self._goes_on():
            log.warning(
                "the chat template does not go on where a turn ended: every turn is read and learned from the beginning of its "
                "dialogue. Does it close turns with %r, and is that a special token of the tokenizer?",
                self.decode(self.stop_ids[:1]),
            )

    # ----------------------------------------------------------- dialogue
    def open(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]] = (), history: int = 0) -> Dialogue:
        text, ids = self._opening(list(messages), tools)
        return Dialogue(list(messages), tools, text, list(ids), list(ids), history=history)

    def _opening(self, messages: list[Message], tools: Sequence[dict[str, Any]]) -> tuple[str, list[int]]:
        """Rendered once for all the trajectories of a group, which open alike and one after the other: the latest comes first."""
        for known, with_tools, text, ids in self._openings:
            if known == messages and with_tools == tools:
                return text, ids
        text = self._text(messages, tools, True)
        ids = self.encode(text)
        self._openings.appendleft((copy.deepcopy(messages), copy.deepcopy(tools), text, ids))
        return text, ids

    def hear(self, dialogue: Dialogue, tokens: Sequence[int]) -> Action:
        """Append what the policy sampled, exactly, and read it."""
        dialogue.ids += tokens
        said = self.decode(tokens)
        dialogue.text += said
        action = parse(self.decode(tokens[:-1]) if tokens and tokens[-1] in self.stop_ids else said)
        dialogue.messages.append(action.message)
        dialogue.fresh, dialogue.blind, dialogue.restarted = [], [], False
        return action

    def tell(self, dialogue: Dialogue, messages: Sequence[Message], blind: bool = False) -> None:
        """Append the environment's answer and the opening of the next turn; ``blind``: and note them with the answer masked."""
        dialogue.messages += messages
        full = self._text(dialogue.visible, dialogue.tools, True)
        known = len(dialogue.text) if full.startswith(dialogue.text) else 0
        if full.startswith(dialogue.text):
            dialogue.fresh = self.encode(full[len(dialogue.text) :])
            dialogue.ids += dialogue.fresh
        else:
            dialogue.ids = self.encode(full)
            dialogue.fresh, dialogue.restarted = list(dialogue.ids), True
        dialogue.text = full
        if blind and messages:
            dialogue.blind = self._masked(dialogue, known, [str(m.get("content", "")) for m in messages])

    def _masked(self, dialogue: Dialogue, known: int, said: list[str]) -> list[int]:
        """The fresh ids, which encode the text behind ``known``, with the last messages' words masked."""
        seen = dialogue.visible
        last = [
            {**m, "content": mark} for m, mark in zip(seen[len(seen) - len(said) :], observation_mask.marks(len(said)))
        ]
        marked = self._text([*seen[: len(seen) - len(said)], *last], dialogue.tools, True)
        where = [(a - known, b - known) for a, b in observation_mask.places(dialogue.text, marked, said)]
        return observation_mask.masked(self.tokenizer, dialogue.text[known:], dialogue.fresh, where)

    def encode_turn(self, text: str) -> list[int]:
        """The ids of a turn somebody else wrote (a demonstration), closed like a sampled one."""
        return [*self.encode(text), self.stop_ids[0]]

    def shows(self, tools: Sequence[dict[str, Any]]) -> bool:
        """Whether the template says anything of tools; many leave them out without a word."""
        asked = [{"role": "user", "content": "a"}]
        return self._text(asked, tools, True) != self._text(asked, (), True)

    # ------------------------------------------------------------- pieces
    def _goes_on(self) -> bool:
        """Whether a plain dialogue grows behind what was said."""
        dialogue = self.open([{"role": "user", "content": "a"}])
        self.hear(dialogue, self.encode_turn("b"))
        try:
            self.tell(dialogue, [{"role": "user", "content": "c"}])
        except RenderError:  # a template for other dialogues
            return True
        return not dialogue.restarted

    def encode(self, text: str) -> list[int]:
        return list(self._encode(text))

    def _text(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]], open_turn: bool) -> str:
        try:
            return self._render(messages, tools, open_turn)
        except Exception as fault:  # templates raise whatever they like
            roles = [m.get("role") for m in messages]
            raise RenderError(f"the chat template refused a dialogue with roles {roles}: {fault}") from fault

    def _find_stop_ids(self) -> tuple[int, ...]:
        """The token the template puts behind an assistant turn, then the tokenizer's own end of sequence."""
        marker = "x7Q"
        text = self._text([{"role": "user", "content": "a"}, {"role": "assistant", "content": marker}], (), False)
        if marker not in text:
            raise RenderError("the chat template leaves out what the assistant said; dialogues could not be followed")
        behind = self.encode(text[text.rindex(marker) + len(marker) :])
        added = getattr(self.tokenizer, "added_tokens_decoder", {})
        special = {*self.tokenizer.all_special_ids, *(i for i, token in added.items() if token.special)}
        ends = [i for i in behind if i in special][:1]
        eos = self.tokenizer.eos_token_id
        if eos is not None and eos not in ends:
            ends.append(int(eos))
        if not ends:
            raise RenderError("neither the chat template nor the tokenizer has a token that ends a turn")
        return tuple(ends)


def parse(text: str) -> Action:
    """Read the tool calls of a turn: ``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``."""
    calls: list[ToolCall] = []
    faults: list[str] = []
    for body in _CALL.findall(text):
        try:
            value = json.loads(body)
            name, arguments = value["name"], value.get("arguments", {})
            if not isinstance(name, str) or not isinstance(arguments, dict):
                raise TypeError
            calls.append(ToolCall(name, arguments, id=str(len(calls))))
        except ValueError as fault:  # not JSON, or a number of thousands of digits
            faults.append(f"error: the tool call is not JSON: {getattr(fault, 'msg', 'a number is too long')}")
        except (KeyError, TypeError, AttributeError, RecursionError):
            faults.append('error: a tool call needs {"name": text, "arguments": object}')
    return Action(text, tuple(calls), tuple(faults))
