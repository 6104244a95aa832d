"""Messages to token ids and back, token in, token out.

Sampled ids are never decoded and re-encoded. After each turn the chat template renders the whole dialogue; the text it adds
*behind* the text so far is encoded and appended. If the rendering does not start with that text, the template has rewritten
history, or old observations are dropped: the dialogue restarts from the new rendering and the turn is marked.

Knows nothing of environments, rewards or engines.
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
from turnwise.rollout.chat_template import fast_template
from turnwise.rollout.token_codec import fast_decoder, fast_encoder

log = logging.getLogger(__name__)

CHATML = (
    "{%- for m in messages -%}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{%- if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

CACHED_OPENINGS = 16  # first prompts: the groups of a step start concurrently
_TOOL_CALL = re.compile(r"<tool_call>(.*?)(?:</tool_call>|$)", re.DOTALL)


@dataclass
class Dialogue:
    """One conversation as the model reads it; ``ids`` always decode to ``text``."""

    messages: list[Message]
    tools: Sequence[dict[str, Any]]
    text: str
    ids: list[int] = field(default_factory=list)
    new_ids: list[int] = field(default_factory=list)  # ids appended since the last sampled token
    restarted: bool = False
    history: int = 0  # how many of the latest observations are visible; 0: all
    masked_ids: list[int] = field(default_factory=list)  # new_ids with the observations masked; empty if not requested

    @property
    def visible(self) -> list[Message]:
        """The messages the model reads: the first one, which is the task, and the latest observations."""
        turns = [n for n, message in enumerate(self.messages) if message["role"] == "assistant"]
        if not self.history or len(turns) < self.history:
            return self.messages
        turn = turns[-self.history]
        has_reply = turn + 1 < len(self.messages) and self.messages[turn + 1]["role"] == "tool"
        return [self.messages[0], *self.messages[turn if has_reply else turn + 1 :]]  # a tool's reply needs its call


class Renderer:
    """One tokenizer and its chat template."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        if not getattr(tokenizer, "chat_template", None):
            raise RenderError(
                "this model's tokenizer has no chat template; give one with --template chatml or --template FILE.jinja"
            )
        self.decode, self._encode, self._render = (
            fast_decoder(tokenizer),
            fast_encoder(tokenizer),
            fast_template(tokenizer),
        )
        self._openings: deque[tuple[list[Message], Sequence[dict[str, Any]], str, list[int]]] = deque(
            maxlen=CACHED_OPENINGS
        )
        self.stop_ids = self._find_stop_ids()
        probe = self._text([{"role": "user", "content": "a 1\nb"}], (), True)
        if self.decode(self.encode(probe)) != probe:
            raise RenderError(
                "this tokenizer does not decode a text to itself; dialogues could not be followed exactly"
            )
        if not self._is_append_only():
            log.warning(
                "the chat template does not continue the text of a sampled turn: every turn re-reads its whole dialogue, in "
                "rollouts and in training. Does it close turns with %r, and is that a special token of the tokenizer?",
                self.decode(self.stop_ids[:1]),
            )

    # ----------------------------------------------------------- dialogue
    def open(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]] = (), history: int = 0) -> Dialogue:
        text, ids = self._opening(list(messages), tools)
        return Dialogue(list(messages), tools, text, list(ids), list(ids), history=history)

    def _opening(self, messages: list[Message], tools: Sequence[dict[str, Any]]) -> tuple[str, list[int]]:
        """Text and ids of a first prompt, rendered once for all trajectories of a group; the latest entry is searched first."""
        for cached, cached_tools, text, ids in self._openings:
            if cached == messages and cached_tools == tools:
                return text, ids
        text = self._text(messages, tools, True)
        ids = self.encode(text)
        self._openings.appendleft((copy.deepcopy(messages), copy.deepcopy(tools), text, ids))
        return text, ids

    def append_sampled(self, dialogue: Dialogue, tokens: Sequence[int]) -> Action:
        """Append the sampled tokens exactly, and parse them as an action."""
        dialogue.ids += tokens
        text = self.decode(tokens)
        dialogue.text += text
        action = parse_action(self.decode(tokens[:-1]) if tokens and tokens[-1] in self.stop_ids else text)
        dialogue.messages.append(action.message)
        dialogue.new_ids, dialogue.masked_ids, dialogue.restarted = [], [], False
        return action

    def append_observation(self, dialogue: Dialogue, messages: Sequence[Message], mask: bool = False) -> None:
        """Append the environment's messages and the generation prompt; ``mask`` also stores them with the contents masked."""
        dialogue.messages += messages
        full = self._text(dialogue.visible, dialogue.tools, True)
        prefix = len(dialogue.text) if full.startswith(dialogue.text) else 0
        if full.startswith(dialogue.text):
            dialogue.new_ids = self.encode(full[len(dialogue.text) :])
            dialogue.ids += dialogue.new_ids
        else:
            dialogue.ids = self.encode(full)
            dialogue.new_ids, dialogue.restarted = list(dialogue.ids), True
        dialogue.text = full
        if mask and messages:
            dialogue.masked_ids = self._masked(dialogue, prefix, [str(m.get("content", "")) for m in messages])

    def _masked(self, dialogue: Dialogue, prefix: int, contents: list[str]) -> list[int]:
        """The new ids, which encode the text behind ``prefix`` characters, with the contents of the last messages masked."""
        visible, count = dialogue.visible, len(contents)
        earlier, last = visible[: len(visible) - count], visible[len(visible) - count :]
        replaced = [{**m, "content": text} for m, text in zip(last, observation_mask.sentinels(count))]
        with_sentinels = self._text([*earlier, *replaced], dialogue.tools, True)
        spans = observation_mask.content_spans(dialogue.text, with_sentinels, contents)
        shifted = [(begin - prefix, end - prefix) for begin, end in spans]
        return observation_mask.mask_spans(self.tokenizer, dialogue.text[prefix:], dialogue.new_ids, shifted)

    def encode_turn(self, text: str) -> list[int]:
        """The ids of a turn that was not sampled (a demonstration), ended like a sampled one."""
        return [*self.encode(text), self.stop_ids[0]]

    def renders_tools(self, tools: Sequence[dict[str, Any]]) -> bool:
        """Whether the template renders tools; many ignore them silently."""
        prompt = [{"role": "user", "content": "a"}]
        return self._text(prompt, tools, True) != self._text(prompt, (), True)

    # ------------------------------------------------------------ helpers
    def _is_append_only(self) -> bool:
        """Whether the template continues the text of a sampled turn in a plain dialogue."""
        dialogue = self.open([{"role": "user", "content": "a"}])
        self.append_sampled(dialogue, self.encode_turn("b"))
        try:
            self.append_observation(dialogue, [{"role": "user", "content": "c"}])
        except RenderError:  # the template refuses this plain dialogue: nothing can be said about it
            return True
        return not dialogue.restarted

    def encode(self, text: str) -> list[int]:
        return list(self._encode(text))

    def _text(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]], open_turn: bool) -> str:
        try:
            return self._render(messages, tools, open_turn)
        except Exception as fault:  # templates raise any exception
            roles = [m.get("role") for m in messages]
            raise RenderError(f"the chat template refused a dialogue with roles {roles}: {fault}") from fault

    def _find_stop_ids(self) -> tuple[int, ...]:
        """The token the template writes after an assistant turn, then the tokenizer's own end of sequence."""
        marker = "x7Q"
        text = self._text([{"role": "user", "content": "a"}, {"role": "assistant", "content": marker}], (), False)
        if marker not in text:
            raise RenderError("the chat template does not render assistant messages; dialogues could not be followed")
        after = self.encode(text[text.rindex(marker) + len(marker) :])
        added = getattr(self.tokenizer, "added_tokens_decoder", {})
        special = {*self.tokenizer.all_special_ids, *(i for i, token in added.items() if token.special)}
        ends = [i for i in after if i in special][:1]
        eos = self.tokenizer.eos_token_id
        if eos is not None and eos not in ends:
            ends.append(int(eos))
        if not ends:
            raise RenderError("neither the chat template nor the tokenizer has a token that ends a turn")
        return tuple(ends)


def parse_action(text: str) -> Action:
    """Parse the tool calls of a turn: ``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``."""
    calls: list[ToolCall] = []
    faults: list[str] = []
    for body in _TOOL_CALL.findall(text):
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
