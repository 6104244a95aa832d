"""Plays an episode with a model that reads messages instead of ids: a server. No tokenizer is needed.

To the turn loop a ``ChatSession`` is both the session and the renderer. The dialogue is kept as the rest of the house keeps it,
with calls written into the text; what is sent has them in the field ``tool_calls``, and every tool reply names its call. Knows
neither the server nor the environment.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from turnwise.core.chat import ChatModel, ChatReply
from turnwise.core.protocols import Action, Generator, ToolCall
from turnwise.core.records import Completion, Message, Sampling
from turnwise.errors import ContextOverflow
from turnwise.rollout.conversion import AS_JSON, as_field
from turnwise.rollout.episode import UnforkedSession
from turnwise.rollout.parsers.syntax import ParsedTurn, tool_names
from turnwise.rollout.parsers.table import HERMES, SYNTAXES
from turnwise.rollout.renderer import Dialogue, Renderer

UNKNOWN_ID = -1  # stands for each token that a server has counted; the ids themselves are not known
NO_REPLY = "(no reply)"


class ChatSession(UnforkedSession):
    """One dialogue with a ``ChatModel``. The first argument of ``generate`` is not read: the model gets the messages."""

    def __init__(self, model: ChatModel, seed: int) -> None:
        self.model, self.seed = model, seed
        self.actions: list[tuple[Action, str]] = []  # with the text beside the calls, one for each turn taken
        self.dialogue = Dialogue([], (), "")
        self._reply: ChatReply | None = None

    # ------------------------------------------------------------ as the renderer
    def open(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]] = (), history: int = 0) -> Dialogue:
        self.dialogue = Dialogue(list(messages), tools, "", history=history)
        return self.dialogue

    def append_sampled(self, dialogue: Dialogue, tokens: Sequence[int]) -> Action:
        assert self._reply is not None, "a reply is read once"
        action, beside = read_action(self._reply, dialogue.tools)
        self.actions.append((action, beside))
        self._reply = None
        dialogue.messages.append(action.message)
        return action

    def append_observation(
        self,
        dialogue: Dialogue,
        messages: Sequence[Message],
        mask: bool = False,
        context: Sequence[Message] | None = None,
    ) -> None:
        assert not mask, "a served model records no masked context"
        dialogue.replace_context(context)
        dialogue.messages += messages

    def encode(self, text: str) -> list[int]:
        """A reference answer has no ids here."""
        return []

    # ------------------------------------------------------------- as the session
    async def generate(self, ids: Sequence[int], sampling: Sampling) -> Completion:
        sent = as_sent(self.dialogue.visible, self.actions)
        seed = self.seed + len(self.actions)
        self._reply = reply = await self.model.reply(sent, sampling, seed, self.dialogue.tools)
        return Completion([UNKNOWN_ID] * reply.tokens, (), (), (), reply.stop, reply.seconds)


def read_action(reply: ChatReply, tools: Sequence[dict[str, Any]]) -> tuple[Action, str]:
    """The action of a reply, and its text beside the calls. Where the server parsed no call, the text may hold some."""
    if reply.calls or reply.faults:
        written = HERMES.write_calls(reply.calls, tools) if reply.calls else ""
        text = "\n".join(part for part in (reply.text, written) if part)
        return Action(text, reply.calls, reply.faults, reply.thinking), reply.text
    parsed = read_text(reply.text, tools)
    calls = tuple(ToolCall(call.name, call.arguments, f"call_{n}") for n, call in enumerate(parsed.calls))
    thinking = reply.thinking or parsed.thinking
    return Action(reply.text, calls, parsed.faults, thinking), parsed.text.strip() if calls else reply.text


def read_text(text: str, tools: Sequence[dict[str, Any]]) -> ParsedTurn:
    """A reply whose server parses no calls, in the first syntax that reads one; which one the model writes is not known."""
    names, first_faulty = tool_names(tools), HERMES.parse(text, tools)
    for syntax in SYNTAXES.values():
        if not syntax.bare and not any(marker in text for marker in syntax.markers):
            continue
        parsed = syntax.parse(text, tools)
        if parsed.calls and (not syntax.bare or all(call.name in names for call in parsed.calls)):
            return parsed
        first_faulty = first_faulty if first_faulty.faults or syntax.bare else parsed
    return first_faulty


def as_sent(messages: Sequence[Message], actions: Sequence[tuple[Action, str]]) -> list[Message]:
    """The dialogue in the protocol's form. Its assistant messages are ``actions``, in order; an edited context lacks some.

    A tool reply without an id answers the first call that is still open. A call that got none is closed by ``NO_REPLY``, since
    servers refuse a dialogue with open calls. A tool reply that answers no call is sent as a user message."""
    turns = [n for n, message in enumerate(messages) if message["role"] == "assistant"]
    taken, left = dict[int, tuple[Action, str]](), list(actions)
    for n in reversed(turns):
        while left and left[-1][0].text != messages[n]["content"]:  # a turn that the context does not hold any more
            left.pop()
        if left:
            taken[n] = left.pop()
    out: list[Message] = []
    open_calls: list[str] = []
    for n, message in enumerate(messages):
        if message["role"] == "tool" and open_calls:
            named = message.get("tool_call_id")
            answered = named if named in open_calls else open_calls[0]
            open_calls.remove(answered)
            out.append({"role": "tool", "tool_call_id": answered, "content": message["content"]})
            continue
        out += [{"role": "tool", "tool_call_id": call, "content": NO_REPLY} for call in open_calls]
        open_calls = []
        if n in taken:
            action, beside = taken[n]
            calls = {"content": beside or None, "tool_calls": as_field(action.calls, AS_JSON)} if action.calls else {}
            out.append({"role": "assistant", "content": beside, **calls})
            open_calls = [call.id for call in action.calls]
        else:
            role = "user" if message["role"] == "tool" else message["role"]
            out.append({"role": role, "content": message["content"]})
    return out + [{"role": "tool", "tool_call_id": call, "content": NO_REPLY} for call in open_calls]


class LocalChat:
    """``generator`` samples for this chat alone; ``context``: ids that it can hold."""

    def __init__(self, generator: Generator, renderer: Renderer, context: int) -> None:
        self.generator, self.renderer, self.context = generator, renderer, context
        self._one_at_a_time = asyncio.Lock()

    @property
    def name(self) -> str:
        return f"policy@{self.generator.version}"

    async def reply(
        self,
        messages: Sequence[Message],
        sampling: Sampling,
        seed: int,
        tools: Sequence[Mapping[str, Any]] = (),
        schema: Mapping[str, Any] | None = None,
    ) -> ChatReply:
        """``schema`` is ignored: the prompt says what form the reply has."""
        dialogue = self.renderer.open(messages, [dict(tool) for tool in tools])
        room = self.context - len(dialogue.ids)
        if room < 1:
            raise ContextOverflow(f"the policy reads {self.context} tokens, the dialogue has {len(dialogue.ids)}")
        async with self._one_at_a_time:
            session = self.generator.open(seed)
            try:
                done = await session.generate(
                    dialogue.ids, replace(sampling, max_tokens=min(sampling.max_tokens, room))
                )
            finally:
                session.close()
        tokens = list(done.tokens)
        action = self.renderer.append_sampled(dialogue, tokens)
        counts: dict[str, Any] = {"stop": done.stop, "tokens": len(tokens), "seconds": done.seconds}
        return ChatReply(action.text, action.calls, action.faults, **counts)

    def close(self) -> None:
        """The generator is closed by whoever made it."""
