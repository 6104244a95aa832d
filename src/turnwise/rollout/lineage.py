"""Which recorded turn a call of an agent continues: a message prefix proposes, a token prefix decides.

An agent sends whole dialogues. An assistant message that it sends back is a pointer to the ids that were sampled; it is never
rendered again. Where no recorded turn is a prefix of the messages, or the template writes the history differently, a new sequence
begins, with its cause. Sampled tokens belong to one turn each, however many sequences repeat them as context.

Knows messages and dialogues; neither the agent, nor the wire, nor rewards.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from turnwise.core.protocols import Action
from turnwise.core.records import Message
from turnwise.core.text import clean
from turnwise.rollout.parsers.syntax import THINKING_TAGS
from turnwise.rollout.renderer import Dialogue, Renderer

CONTINUED = "continued"  # token for token behind the turn before
OPENING = "opening"  # the first call
SUB_AGENT = "sub-agent"  # another first message
COMPACTION = "compaction"  # the same first messages, the history between replaced or dropped
REWRITTEN = "rewritten"  # an assistant message that was not sampled in its place
TEMPLATE = "template"  # the chat template writes the history differently
THINKING = "thinking"  # the chat template leaves earlier thinking out
INTERLEAVED = "interleaved"  # continues a turn that is not the last one
BRANCH = "branch"  # continues a turn that was continued before
SIBLING = "sibling"  # asks what was asked before: a second answer to the same messages
SAME_TOKENS = (CONTINUED, INTERLEAVED, BRANCH, SIBLING)  # the ids of a recorded turn are read again as they are


@dataclass(frozen=True)
class RecordedTurn:
    """A dialogue up to and including one sampled turn."""

    number: int  # of the turn in the episode
    dialogue: Dialogue


@dataclass
class Placement:
    """Where a call stands: the dialogue to sample from, and how it follows the turn before."""

    dialogue: Dialogue
    keys: list[str]  # digest of every prefix of the messages
    cause: str
    difference: str = ""  # where the ids are others than recorded: the first such token

    @property
    def restart(self) -> bool:
        return self.cause not in (CONTINUED, OPENING)

    @property
    def context(self) -> tuple[int, ...]:
        """The ids that the turn of this call records: the new ones, or all of them where a sequence begins."""
        return tuple(self.dialogue.new_ids if self.cause == CONTINUED else self.dialogue.ids)


@dataclass
class Lineage:
    """The dialogues of one episode."""

    renderer: Renderer
    turns: dict[str, RecordedTurn] = field(default_factory=dict)  # by the digest of all messages up to the turn
    continued: set[str] = field(default_factory=set)  # digests of turns that a later call continued
    openings: set[str] = field(default_factory=set)  # digests of first messages
    answered: set[str] = field(default_factory=set)  # digests of all messages of calls that were answered
    last: str = ""  # digest of the turn recorded last
    causes: Counter[str] = field(default_factory=Counter)
    differences: dict[str, str] = field(default_factory=dict)  # by cause, the first one of the episode
    holders: dict[str, str] = field(default_factory=dict)  # by digest of a prefix: the latest turn behind that prefix

    def place(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]]) -> Placement:
        """Find the turn that ``messages`` continue, and render what is new."""
        keys = prefix_digests(messages, tools)
        recorded = next((n for n in range(len(messages), 0, -1) if keys[n] in self.turns), 0)  # of the longest prefix
        tail = [readable(message) for message in messages[recorded:]]
        if recorded and not any(message["role"] == "assistant" for message in tail):
            return self._continue(keys, recorded, tail)
        whole = []
        for message in messages:
            plain = readable(message)
            calls = [_call(call) for call in message.get("tool_calls") or ()]
            if plain["role"] == "assistant" and calls:  # not sampled in this place: written in the model's own syntax
                written = "".join(
                    f'<tool_call>{{"name": {json.dumps(name)}, "arguments": {text}}}</tool_call>'
                    for name, text in calls
                )
                plain = {"role": "assistant", "content": self.renderer.turn_text(plain["content"] + written, tools)}
            whole.append(plain)
        dialogue = self.renderer.open(whole, tools)
        if keys[-1] in self.answered:
            return Placement(dialogue, keys, SIBLING)
        placement = Placement(dialogue, keys, self._cause(messages, keys, recorded))
        holder = next((self.holders[key] for key in reversed(keys[1:]) if key in self.holders), self.last)
        return self._explained(placement, holder)

    def _explained(self, placement: Placement, holder: str) -> Placement:
        """The placement with the first token in which it differs from the recorded turn ``holder``, once for each cause."""
        if holder in self.turns and placement.cause not in self.differences:
            before = self.turns[holder].dialogue.ids
            placement.difference = first_difference(before, placement.dialogue.ids, self.renderer.decode)
        return placement

    def _continue(self, keys: list[str], recorded: int, tail: list[Message]) -> Placement:
        key = keys[recorded]
        dialogue = copied(self.turns[key].dialogue)
        self.renderer.append_observation(dialogue, tail)
        if dialogue.restarted:
            # a template that leaves earlier thinking out closes fewer thoughts than were sampled
            sampled, rendered = (
                sum(text.count(tag) for tag in set(THINKING_TAGS.values()))
                for text in (self.turns[key].dialogue.text, dialogue.text)
            )
            return self._explained(Placement(dialogue, keys, THINKING if sampled > rendered else TEMPLATE), key)
        if key in self.continued:
            return Placement(dialogue, keys, SIBLING if keys[-1] in self.answered else BRANCH)
        return Placement(dialogue, keys, CONTINUED if key == self.last else INTERLEAVED)

    def _cause(self, messages: Sequence[Message], keys: list[str], recorded: int) -> str:
        """Why a new sequence begins where no recorded turn is continued."""
        if not self.turns:
            return OPENING
        if recorded or any(message["role"] == "assistant" for message in messages):
            shared = any(key in self.openings for key in keys[1:])
            return REWRITTEN if recorded or not shared else COMPACTION
        return COMPACTION if keys[1] in self.openings and keys[-1] not in self.openings else SUB_AGENT

    def record(self, placement: Placement, tokens: Sequence[int], echo: Message) -> None:
        """Keep the turn that was sampled behind ``placement``; ``echo`` is the message that the agent gets and may send back."""
        for key in placement.keys[1:]:
            if key in self.turns:
                self.continued.add(key)
        if placement.cause in (OPENING, SUB_AGENT, COMPACTION, REWRITTEN):
            self.openings.update(placement.keys[1:3])
        self.causes[placement.cause] += 1
        self.answered.add(placement.keys[-1])
        if placement.difference:
            self.differences.setdefault(placement.cause, placement.difference)
        self.last = extended(placement.keys[-1], echo)
        self.holders.update(dict.fromkeys([*placement.keys[1:], self.last], self.last))
        self.turns[self.last] = RecordedTurn(len(self.turns), copied(placement.dialogue))

    def sample(self, placement: Placement, tokens: Sequence[int]) -> Action:
        """Append the sampled tokens to the dialogue of a placement, and read them as an action."""
        placement.dialogue = copied(placement.dialogue)
        return self.renderer.append_sampled(placement.dialogue, tokens)


def copied(dialogue: Dialogue) -> Dialogue:
    """A dialogue that can be continued without changing the original."""
    messages, ids, new_ids = list(dialogue.messages), list(dialogue.ids), list(dialogue.new_ids)
    return replace(dialogue, messages=messages, ids=ids, new_ids=new_ids, masked_ids=[])


def first_difference(before: Sequence[int], now: Sequence[int], decode: Callable[[Sequence[int]], str]) -> str:
    """The first token in which two sequences differ, with what follows it in both."""
    at = next((n for n, (a, b) in enumerate(zip(before, now)) if a != b), min(len(before), len(now)))
    pieces = [repr(decode(ids[at : at + 6])) if at < len(ids) else "nothing" for ids in (before, now)]
    return f"at token {at}: recorded {pieces[0]}, now {pieces[1]}"


def prefix_digests(messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> list[str]:
    """The digest of the tools, then of every prefix of the messages."""
    keys = [_digest("", json.dumps(list(tools), sort_keys=True, default=str))]
    for message in messages:
        keys.append(extended(keys[-1], message))
    return keys


def extended(key: str, message: Message) -> str:
    """The digest of a prefix and one more message."""
    return _digest(key, canonical(message))


def _digest(key: str, text: str) -> str:
    return hashlib.sha256(f"{key}\n{text}".encode("utf-8", "replace")).hexdigest()[:32]


def canonical(message: Message) -> str:
    """A message as it is compared: ids of calls, key order, spaces inside JSON arguments and empty fields do not count."""
    calls = [_call(call) for call in message.get("tool_calls") or ()]
    content = message_text(message)
    return json.dumps([message["role"], content.strip() if message["role"] == "assistant" else content, calls])


def _call(call: Mapping[str, Any]) -> list[Any]:
    function = call.get("function", call)
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):
        with contextlib.suppress(ValueError):  # not JSON: compared as text
            arguments = json.loads(arguments or "{}")
    return [function.get("name"), json.dumps(arguments, sort_keys=True)]


def message_text(message: Message) -> str:
    """The text of a message, whose content may be a list of parts or missing."""
    content = message.get("content")
    if isinstance(content, list):
        return "".join(str(part.get("text", "")) for part in content if isinstance(part, Mapping))
    return "" if content is None else str(content)


def readable(message: Message) -> Message:
    """A message of the wire as a dialogue holds it: role, text, and the name and call of a tool reply."""
    role = "system" if message["role"] == "developer" else message["role"]
    of_tool = {key: message[key] for key in ("name", "tool_call_id") if message.get(key)} if role == "tool" else {}
    return {"role": role, "content": clean(message_text(message)), **of_tool}
