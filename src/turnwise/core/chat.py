"""A model that reads messages and replies with a message: the protocol that servers and local models share. No implementation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from turnwise.core.protocols import ToolCall
from turnwise.core.records import Message, Sampling, Stop


@dataclass(frozen=True, slots=True)
class ChatReply:
    """One reply. ``faults``: tool calls that could not be read, in words for the model."""

    text: str
    calls: tuple[ToolCall, ...] = ()
    faults: tuple[str, ...] = ()
    thinking: str = ""
    stop: Stop = Stop.TOKEN
    tokens: int = 0  # that the model counted for this reply; 0 if it does not tell
    seconds: float = 0.0


class ChatModel(Protocol):
    """Replies to a dialogue. Raises ``ServerFault`` where it cannot, ``ContextOverflow`` where the dialogue is too long."""

    @property
    def name(self) -> str:
        """Identifies the model and its weights: two models of one name reply alike."""
        ...

    async def reply(
        self,
        messages: Sequence[Message],
        sampling: Sampling,
        seed: int,
        tools: Sequence[Mapping[str, Any]] = (),
        schema: Mapping[str, Any] | None = None,
    ) -> ChatReply:
        """The next message. ``schema``: a JSON schema that the text should satisfy; a model may ignore it."""
        ...

    def close(self) -> None: ...
