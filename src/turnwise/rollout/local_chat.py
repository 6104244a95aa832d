"""A local model as a ``ChatModel``: its chat template renders the messages, its generator samples the reply.

Requests are sampled one at a time. A reply is then a function of weights, messages and seed alone, and not of what else is in the
batch, so that a run that asks its own policy repeats bit for bit. Knows no engine.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from turnwise.core.chat import ChatReply
from turnwise.core.protocols import Generator
from turnwise.core.records import Message, Sampling
from turnwise.errors import ContextOverflow
from turnwise.rollout.renderer import Renderer


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
        return ChatReply(
            action.text, action.calls, action.faults, stop=done.stop, tokens=len(tokens), seconds=done.seconds
        )

    def close(self) -> None:
        """The generator is closed by whoever made it."""
